// Measures the local plane: sum in place over pinned threads, against a yardstick of the same
// process, in which each thread scales its own tensor in place.
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
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "ops/cpu/kernels.h"
#include "ops/local/local_plane.h"

namespace farandole {
namespace {

struct Setup {
  int ranks = 2;
  int64_t bytes = 64 << 20;
  int repetitions = 30;
  LocalHub::Options options;
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

double Report(const char* what, const Setup& setup, const std::vector<double>& ms) {
  const double median = ms[ms.size() / 2];
  std::printf("%-10s median %10.4f ms  best %10.4f ms  %8.3f GB/s\n", what, median, ms[0],
              static_cast<double>(setup.bytes) / median / 1e6);
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
    if (waits > kSpins) bell.Sleep(FutexDoorbell::Place::kEngine, ticket, -1);
  }
}

int Main(const Setup& setup) {
  const size_t ranks = static_cast<size_t>(setup.ranks);
  const int64_t count = setup.bytes / 4;
  std::vector<std::vector<float>> tensors(ranks);
  std::vector<FutexDoorbell> bells(ranks);
  std::vector<Doorbell*> bell_list;
  for (FutexDoorbell& bell : bells) bell_list.push_back(&bell);
  const auto hub = std::make_shared<LocalHub>(bell_list, setup.options);
  std::vector<std::unique_ptr<LocalPlane>> planes;
  std::vector<int> members;
  for (int rank = 0; rank < setup.ranks; ++rank) members.push_back(rank);
  for (int rank = 0; rank < setup.ranks; ++rank) {
    planes.push_back(std::make_unique<LocalPlane>(hub, rank, BestCpuKernels()));
    if (!planes.back()->AddSet(0, members, rank).ok()) return 1;
    tensors[static_cast<size_t>(rank)].assign(static_cast<size_t>(count), 1.0f);
  }

  const auto scale = TimeAll(setup, [&](int rank) {
    float* data = tensors[static_cast<size_t>(rank)].data();
    BestCpuKernels().Scale(data, data, DType::kFloat32, count, 0.999, 1.0);
  });
  const auto reduce = TimeAll(setup, [&](int rank) {
    const size_t at = static_cast<size_t>(rank);
    const Segment segment{tensors[at].data(), tensors[at].data(), count};
    Batch batch;
    batch.ranks = members;
    batch.my_index = rank;
    batch.segments = {&segment, 1};
    batch.count = count;
    batch.op = ReduceOp::kAverage;
    Finish(*planes[at]->Start(batch).value(), bells[at]);
  });
  const double yardstick = Report("scale", setup, scale);
  const double allreduce = Report("allreduce", setup, reduce);
  std::printf("ratio      median %.3f  best %.3f\n", yardstick / allreduce, scale[0] / reduce[0]);
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
