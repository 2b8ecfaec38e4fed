// Measures the local plane over pinned threads, against a yardstick of the same process, in which
// each thread scales a tensor of its own in place. `mib` are what each rank puts in.
//
// usage: local_plane_bench [ranks=2] [mib=64] [repetitions=30] [slots=4] [slot_kib=256]
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
#include "ops/shm/plane.h"

namespace farandole {
namespace {

struct Setup {
  int ranks = 2;
  int64_t bytes = 64 << 20;
  int repetitions = 30;
  SharedMemoryHub::Options options;
};

void PinTo(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu) % std::thread::hardware_concurrency(), &set);
  (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // only a better measurement
}

/// Times `repetitions` runs of body(rank) on all ranks at once; every time is the slowest rank's.
std::vector<double> TimeAll(const Setup& setup, const std::function<void(int)>& body) {
  std::barrier together(setup.ranks);
  std::vector<std::vector<int64_t>> times(static_cast<size_t>(setup.ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setup.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      PinTo(rank);
      for (int i = 0; i < setup.repetitions; ++i) {
        together.arrive_and_wait();
        const int64_t begin_ns = SteadyClock().NowNs();
        body(rank);
        times[static_cast<size_t>(rank)].push_back(SteadyClock().NowNs() - begin_ns);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<double> slowest_ms;
  for (size_t i = 0; i < static_cast<size_t>(setup.repetitions); ++i) {
    int64_t slowest = 0;
    for (const auto& of_rank : times) slowest = std::max(slowest, of_rank[i]);
    slowest_ms.push_back(static_cast<double>(slowest) / static_cast<double>(kNsPerMs));
  }
  std::sort(slowest_ms.begin(), slowest_ms.end());
  return slowest_ms;
}

double Report(std::string_view what, const Setup& setup, const std::vector<double>& ms) {
  const double median = ms[ms.size() / 2];
  std::printf("%-13s median %10.4f ms  best %10.4f ms  %8.3f GB/s", std::string(what).c_str(),
              median, ms[0], static_cast<double>(setup.bytes) / median / 1e6);
  return median;
}

void Finish(PlaneOperation& operation, FutexDoorbell& bell) {
  constexpr int kSpins = 20'000;
  for (int waits = 0;;) {
    const uint32_t ticket = bell.Ticket();
    const Progress progress = operation.Step();
    if (progress.state == Progress::State::kDone) return;
    if (progress.state == Progress::State::kFailed) std::abort();
    waits = progress.state == Progress::State::kMoved ? 0 : waits + 1;
    if (waits > kSpins) bell.Sleep(FutexDoorbell::Listener::kEngine, ticket, -1);
  }
}

/// The planes of all ranks, and a tensor to put in and one to get for each.
struct Job {
  explicit Job(const Setup& setup) : bells(static_cast<size_t>(setup.ranks)) {
    std::vector<Doorbell*> bell_list;
    for (FutexDoorbell& bell : bells) bell_list.push_back(&bell);
    const auto hub = std::make_shared<SharedMemoryHub>(bell_list, setup.options);
    for (int rank = 0; rank < setup.ranks; ++rank) members.push_back(rank);
    for (int rank = 0; rank < setup.ranks; ++rank) {
      planes.push_back(std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()));
      if (!planes.back()->AddSet(0, members, rank).ok()) std::abort();
      in.emplace_back(static_cast<size_t>(setup.bytes / 4), 1.0f);
      out.emplace_back(static_cast<size_t>(setup.bytes / 4 * setup.ranks), 1.0f);
    }
  }

  /// An average, in place if it is an allreduce; the other kinds cut evenly.
  void Run(OpKind kind, int rank, int64_t count) {
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
    batch.splits = batch.sends = batch.receives = parts;
    Finish(*planes[at]->Start(batch).value(), bells[at]);
  }

  std::vector<FutexDoorbell> bells;
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes;
  std::vector<int> members;
  std::vector<std::vector<float>> in;
  std::vector<std::vector<float>> out;
};

int Main(const Setup& setup) {
  const int64_t count = setup.bytes / 4 / setup.ranks * setup.ranks;
  Job job(setup);
  const auto scale = TimeAll(setup, [&](int rank) {
    float* data = job.in[static_cast<size_t>(rank)].data();
    BestCpuKernels().Scale(data, data, DType::kFloat32, count, 0.999, 1.0);
  });
  const double yardstick = Report("scale", setup, scale);
  std::printf("\n");
  for (const OpKind kind :
       {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    const auto times = TimeAll(setup, [&](int rank) { job.Run(kind, rank, count); });
    const double median = Report(Name(kind), setup, times);
    std::printf("  ratio median %.3f best %.3f\n", yardstick / median, scale[0] / times[0]);
  }
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
  return farandole::Main(setup);
}
