// How long a batch on a GPU takes from its start to its launch, and how many kernels of ours: one
// JSON object per line. Wall time, the engine and its negotiation left aside.
//
// Over NCCL also, with several batches in flight: their bus bandwidth, that of ncclAllReduce called
// in a loop on a communicator of its own (what nccl-tests' all_reduce_perf does), and how long the
// stream of the collectives is idle between two batches. Bus bandwidth is nccl-tests': bytes by
// time, times 2(n - 1)/n (doc/PERFORMANCE.md there).
//
// usage: plane_bench BATCHES              one rank, then two as threads, staged
//        mpirun -np 2 plane_bench BATCHES MPI_PLUGIN   a process per rank, all on device 0
// The GPU's plug-in: FARANDOLE_CUDA_PLUGIN. FARANDOLE_SHARE_GPU=1: processes go over NCCL.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "ops/cpu/kernels.h"
#include "ops/gpu/backend_selection.h"
#include "ops/gpu/nccl/library.h"
#include "ops/shm/plane.h"
#include "test/gpu/mpi_rank.h"
#include "test/gpu/plug_in.h"
#include "test/gpu/timed_device.h"

namespace farandole {
namespace {

struct Shape {
  const char* name;
  int tensors;
  int64_t count;  ///< Elements of each.
  DType wire = DType::kFloat32;
};

constexpr Shape kShapes[] = {
    {"1 x 4 MiB", 1, 1 << 20, DType::kFloat32},
    {"64 x 64 KiB", 64, 16 << 10, DType::kFloat32},
    {"64 x 64 KiB as float16", 64, 16 << 10, DType::kFloat16},
    {"1000 x 4 KiB", 1000, 1 << 10, DType::kFloat32},
};

/// Of one tensor, which NCCL reduces where it is, and of many, which are packed.
constexpr Shape kStreams[] = {
    {"1 x 4 B", 1, 1},
    {"1 x 4 KiB", 1, 1 << 10},
    {"1 x 64 KiB", 1, 1 << 14},
    {"1 x 1 MiB", 1, 1 << 18},
    {"1 x 4 MiB", 1, 1 << 20},
    {"1 x 25 MiB", 1, 25 << 18},
    {"64 x 400 KiB", 64, 25 << 12},
};
constexpr size_t kInFlight = 4;  ///< Batches, so that a stream never waits for the host.

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

/// Runs `batch` again and again, several at a time. @return Seconds until all are complete.
double StreamBatches(DataPlane& plane, FutexDoorbell& bell, const Batch& batch, int64_t& number,
                     int count) {
  std::vector<Batch> batches(static_cast<size_t>(count), batch);
  for (Batch& one : batches) one.number = ++number;
  std::vector<PlaneOperation*> running;
  size_t next = 0;
  const double begin_us = WallUs();
  while (next < batches.size() || !running.empty()) {
    while (next < batches.size() && running.size() < kInFlight) {
      running.push_back(Must(plane.Start(batches[next++])));
    }
    const uint32_t ticket = bell.Ticket();
    int64_t sleep_ns = kNsPerSecond;
    std::erase_if(running, [&](PlaneOperation* operation) {
      const Progress progress = operation->Step();
      if (progress.state == Progress::State::kFailed) Fail(progress.status);
      if (progress.state != Progress::State::kWaiting) sleep_ns = 0;
      if (progress.poll_after_ns >= 0) sleep_ns = std::min(sleep_ns, progress.poll_after_ns);
      return progress.state == Progress::State::kDone;
    });
    if (sleep_ns > 0) bell.Sleep(FutexDoorbell::Listener::kEngine, ticket, sleep_ns);
  }
  return (WallUs() - begin_us) / 1e6;
}

/// A communicator as nccl-tests have one: it blocks, and nothing of ours is between.
class BareNccl {
 public:
  BareNccl(MpiRank& rank, Device& device) : device_(device) {
    const char* const named = std::getenv("FARANDOLE_NCCL");
    const NcclLibrary* const library = Must(NcclLibrary::OfProcess(named == nullptr ? "" : named));
    api_ = &library->api();
    const int index = rank.mpi().rank();
    const std::string mine = index == 0 ? Must(library->MakeUniqueId()) : std::string();
    const std::string bytes = Must(rank.transport->Allgather(mine, 60 * kNsPerSecond)).front();
    NcclUniqueId id{};
    std::memcpy(id.internal, bytes.data(), std::min(bytes.size(), sizeof id.internal));
    NcclConfig config;
    config.blocking = 1;
    if (SharesGpu()) config.max_ctas = 2;  // as ours, so that the kernels of all ranks fit
    if (Status current = device.MakeCurrent(); !current.ok()) Fail(current);
    Check(api_->CommInitRankConfig(&comm_, rank.mpi().size(), id, index, &config));
    stream_ = Must(device.CreateStream());
  }
  ~BareNccl() {
    Check(api_->CommDestroy(comm_));
    device_.DestroyStream(stream_);
  }
  BareNccl(const BareNccl&) = delete;
  BareNccl& operator=(const BareNccl&) = delete;

  /// @return Seconds that `times` allreduces of the segment take.
  double Run(const Segment& segment, int64_t count, int times) {
    const double begin_us = WallUs();
    for (int i = 0; i < times; ++i) {
      Check(api_->AllReduce(segment.in, segment.out, static_cast<size_t>(count),
                            NcclDataType::kFloat32, NcclRedOp::kSum, comm_, stream_));
    }
    const std::shared_ptr<DeviceEvent> end = Must(device_.CreateEvent());
    if (Status marked = end->Record(stream_); !marked.ok()) Fail(marked);
    while (!Must(end->IsComplete())) std::this_thread::yield();
    return (WallUs() - begin_us) / 1e6;
  }

 private:
  void Check(NcclResult result) {
    if (result != NcclResult::kSuccess) Fail(Internal(api_->GetErrorString(result)));
  }

  Device& device_;
  const NcclApi* api_ = nullptr;
  NcclComm comm_ = nullptr;
  StreamHandle stream_ = nullptr;
};

/// A rank and what it stands on.
struct Rank {
  int index;
  int size;
  const char* way;
  DataPlane& host;
  FutexDoorbell& bell;
  MpiRank* process = nullptr;  ///< nullptr for a thread.
};

void Print(const Rank& rank, const Shape& shape, double host_us, double launches) {
  std::printf(
      "{\"bench\": \"plane\", \"device\": \"%s\", \"ranks\": %d, \"way\": \"%s\", \"batch\": "
      "\"%s\", \"host_us\": %.2f, \"launches_per_batch\": %.2f}\n",
      Must(GpuRuntime()->Open(0))->info().name.c_str(), rank.size, rank.way, shape.name, host_us,
      launches);
  std::fflush(stdout);
}

/// How long a stream was idle between the end of a collective and the beginning of the next.
double MedianGapUs(const std::vector<double>& times_us) {
  std::vector<double> gaps_us;
  for (size_t i = 2; i + 1 < times_us.size(); i += 2) {
    gaps_us.push_back(times_us[i] - times_us[i - 1]);
  }
  return gaps_us.empty() ? 0 : Median(gaps_us);
}

/// Batches in flight together, over NCCL between processes.
void RunStreams(const Rank& rank, DataPlane& plane, TimedRuntime& runtime, Device& device,
                Batch batch, int64_t& number, int batches) {
  BareNccl bare(*rank.process, device);
  for (const Shape& shape : kStreams) {
    Tensors tensors(device, shape);
    batch.segments = tensors.batch().segments;
    batch.count = tensors.batch().count;
    const int warm_up = std::min(batches, 20);
    StreamBatches(plane, rank.bell, batch, number, warm_up);
    runtime.Start();
    const double ours_s = StreamBatches(plane, rank.bell, batch, number, batches) / batches;
    const double gap_us = MedianGapUs(runtime.StopUs());
    bare.Run(batch.segments.front(), batch.count, warm_up);
    const double bare_s = bare.Run(batch.segments.front(), batch.count, batches) / batches;
    const auto bytes = static_cast<double>(4 * batch.count);
    const double bus_bytes = bytes * 2 * (rank.size - 1) / rank.size;
    if (rank.index != 0) continue;
    std::printf(
        "{\"bench\": \"bus\", \"device\": \"%s\", \"ranks\": %d, \"batch\": \"%s\", \"bytes\": "
        "%.0f, \"busbw_gb_per_s\": %.4g, \"bare_busbw_gb_per_s\": %.4g, \"gap_us\": %.2f}\n",
        device.info().name.c_str(), rank.size, shape.name, bytes, bus_bytes / ours_s / 1e9,
        bus_bytes / bare_s / 1e9, gap_us);
    std::fflush(stdout);
  }
}

void RunRank(const Rank& rank, int batches) {
  constexpr int kWarmUp = 20;
  const auto runtime = std::make_shared<TimedRuntime>(GpuRuntime());
  RankDevice gpu([&] { return Result<std::shared_ptr<DeviceRuntime>>(runtime); }, 0);
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
  if (rank.process == nullptr || std::strcmp(rank.way, "nccl") != 0) return;
  Batch batch;
  batch.ranks = ranks;
  batch.my_index = rank.index;
  batch.device = DeviceKind::kCuda;
  RunStreams(rank, *plane, *runtime, device, batch, number, batches);
}

void RunThreads(int size, int batches) {
  std::vector<std::unique_ptr<FutexDoorbell>> bells;
  std::vector<Doorbell*> pointers;
  for (int index = 0; index < size; ++index) {
    bells.push_back(std::make_unique<FutexDoorbell>());
    pointers.push_back(bells.back().get());
  }
  const auto hub = std::make_shared<HeapMemory>(pointers);
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
           rank->bell, rank.get()},
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
