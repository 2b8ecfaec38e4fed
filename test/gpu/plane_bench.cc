// How long a batch on a GPU takes from its start to its launch, and how many kernels of ours: one
// JSON object per line. Wall time, the engine and its negotiation left aside.
//
// usage: plane_bench BATCHES              one rank, then two as threads, staged
//        mpirun -np 2 plane_bench BATCHES MPI_PLUGIN   a process per rank, all on device 0
// The GPU's plug-in: FARANDOLE_CUDA_PLUGIN. FARANDOLE_SHARE_GPU=1: processes go over NCCL.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "ops/cpu/kernels.h"
#include "ops/gpu/rendezvous.h"
#include "ops/shm/plane.h"
#include "test/gpu/mpi_rank.h"
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

double WallUs() { return static_cast<double>(SteadyClock().NowNs()) / 1e3; }

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

/// Runs the batch. @return Microseconds until it was launched.
double RunBatch(DataPlane& plane, FutexDoorbell& bell, const Batch& batch) {
  const double begin_us = WallUs();
  double launched_us = -1;
  PlaneOperation* const operation = Must(plane.Start(batch));
  for (;;) {
    const uint32_t ticket = bell.Ticket();
    Progress progress = operation->Step();
    if (progress.state == Progress::State::kLaunched) launched_us = WallUs();
    if (progress.state == Progress::State::kFailed) Fail(progress.status);
    if (progress.state == Progress::State::kDone) break;
    if (progress.state != Progress::State::kWaiting || progress.poll_after_ns == 0) continue;
    const bool by_bell = progress.poll_after_ns == kByDoorbell;
    bell.Sleep(FutexDoorbell::Listener::kEngine, ticket,
               by_bell ? kNsPerSecond : progress.poll_after_ns);
  }
  return (launched_us < 0 ? WallUs() : launched_us) - begin_us;
}

/// A rank and what it stands on.
struct Rank {
  int index;
  int size;
  const char* way;
  DataPlane& host;
  FutexDoorbell& bell;
};

void Print(const Rank& rank, const Shape& shape, double host_us, double launches) {
  std::printf(
      "{\"bench\": \"plane\", \"device\": \"%s\", \"ranks\": %d, \"way\": \"%s\", \"batch\": "
      "\"%s\", \"host_us\": %.2f, \"launches_per_batch\": %.2f}\n",
      Must(GpuRuntime()->Open(0))->info().name.c_str(), rank.size, rank.way, shape.name, host_us,
      launches);
  std::fflush(stdout);
}

void RunRank(const Rank& rank, int batches) {
  constexpr int kWarmUp = 20;
  DefaultDevice gpu([] { return Result<std::shared_ptr<DeviceRuntime>>(GpuRuntime()); }, 0);
  Counters counters;
  const std::unique_ptr<DataPlane> plane = GpuPlaneHere(rank.bell, &counters)(gpu, rank.host);
  Device& device = *Must(gpu.Use(0));
  std::vector<int> ranks;
  for (int r = 0; r < rank.size; ++r) ranks.push_back(r);
  if (Status added = plane->AddSet(0, ranks, rank.index); !added.ok()) Fail(added);
  int64_t number = 0;
  for (const Shape& shape : kShapes) {
    Tensors tensors(device, shape);
    tensors.batch().ranks = ranks;
    tensors.batch().my_index = rank.index;
    std::vector<double> host_us;
    int64_t launches = 0;
    for (int i = 0; i < batches + kWarmUp; ++i) {
      if (i == kWarmUp) launches = counters.Get(Counter::kDeviceLaunches);
      tensors.batch().number = ++number;
      const double us = RunBatch(*plane, rank.bell, tensors.batch());
      if (i >= kWarmUp) host_us.push_back(us);
    }
    launches = counters.Get(Counter::kDeviceLaunches) - launches;
    if (rank.index == 0) {
      Print(rank, shape, Median(host_us), static_cast<double>(launches) / batches);
    }
  }
}

void RunThreads(int size, int batches) {
  std::vector<std::unique_ptr<FutexDoorbell>> bells;
  std::vector<Doorbell*> pointers;
  for (int index = 0; index < size; ++index) {
    bells.push_back(std::make_unique<FutexDoorbell>());
    pointers.push_back(bells.back().get());
  }
  const auto hub = std::make_shared<SharedMemoryHub>(pointers);
  std::vector<std::thread> threads;
  for (int index = 0; index < size; ++index) {
    threads.emplace_back([&, index] {
      SharedMemoryPlane host(hub, index, BestCpuKernels());
      const char* const way = size == 1 ? "solo" : "staged";
      RunRank({index, size, way, host, *bells[static_cast<size_t>(index)]}, batches);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void RunProcess(const std::string& mpi_plugin, int batches) {
  const std::unique_ptr<MpiRank> rank = Must(JoinMpi(mpi_plugin));
  const bool over_nccl = SharesGpu() && NcclVersionHere() >= kNcclOfSharedGpus;
  RunRank({rank->mpi().rank(), rank->mpi().size(), over_nccl ? "nccl" : "staged", *rank->host,
           rank->bell},
          batches);
  if (Status left = rank->Leave(); !left.ok()) Fail(left);
}

}  // namespace
}  // namespace farandole

int main(int argc, char** argv) {
  const int batches = argc > 1 ? std::atoi(argv[1]) : 300;
  if (argc > 2) {
    farandole::RunProcess(argv[2], batches);
    return 0;
  }
  for (const int size : {1, 2}) farandole::RunThreads(size, batches);
  return 0;
}
