// Measures the shared-memory plane over pinned threads, against a yardstick of the same process, in
// which each thread scales a tensor of its own in place. `mib` are what each rank puts in. Each
// round measures everything once, so that what disturbs the machine disturbs all of it.
//
// usage: local_plane_bench [ranks=2] [mib=64] [repetitions=30] [slots=4] [slot_kib=256] [host=0]
// host=1: over a file that each thread maps for itself, as processes do. "allreduce by tree" is the
// allreduce in a job with one slot per rank.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "ops/cpu/kernels.h"
#include "ops/shm/host_memory.h"
#include "ops/shm/plane.h"

namespace farandole {
namespace {

struct Setup {
  int ranks = 2;
  int64_t bytes = 64 << 20;
  int repetitions = 30;
  HeapMemory::Options options;
  bool is_host = false;
};

void PinTo(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu) % std::thread::hardware_concurrency(), &set);
  (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // only a better measurement
}

/// Something that every rank does at the same time.
struct Measured {
  std::string name;
  std::function<void(int rank)> body;
  std::vector<double> ms = {};  ///< Of each round, the slowest rank's; ascending once measured.
};

/// Runs all of `bodies` once in each of `repetitions` rounds.
void TimeAll(const Setup& setup, std::vector<Measured>& bodies) {
  std::barrier together(setup.ranks);
  const size_t runs = static_cast<size_t>(setup.repetitions) * bodies.size();
  std::vector<std::vector<int64_t>> times(static_cast<size_t>(setup.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setup.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      PinTo(rank);
      for (size_t i = 0; i < runs; ++i) {
        together.arrive_and_wait();
        const int64_t begin_ns = SteadyClock().NowNs();
        bodies[i % bodies.size()].body(rank);
        times[static_cast<size_t>(rank)].push_back(SteadyClock().NowNs() - begin_ns);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < runs; ++i) {
    int64_t slowest = 0;
    for (const auto& of_rank : times) slowest = std::max(slowest, of_rank[i]);
    const double ms = static_cast<double>(slowest) / static_cast<double>(kNsPerMs);
    bodies[i % bodies.size()].ms.push_back(ms);
  }
  for (Measured& body : bodies) std::sort(body.ms.begin(), body.ms.end());
}

void Report(const Setup& setup, const Measured& what, const Measured& yardstick) {
  const size_t middle = what.ms.size() / 2;
  std::printf("%-20s median %10.4f ms  best %10.4f ms  %8.3f GB/s  ratio median %.3f best %.3f\n",
              what.name.c_str(), what.ms[middle], what.ms[0],
              static_cast<double>(setup.bytes) / what.ms[middle] / 1e6,
              yardstick.ms[middle] / what.ms[middle], yardstick.ms[0] / what.ms[0]);
}

void Finish(PlaneOperation& operation, FutexDoorbell& bell) {
  constexpr int kSpins = 20'000;
  for (int waits = 0;;) {
    const uint32_t ticket = bell.Ticket();
    const Progress progress = operation.Step();
    if (progress.state == Progress::State::kDone) return;
    if (progress.state == Progress::State::kFailed) std::abort();
    waits = progress.state == Progress::State::kMoved ? 0 : waits + 1;
    if (waits == 0) bell.StayAwake();
    if (waits > kSpins && progress.poll_after_ns == kByDoorbell && bell.MaySleep())
      bell.Sleep(FutexDoorbell::Listener::kEngine, ticket, -1);
  }
}

/// The planes of all ranks, and for each a tensor to put in, one to get and one in a buffer.
struct Job {
  explicit Job(const Setup& setup) : bells(static_cast<size_t>(setup.ranks)) {
    std::vector<Doorbell*> bell_list;
    for (FutexDoorbell& bell : bells) bell_list.push_back(&bell);
    for (int rank = 0; rank < setup.ranks; ++rank) members.push_back(rank);
    for (int rank = 0; rank < setup.ranks; ++rank) {
      if (setup.is_host) {
        const HostMemory::User user{rank, members};
        const auto mine = rank == 0 ? HostMemory::Create(user, setup.options).value()
                                    : HostMemory::Open(address, user, setup.options).value();
        if (rank == 0) address = mine->address();
        mine->UseBell(bells[static_cast<size_t>(rank)]);
        memory.push_back(mine);
      } else {
        memory.push_back(rank > 0 ? memory[0]
                                  : std::make_shared<HeapMemory>(bell_list, setup.options));
      }
      planes.push_back(std::make_unique<SharedMemoryPlane>(memory.back(), rank, BestCpuKernels()));
      if (!planes.back()->AddSet(0, members, rank).ok()) std::abort();
      in.emplace_back(static_cast<size_t>(setup.bytes / 4), 1.0f);
      out.emplace_back(static_cast<size_t>(setup.bytes / 4 * setup.ranks), 1.0f);
      buffers.push_back(memory.back()->Allocate(static_cast<size_t>(setup.bytes)).value());
    }
  }

  /// An average in place, of the tensor in the buffer.
  void RunInBuffers(int rank, int64_t count) {
    std::byte* const data = buffers[static_cast<size_t>(rank)].get();
    const Segment segment{data, data, count};
    Batch batch;
    batch.ranks = members;
    batch.my_index = rank;
    batch.segments = {&segment, 1};
    batch.count = count;
    batch.op = ReduceOp::kAverage;
    Finish(*planes[static_cast<size_t>(rank)]->Start(batch).value(),
           bells[static_cast<size_t>(rank)]);
  }

  /// An average, in place if it is an allreduce; the other kinds cut evenly.
  void Run(OpKind kind, int rank, int64_t count, std::span<const SlotRange> by_tree = {}) {
    const size_t at = static_cast<size_t>(rank);
    const auto size = static_cast<int64_t>(members.size());
    const bool gathers = kind == OpKind::kAllgather;
    const std::vector<int64_t> parts(members.size(), gathers ? count : count / size);
    Segment segment{in[at].data(), out[at].data(), gathers ? count * size : count};
    if (kind == OpKind::kAllreduce) segment.out = in[at].data();
    if (kind == OpKind::kAlltoall) segment.count = parts[0];
    Batch batch;
    batch.kind = kind;
    batch.ranks = members;
    batch.my_index = rank;
    batch.segments = {&segment, 1};
    batch.count = segment.count;
    batch.op = ReduceOp::kAverage;
    batch.slots = by_tree;
    batch.splits = batch.sends = batch.receives = parts;
    Finish(*planes[at]->Start(batch).value(), bells[at]);
  }

  std::vector<FutexDoorbell> bells;
  std::string address;
  std::vector<std::shared_ptr<SharedMemory>> memory;  // by rank
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes;
  std::vector<int> members;
  std::vector<std::vector<float>> in;
  std::vector<std::vector<float>> out;
  std::vector<std::shared_ptr<std::byte>> buffers;
};

int Main(const Setup& setup) {
  const int64_t count = setup.bytes / 4 / setup.ranks * setup.ranks;
  Job job(setup);
  const auto scale = [&](void* data) {
    BestCpuKernels().Scale(data, data, DType::kFloat32, count, 0.999, 1.0);
  };
  std::vector<Measured> measured = {
      {"scale", [&](int rank) { scale(job.in[static_cast<size_t>(rank)].data()); }},
      {"scale buffers", [&](int rank) { scale(job.buffers[static_cast<size_t>(rank)].get()); }},
      {"allreduce buffers", [&](int rank) { job.RunInBuffers(rank, count); }}};
  for (const OpKind kind :
       {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    measured.push_back(
        {std::string(Name(kind)), [&job, kind, count](int rank) { job.Run(kind, rank, count); }});
  }
  const std::vector<SlotRange> slots = SlotRanges(setup.ranks, setup.ranks);
  measured.push_back(
      {"allreduce by tree", [&](int rank) { job.Run(OpKind::kAllreduce, rank, count, slots); }});
  TimeAll(setup, measured);
  for (const Measured& one : measured) Report(setup, one, measured[0]);
  return 0;
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  const auto argument = [&](int at, double fallback) {
    return argc > at ? std::atof(argv[at]) : fallback;
  };
  farandole::Setup setup;
  setup.ranks = static_cast<int>(argument(1, 2));
  setup.bytes = static_cast<int64_t>(argument(2, 64) * (1 << 20));
  setup.repetitions = static_cast<int>(argument(3, 30));
  setup.options.slots = static_cast<int>(argument(4, 4));
  setup.options.slot_bytes = static_cast<int64_t>(argument(5, 256) * 1024);
  setup.is_host = argument(6, 0) != 0;
  return farandole::Main(setup);
}
