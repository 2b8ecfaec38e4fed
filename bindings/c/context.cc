#include "bindings/c/context.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c/device_process.h"
#include "bindings/c/mpi_process.h"
#include "coordinator/control/in_process.h"
#include "ops/cpu/kernels.h"
#include "ops/cuda/cuda_plane.h"
#include "ops/local/local_plane.h"

namespace farandole {

class InProcessJob {
 public:
  explicit InProcessJob(int size) : hub(size) {
    std::vector<Doorbell*> pointers;
    for (int rank = 0; rank < size; ++rank) {
      bells.push_back(std::make_shared<FutexDoorbell>());
      pointers.push_back(bells.back().get());
    }
    local = std::make_shared<LocalHub>(pointers);
    staged = std::make_shared<LocalHub>(pointers);
  }
  InProcessHub hub;
  std::vector<std::shared_ptr<FutexDoorbell>> bells;
  std::shared_ptr<LocalHub> local;
  std::shared_ptr<LocalHub> staged;  // of the CUDA planes
};

namespace {

int64_t ToNs(double seconds) {
  return static_cast<int64_t>(seconds * static_cast<double>(kNsPerSecond));
}

EngineOptions MakeOptions(const Config& config, const Meeting& meeting, int rank, int size) {
  EngineOptions options;
  options.negotiation.rank = rank;
  options.negotiation.size = size;
  options.negotiation.parent = meeting.parent;
  options.negotiation.planes = meeting.planes;
  options.negotiation.fusion_threshold_bytes = config.fusion_threshold_bytes;
  options.negotiation.cuda_fusion_threshold_bytes = config.cuda_fusion_threshold_bytes;
  options.negotiation.window = static_cast<int>(config.window);
  options.negotiation.max_ids = static_cast<uint32_t>(config.id_table_size);
  if (!config.stall_check_disable) {
    const double warning_s = config.stall_warning_s;
    const double shutdown_s = config.stall_shutdown_s;
    const bool is_first = shutdown_s > 0 && (warning_s == 0 || shutdown_s < warning_s);
    options.negotiation.stall_ns = ToNs(is_first ? shutdown_s : warning_s);
    options.negotiation.stall_shutdown_ns = ToNs(shutdown_s);
  } else {
    options.negotiation.stall_ns = 0;
  }
  options.progress_timeout_ns = ToNs(config.plane_timeout_s);
  options.cuda_progress_timeout_ns = ToNs(config.cuda_timeout_s);
  // A spinning caller would only keep the core from the rank it waits for.
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  if (meeting.local_size > cores) options.spin_ns = 0;
  return options;
}

/// Once per process, on rank 0.
void LogHorovodNotes(int rank, Log& log) {
  static std::atomic<bool> told = false;
  if (rank != 0 || told.exchange(true)) return;
  const HorovodNotes notes = NoteHorovodNames(ReadEnvironment());
  for (const std::string& note : notes.unknown) log.Write(LogLevel::kWarning, note);
  if (!notes.unused.empty()) log.Write(LogLevel::kInfo, notes.unused);
}

}  // namespace

Context::~Context() {
  if (engine_ != nullptr) (void)Shutdown();  // nobody is left to be told
}

Status Context::UseInProcess(std::shared_ptr<InProcessJob> job, int rank) {
  doorbell_ = job->bells[static_cast<size_t>(rank)];
  transport_ = job->hub.Create(rank, doorbell_.get());
  planes_.push_back(std::make_unique<LocalPlane>(job->local, rank, BestCpuKernels()));
  host_plane_ = std::make_unique<LocalPlane>(job->staged, rank, BestCpuKernels());
  job_ = std::move(job);
  // All ranks are built from one config by one thread: they are of one mind without talking.
  const std::vector<std::string> alike(static_cast<size_t>(transport_->size()),
                                       Introduce(MyIntroduction()));
  Result<Meeting> meeting = Agree(alike, rank);
  if (!meeting.ok()) return meeting.status();
  meeting_ = std::move(meeting).value();
  StartEngine();
  return {};
}

Status Context::UseMpi(const Launcher& launcher) {
  log_ = std::make_unique<PrefixLog>(
      config_.log_level, std::to_string(launcher.rank) + "/" + std::to_string(launcher.size));
  Result<MpiRuntime*> mpi = MpiOfProcess(config_, launcher, *log_);
  if (!mpi.ok()) {
    return Status(mpi.status().code(),
                  launcher.source + " announced " + std::to_string(launcher.size) +
                      " ranks, but MPI cannot be used: " + mpi.status().message());
  }
  if (mpi.value()->size() != launcher.size) {
    return Unavailable(launcher.source + " announced " + std::to_string(launcher.size) +
                       " ranks, but " + mpi.value()->library_version() + " sees " +
                       std::to_string(mpi.value()->size()) +
                       "; the launcher and the MPI library belong to different installations");
  }
  doorbell_ = std::make_shared<FutexDoorbell>();
  LinkOptions links;
  links.doorbell = doorbell_.get();
  links.counters = &counters_;
  links.timeout_ns = ToNs(config_.init_timeout_s);
  Result<std::unique_ptr<Transport>> transport = mpi.value()->CreateTransport(links);
  if (!transport.ok()) return transport.status();
  transport_ = std::move(transport).value();
  Result<std::unique_ptr<DataPlane>> plane = mpi.value()->CreatePlane(links);
  if (!plane.ok()) return plane.status();
  planes_.push_back(std::move(plane).value());
  Result<std::unique_ptr<DataPlane>> host_plane = mpi.value()->CreatePlane(links);
  if (!host_plane.ok()) return host_plane.status();
  host_plane_ = std::move(host_plane).value();
  uses_mpi_ = true;
  MpiContextStarted();
  Result<Meeting> meeting = Meet(*transport_, MyIntroduction());
  if (!meeting.ok()) return meeting.status();
  meeting_ = std::move(meeting).value();
  StartEngine();
  return {};
}

Introduction Context::MyIntroduction() const {
  Introduction mine;
  mine.version = FARANDOLE_BUILD_ID;
  mine.host = ThisHost();
  for (const std::unique_ptr<DataPlane>& plane : planes_) mine.planes.emplace_back(plane->name());
  mine.config = config_;
  return mine;
}

// Nothing of a GPU is touched by this: the plane begins with its first batch.
void Context::AddCudaPlane() {
  gpus_ =
      std::make_unique<RankGpus>([this] { return DevicesOfProcess(config_); }, meeting_.local_rank);
  CudaPlaneOptions options;
  options.gpus = gpus_.get();
  options.host = host_plane_.get();
  options.counters = &counters_;
  options.log = log_.get();
  options.host_name = ThisHost();
  options.nccl_library = config_.nccl_library;
  options.share_gpu = config_.share_gpu;
  planes_.push_back(MakeCudaPlane(options));
}

void Context::StartEngine() {
  const int rank = transport_->rank();
  const int size = transport_->size();
  if (!log_) {
    log_ = std::make_unique<PrefixLog>(config_.log_level,
                                       std::to_string(rank) + "/" + std::to_string(size));
  }
  LogHorovodNotes(rank, *log_);
  timeline_ = std::make_unique<Timeline>(SteadyClock(), rank);
  if (!config_.timeline.empty() && config_.timeline != "DYNAMIC") {
    // The other ranks are in by now: training without a timeline is better than a rank less.
    const Status started = timeline_->Start(config_.timeline, config_.timeline_marks);
    if (!started.ok()) log_->Write(LogLevel::kError, started.message());
  }
  AddCudaPlane();
  EngineParts parts;
  parts.transport = transport_.get();
  for (const std::unique_ptr<DataPlane>& plane : planes_) parts.planes.push_back(plane.get());
  parts.doorbell = doorbell_.get();
  parts.clock = &SteadyClock();
  parts.counters = &counters_;
  parts.log = log_.get();
  parts.gpus = gpus_.get();
  parts.timeline = timeline_.get();
  engine_ = std::make_unique<Engine>(MakeOptions(config_, meeting_, rank, size), parts);
}

Result<std::unique_ptr<Context>> Context::FromEnvironment() {
  const Environment environment = ReadEnvironment();
  Result<Config> config = ParseConfig(environment);
  if (!config.ok()) return config.status();
  Result<Launcher> launcher = DetectLauncher(environment);
  if (!launcher.ok()) return launcher.status();
  std::unique_ptr<Context> context(new Context());
  context->config_ = std::move(config).value();
  const bool alone = launcher.value().size == 1;
  FARANDOLE_RETURN_IF_ERROR(alone ? context->UseInProcess(std::make_shared<InProcessJob>(1), 0)
                                  : context->UseMpi(launcher.value()));
  return context;
}

Result<std::vector<std::unique_ptr<Context>>> Context::InProcess(int size) {
  if (size < 1 || size > 1024) {
    return InvalidArgument("size " + std::to_string(size) +
                           " of an in-process job; expected 1 to 1024");
  }
  Result<Config> config = ParseConfig(ReadEnvironment());
  if (!config.ok()) return config.status();
  auto job = std::make_shared<InProcessJob>(size);
  std::vector<std::unique_ptr<Context>> contexts;
  for (int rank = 0; rank < size; ++rank) {
    contexts.emplace_back(new Context());
    contexts.back()->config_ = config.value();
  }
  for (int rank = 0; rank < size; ++rank) {
    FARANDOLE_RETURN_IF_ERROR(contexts[static_cast<size_t>(rank)]->UseInProcess(job, rank));
  }
  return contexts;
}

void Context::CountWakeUps() {
  std::lock_guard lock(wake_ups_);
  const int64_t wakes = doorbell_->wakes();
  counters_.AddShared(Counter::kWakeUps, wakes - wake_ups_counted_);
  wake_ups_counted_ = wakes;
}

Status Context::Shutdown() {
  std::lock_guard lock(shutdown_);
  if (transport_ == nullptr) return shutdown_status_;
  std::shared_ptr<Work> left = engine_->Leave();
  shutdown_status_ =
      engine_->Wait(*left, ToNs(config_.shutdown_timeout_s))
          ? left->status()
          : Timeout("shutdown: not every rank has shut down within " +
                    std::to_string(static_cast<int64_t>(config_.shutdown_timeout_s)) +
                    " s (FARANDOLE_SHUTDOWN_TIMEOUT_S)");
  const bool clean = engine_->ShutDownCleanly();
  engine_->Stop();
  const Status traced = timeline_->Stop();
  if (!traced.ok()) log_->Write(LogLevel::kWarning, traced.message());
  // MPI objects must be gone before MPI is finalised; after a failure they may hold requests, so
  // they stay.
  if (uses_mpi_ && !clean) {
    MpiContextFailed();
    for (std::unique_ptr<DataPlane>& plane : planes_) (void)plane.release();
    (void)host_plane_.release();
    (void)gpus_.release();
    (void)transport_.release();
  }
  planes_.clear();
  host_plane_.reset();
  transport_.reset();
  if (uses_mpi_ && clean) MpiContextEnded();
  return shutdown_status_;
}

}  // namespace farandole
