// What a batch on a GPU costs the host, and how many kernels of ours it takes: one JSON object per
// line. The host's cost is the CPU time of Start and of every Step until launched, the engine and
// its negotiation left aside.
//
// usage: plane_bench [batches=300]; the plug-in: FARANDOLE_CUDA_PLUGIN
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "ops/cpu/kernels.h"
#include "ops/local/local_plane.h"
#include "test/gpu/plug_in.h"

namespace farandole {
namespace {

struct Shape {
  const char* name;
  int tensors;
  int64_t count;  ///< Elements of each.
  DType wire;
};

constexpr Shape kShapes[] = {
    {"1 x 4 MiB", 1, 1 << 20, DType::kFloat32},
    {"64 x 64 KiB", 64, 16 << 10, DType::kFloat32},
    {"64 x 64 KiB as float16", 64, 16 << 10, DType::kFloat16},
    {"1000 x 4 KiB", 1000, 1 << 10, DType::kFloat32},
};

[[noreturn]] void Fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <class T>
T Must(Result<T> result) {
  if (!result.ok()) Fail(result.status());
  return std::move(result).value();
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Microseconds of CPU time of the calling thread.
double ThreadUs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

/// Tensors of one shape in device memory, and a batch over them.
class Tensors {
 public:
  Tensors(Device& device, const Shape& shape) : device_(device) {
    const int64_t size = shape.tensors * shape.count * 4;
    memory_ = static_cast<std::byte*>(Must(device.Allocate(2 * size)));
    for (int i = 0; i < shape.tensors; ++i) {
      std::byte* const in = memory_ + i * shape.count * 4;
      segments_.push_back({in, in + size, shape.count});
    }
    batch_.wire = shape.wire;
    batch_.segments = segments_;
    batch_.count = shape.tensors * shape.count;
    batch_.device = DeviceKind::kCuda;
  }
  ~Tensors() { device_.Free(memory_); }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  Batch& batch() { return batch_; }

 private:
  Device& device_;
  std::byte* memory_ = nullptr;
  std::vector<Segment> segments_;
  Batch batch_;
};

/// Runs the batch. @return CPU microseconds until it was launched.
double RunBatch(DataPlane& plane, FutexDoorbell& bell, const Batch& batch) {
  const double begin_us = ThreadUs();
  double launched_us = -1;
  PlaneOperation* const operation = Must(plane.Start(batch));
  for (;;) {
    const uint32_t ticket = bell.Ticket();
    Progress progress = operation->Step();
    if (progress.state == Progress::State::kLaunched) launched_us = ThreadUs();
    if (progress.state == Progress::State::kFailed) Fail(progress.status);
    if (progress.state == Progress::State::kDone) break;
    if (progress.state != Progress::State::kWaiting || progress.poll_after_ns == 0) continue;
    const bool by_bell = progress.poll_after_ns == kByDoorbell;
    bell.Sleep(FutexDoorbell::Place::kEngine, ticket,
               by_bell ? kNsPerSecond : progress.poll_after_ns);
  }
  return (launched_us < 0 ? ThreadUs() : launched_us) - begin_us;
}

/// What the ranks share.
struct Job {
  std::vector<std::unique_ptr<FutexDoorbell>> bells;
  std::shared_ptr<LocalHub> hub;
  int ranks;
  int batches;
};

void Print(const Job& job, const Shape& shape, double host_us, double launches) {
  std::printf(
      "{\"bench\": \"plane\", \"device\": \"%s\", \"ranks\": %d, \"way\": \"%s\", \"batch\": "
      "\"%s\", \"host_us\": "
      "%.2f, \"launches_per_batch\": %.2f}\n",
      Must(GpuRuntime()->Open(0))->info().name.c_str(), job.ranks,
      job.ranks == 1 ? "solo" : "staged", shape.name, host_us, launches);
  std::fflush(stdout);
}

void RunRank(const Job& job, int rank) {
  HomeDevice home([] { return Result<std::shared_ptr<DeviceRuntime>>(GpuRuntime()); }, 0);
  LocalPlane host(job.hub, rank, BestCpuKernels());
  Counters counters;
  const std::unique_ptr<DataPlane> plane = CudaPlaneHere(&counters)(home, host);
  Device& device = *Must(home.Use(0));
  std::vector<int> ranks;
  for (int r = 0; r < job.ranks; ++r) ranks.push_back(r);
  if (Status added = plane->AddSet(0, ranks, rank); !added.ok()) Fail(added);
  int64_t number = 0;
  for (const Shape& shape : kShapes) {
    Tensors tensors(device, shape);
    tensors.batch().ranks = ranks;
    tensors.batch().my_index = rank;
    std::vector<double> host_us;
    int64_t launches = 0;
    for (int i = 0; i < job.batches + 20; ++i) {
      if (i == 20) launches = counters.Get(Counter::kDeviceLaunches);
      tensors.batch().number = ++number;
      const double us = RunBatch(*plane, *job.bells[static_cast<size_t>(rank)], tensors.batch());
      if (i >= 20) host_us.push_back(us);
    }
    launches = counters.Get(Counter::kDeviceLaunches) - launches;
    if (rank == 0) {
      Print(job, shape, Median(host_us), static_cast<double>(launches) / job.batches);
    }
  }
}

/// Ranks as threads on device 0.
void RunJob(int ranks, int batches) {
  Job job{{}, nullptr, ranks, batches};
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    job.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(job.bells.back().get());
  }
  job.hub = std::make_shared<LocalHub>(bells);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&job, rank] { RunRank(job, rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  const int batches = argc > 1 ? std::atoi(argv[1]) : 300;
  for (const int ranks : {1, 2}) farandole::RunJob(ranks, batches);
  return 0;
}
