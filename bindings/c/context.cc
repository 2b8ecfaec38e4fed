#include "bindings/c/context.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c/process.h"
#include "bindings/c/result_memory.h"
#include "coordinator/control/host_transport.h"
#include "coordinator/control/in_process.h"
#include "core/futex.h"
#include "ops/cpu/kernels.h"
#include "ops/gpu/nccl/backend.h"
#include "ops/gpu/plane.h"
#include "ops/hierarchical/plane.h"
#include "ops/p2p/plane.h"
#include "ops/shm/plane.h"

namespace farandole {

// What the ranks of one process share. All doorbells exist before the first rank does, because a
// rank rings those of the others. A Context holds the job and declares it before its transport and
// its planes, so the hubs outlive both.
class InProcessJob {
 public:
  explicit InProcessJob(int size) : hub(size) {
    std::vector<Doorbell*> pointers;
    for (int rank = 0; rank < size; ++rank) {
      bells.push_back(std::make_shared<FutexDoorbell>());
      pointers.push_back(bells.back().get());
    }
    local = std::make_shared<HeapMemory>(pointers);
    staged = std::make_shared<HeapMemory>(pointers);
  }
  InProcessHub hub;                                   // of the transports
  std::vector<std::shared_ptr<FutexDoorbell>> bells;  // by rank
  std::shared_ptr<HeapMemory> local;                  // of the CPU planes
  std::shared_ptr<HeapMemory> staged;                 // of the CUDA planes
};

namespace {

// Calls that poll MPI notice the init timeout themselves, and rank 0 then names who is missing.
constexpr int64_t kInitGraceNs = kNsPerSecond;
// For the engine to end its step, after the others have left or the shutdown timeout, and to report
// its peers of a final error, for which it takes up to a second.
constexpr int64_t kStopTimeoutNs = 3 * kNsPerSecond;

// MPI was started once and not all ranks came: other ranks count on calls that this process began.
std::atomic<bool> init_timed_out{false};

std::string InSeconds(double seconds) {
  char text[32];
  (void)std::snprintf(text, sizeof(text), "%g s", seconds);  // long enough for any double
  return text;
}

int64_t ToNs(double seconds) {
  return static_cast<int64_t>(seconds * static_cast<double>(kNsPerSecond));
}

EngineOptions MakeOptions(const Config& config, const Rendezvous& rendezvous,
                          const HostGroup& shared, int rank, int size) {
  EngineOptions options;
  options.negotiation.rank = rank;
  options.negotiation.size = size;
  options.negotiation.parent = rendezvous.parent;
  options.negotiation.planes = rendezvous.planes;
  options.negotiation.fusion_threshold_bytes = config.fusion_threshold_bytes;
  options.negotiation.cuda_fusion_threshold_bytes = config.cuda_fusion_threshold_bytes;
  options.negotiation.window = static_cast<int>(config.window);
  options.negotiation.max_ids = static_cast<uint32_t>(config.id_table_size);
  options.negotiation.join_allreduce_only = config.join_allreduce_only;
  if (!config.stall_check_disable) {
    // No key is looked at before the age stall_ns, so it is the earlier one of the limits that are
    // set.
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
  options.shutdown_timeout_ns = ToNs(config.shutdown_timeout_s);
  // A spinning caller would only keep the core from the rank it waits for. A launcher may have
  // bound each rank to a core of its own.
  const auto here = static_cast<int>(std::thread::hardware_concurrency());
  const int cores = std::max(here, shared.cores);
  if (rendezvous.local_size > cores) options.spin_ns = 0;
  return options;
}

/// Contexts over MPI whose engines run: their processes may end without a farandole_shutdown.
struct OpenContexts {
  std::mutex mutex;
  std::vector<Context*> contexts;
};

// Never destroyed: LeaveAtExit looks at it.
OpenContexts& Open() {
  static auto* const open = new OpenContexts();
  return *open;
}

// The list is not locked while a context ends, because the end of a context takes it from the list.
// Registered after the handler that finalises MPI, so exit() runs it before that one.
void LeaveAtExit(int exit_code, void*) {
  if (!MpiBelongsHere()) return;  // a forked child has none of the engines
  for (;;) {
    std::unique_lock lock(Open().mutex);
    if (Open().contexts.empty()) return;
    Context* const context = Open().contexts.back();
    Open().contexts.pop_back();
    lock.unlock();
    context->EndAtExit(exit_code);
  }
}

void ListOpen(Context* context) {
  static const int registered = on_exit(LeaveAtExit, nullptr);
  (void)registered;  // fails without memory only: then the launcher ends the other ranks
  std::lock_guard lock(Open().mutex);
  Open().contexts.push_back(context);
}

void UnlistOpen(Context* context) {
  std::lock_guard lock(Open().mutex);
  std::erase(Open().contexts, context);
}

}  // namespace

Context::~Context() {
  if (engine_ != nullptr) Close();
}

Status Context::UseInProcess(std::shared_ptr<InProcessJob> job, int rank) {
  doorbell_ = job->bells[static_cast<size_t>(rank)];
  transport_ = job->hub.Create(rank, doorbell_.get());
  // Two planes: members must start a set's batches in one order on each plane, and the batches that
  // the CUDA plane starts for itself have no place in the order of the decided ones.
  planes_.push_back(
      std::make_unique<SharedMemoryPlane>(job->local, rank, BestCpuKernels(), &counters_));
  host_plane_ = std::make_unique<SharedMemoryPlane>(job->staged, rank, BestCpuKernels());
  job_ = std::move(job);
  // All ranks are built from one config by one thread: they are of one mind without talking.
  const std::vector<std::string> alike(static_cast<size_t>(transport_->size()),
                                       EncodeHello(MyHello()));
  Result<Rendezvous> rendezvous = Agree(alike, rank);
  if (!rendezvous.ok()) return rendezvous.status();
  rendezvous_ = std::move(rendezvous).value();
  StartEngine();
  return {};
}

// MPI_Init_thread may wait until every rank has called it; it takes no deadline and no signal ends
// it. So a thread of its own joins the job, and is left behind when the time is up:
// docs/decisions.md.
void Context::BeginMpi(const Launcher& launcher) {
  init_deadline_ns_ = SteadyClock().NowNs() + ToNs(config_.init_timeout_s);
  launched_size_ = launcher.size;
  // Before the thread exists, since the process may end while it starts. What the thread uses is
  // its own copy of `launcher`, and this object, which is leaked if the thread is left behind.
  UnwaitedThreadBegins();
  joiner_ = std::thread([this, launcher] {
    MpiContextStarted();
    try {
      join_status_ = UseMpi(launcher);
    } catch (...) {
      join_status_ = FromException();
    }
    // Nothing collective was begun that other ranks could wait in: MPI may be finalised at exit.
    if (!uses_mpi_) MpiContextEnded();
    UnwaitedThreadEnds();
    joiner_done_.store(1);
    FutexWake(joiner_done_, INT_MAX);
  });
}

int64_t Context::InitTimeLeftNs() const {
  return std::max<int64_t>(init_deadline_ns_ - SteadyClock().NowNs(), 0);
}

Result<bool> Context::Joined(int64_t timeout_ns) {
  if (!joiner_.joinable()) return true;
  const int64_t until_ns = timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
  // Wakes now and then, because the deadline depends on where the joiner is. In MPI_Init_thread
  // nobody else watches the time. Later the steps of UseMpi have limits of their own, and
  // kInitGraceNs lets their errors, which name the missing ranks, come first.
  while (joiner_done_.load() == 0) {
    const int64_t now_ns = SteadyClock().NowNs();
    if (now_ns >= init_deadline_ns_ + (in_mpi_init_.load() ? 0 : kInitGraceNs)) {
      return GiveUpJoining();
    }
    if (now_ns >= until_ns) return false;
    FutexWait(joiner_done_, 0, std::min(until_ns - now_ns, 100 * kNsPerMs));
  }
  joiner_.join();
  if (join_status_.code() == Code::kTimeout) init_timed_out.store(true);
  FARANDOLE_RETURN_IF_ERROR(join_status_);
  StartEngine();
  ListOpen(this);
  return true;
}

// The thread that joins stays where it is.
Status Context::GiveUpJoining() {
  given_up_ = true;
  init_timed_out.store(true);
  MpiContextFailed();
  const std::string late =
      " did not return within " + InSeconds(config_.init_timeout_s) + " (FARANDOLE_INIT_TIMEOUT_S)";
  const std::string way_out = "; this process cannot join any more and should end";
  if (!in_mpi_init_.load()) return Timeout("init: a call of MPI" + late + way_out);
  return Timeout("init: MPI_Init_thread" + late + ": it waits until all " +
                 std::to_string(launched_size_) +
                 " ranks call init(), and some rank has not, or has died" + way_out);
}

// On the joiner's thread. From CreateTransport on each step is collective over all ranks, so all
// make them in this order, and each has what is left of one deadline.
Status Context::UseMpi(const Launcher& launcher) {
  log_ = std::make_unique<PrefixLog>(
      config_.log_level, std::to_string(launcher.rank) + "/" + std::to_string(launcher.size));
  in_mpi_init_.store(true);
  Result<MpiRuntime*> mpi = MpiOfProcess(config_, launcher, *log_);
  in_mpi_init_.store(false);
  if (!mpi.ok()) {
    return Status(mpi.status().code(),
                  launcher.source + " announced " + std::to_string(launcher.size) +
                      " ranks, but MPI cannot be used: " + mpi.status().message());
  }
  // A libmpi that does not belong to the launcher's mpirun starts as a job of one rank: every rank
  // would train by itself.
  if (mpi.value()->size() != launcher.size) {
    return Unavailable(launcher.source + " announced " + std::to_string(launcher.size) +
                       " ranks, but " + mpi.value()->library_version() + " sees " +
                       std::to_string(mpi.value()->size()) +
                       "; the launcher and the MPI library belong to different installations");
  }
  doorbell_ = std::make_shared<FutexDoorbell>();
  uses_mpi_ = true;  // from here on MPI_Finalize could wait for ranks that do not come
  Result<std::unique_ptr<Transport>> transport = mpi.value()->CreateTransport(Links());
  if (!transport.ok()) return transport.status();
  transport_ = std::move(transport).value();
  Result<std::unique_ptr<DataPlane>> plane =
      CreateP2pPlane(*mpi.value(), Links(), BestCpuKernels());
  if (!plane.ok()) return plane.status();
  planes_.push_back(std::move(plane).value());
  Result<std::unique_ptr<DataPlane>> host_plane =
      CreateP2pPlane(*mpi.value(), Links(), BestCpuKernels());
  if (!host_plane.ok()) return host_plane.status();
  host_plane_ = std::move(host_plane).value();
  Result<Rendezvous> rendezvous = RunRendezvous(*transport_, MyHello(), InitTimeLeftNs());
  if (!rendezvous.ok()) return rendezvous.status();
  rendezvous_ = std::move(rendezvous).value();
  FARANDOLE_RETURN_IF_ERROR(ShareHostMemory());
  transport_->SetNeighbours(Neighbours(rendezvous_.parent, transport_->rank()));
  return AddCrossPlanes(*mpi.value());
}

// With what is left of the init timeout.
LinkOptions Context::Links() {
  LinkOptions links;
  links.doorbell = doorbell_.get();
  links.counters = &counters_;
  links.timeout_ns = InitTimeLeftNs();
  links.memory = &memory_;
  return links;
}

// All ranks come to the same decisions here: the setting is agreed, and so is the outcome.
Status Context::ShareHostMemory() {
  const int hosts = 1 + *std::ranges::max_element(rendezvous_.host);
  if (!config_.shared_memory || hosts == transport_->size()) return {};
  Result<HostGroup> shared =
      ShareMemory(*transport_, rendezvous_.host, *doorbell_, InitTimeLeftNs());
  if (!shared.ok()) return shared.status();
  shared_ = std::move(shared).value();
  if (shared_.memory != nullptr) {
    network_ = std::move(transport_);
    transport_ = MakeHostTransport(network_, shared_.memory, shared_.peers.get());
  }
  if (!shared_.failure.empty() && transport_->rank() == 0) {
    log_->Write(LogLevel::kWarning,
                "no shared memory on some host, whose ranks use MPI instead: " + shared_.failure);
  }
  return {};
}

// Collective, or nothing is done, on all ranks alike: they know who shares memory.
Status Context::AddCrossPlanes(Network& network) {
  const std::vector<int>& group = shared_.group;
  const bool any = std::ranges::any_of(group, [](int memory) { return memory >= 0; });
  const bool all = std::ranges::adjacent_find(group, std::ranges::not_equal_to()) == group.end();
  if (!config_.hierarchical_allreduce || !any || all) return {};
  for (std::unique_ptr<DataPlane>& cross : cross_planes_) {
    Result<std::unique_ptr<DataPlane>> plane = CreateP2pPlane(network, Links(), BestCpuKernels());
    if (!plane.ok()) return plane.status();
    cross = std::move(plane).value();
  }
  return {};
}

// Before AddGpuPlane: a hello lists CPU planes only, and Agree gives the CUDA plane the number
// after them.
Hello Context::MyHello() const {
  Hello mine;
  mine.version = FARANDOLE_BUILD_ID;
  mine.host = ThisHost();
  for (const std::unique_ptr<DataPlane>& plane : planes_) mine.planes.emplace_back(plane->name());
  mine.config = config_;
  return mine;
}

// Nothing of a GPU is touched by this: the plane begins with its first batch.
void Context::AddGpuPlane() {
  gpu_ = std::make_unique<RankDevice>([this] { return DevicesOfProcess(config_); },
                                      rendezvous_.local_rank);
  GpuPlaneOptions options;
  options.device = gpu_.get();
  options.host = host_plane_.get();
  options.nccl = MakeNcclProvider(config_.nccl_library, config_.share_gpu);
  options.counters = &counters_;
  options.log = log_.get();
  options.host_name = ThisHost();
  options.share_gpu = config_.share_gpu;
  options.wake = [this] { doorbell_->Ring(); };
  // After those of the hello: its position is the number that Agree gave it.
  planes_.push_back(MakeGpuPlane(std::move(options)));
}

// The hierarchical plane has one number on all ranks, so it comes before the one that only those
// have who share memory.
void Context::AddMemoryPlanes(NegotiationOptions& options) {
  options.memory = shared_.group;
  options.hosts_plane = options.planes[static_cast<size_t>(DeviceKind::kCpu)];
  std::unique_ptr<DataPlane> memory;
  if (shared_.memory != nullptr) {
    memory = std::make_unique<SharedMemoryPlane>(shared_.memory, transport_->rank(),
                                                 BestCpuKernels(), &counters_);
  }
  if (cross_planes_[0] != nullptr) {
    std::vector<DataPlane*> cross;
    for (const std::unique_ptr<DataPlane>& plane : cross_planes_) cross.push_back(plane.get());
    DataPlane* const flat = planes_[options.hosts_plane].get();
    options.hosts_plane = static_cast<uint8_t>(planes_.size());
    planes_.push_back(std::make_unique<HierarchicalPlane>(
        HierarchicalPlane::Options{shared_.group, memory.get(), cross, flat}, BestCpuKernels()));
  }
  options.memory_plane = static_cast<uint8_t>(planes_.size());
  if (memory != nullptr) planes_.push_back(std::move(memory));
}

void Context::StartEngine() {
  const int rank = transport_->rank();
  const int size = transport_->size();
  // Over MPI the joiner has made one, with the rank that the launcher said.
  if (!log_) {
    log_ = std::make_unique<PrefixLog>(config_.log_level,
                                       std::to_string(rank) + "/" + std::to_string(size));
  }
  timeline_ = std::make_unique<Timeline>(SteadyClock(), rank);
  if (!config_.timeline.empty() && config_.timeline != "DYNAMIC") {
    // The other ranks are in by now: training without a timeline is better than a rank less.
    const Status started = timeline_->Start(config_.timeline, config_.timeline_marks);
    if (!started.ok()) log_->Write(LogLevel::kError, started.message());
  }
  AddGpuPlane();
  EngineOptions options = MakeOptions(config_, rendezvous_, shared_, rank, size);
  AddMemoryPlanes(options.negotiation);
  EngineParts parts;
  parts.transport = transport_.get();
  for (const std::unique_ptr<DataPlane>& plane : planes_) parts.planes.push_back(plane.get());
  parts.doorbell = doorbell_.get();
  parts.peers = shared_.peers.get();
  parts.clock = &SteadyClock();
  parts.counters = &counters_;
  parts.log = log_.get();
  parts.gpu = gpu_.get();
  parts.timeline = timeline_.get();
  parts.memory = &memory_;
  engine_ = std::make_unique<Engine>(std::move(options), parts);
  wraps_ = std::make_unique<WrapComparison>(*engine_);
}

Result<std::shared_ptr<std::byte>> Context::AllocateBuffer(int64_t bytes) {
  std::shared_ptr<SharedMemory> memory = shared_.memory;
  if (memory == nullptr && job_ != nullptr) memory = job_->local;
  if (memory == nullptr) return AllocateZeroes(bytes);
  Result<std::shared_ptr<std::byte>> buffer = memory->Allocate(static_cast<size_t>(bytes));
  if (buffer.ok()) return buffer;
  log_->Write(LogLevel::kWarning,
              "no shared memory for a buffer, whose tensors are copied to be "
              "reduced: " +
                  buffer.status().message());
  return AllocateZeroes(bytes);
}

Result<std::unique_ptr<Context>> Context::FromEnvironment() {
  const Environment environment = ReadEnvironment();
  Result<Config> config = ParseConfig(environment);
  if (!config.ok()) return config.status();
  Result<Launcher> launcher = DetectLauncher(environment);
  if (!launcher.ok()) return launcher.status();
  std::unique_ptr<Context> context(new Context());
  context->config_ = std::move(config).value();
  // A single rank never loads MPI, also if mpirun started it.
  if (launcher.value().size == 1) {
    FARANDOLE_RETURN_IF_ERROR(context->UseInProcess(std::make_shared<InProcessJob>(1), 0));
    return context;
  }
  if (init_timed_out.load()) {
    return Unavailable(
        "an earlier init() of this process timed out, and it cannot join the job any more; end it "
        "and start the job again");
  }
  // A process that joined before has set kRankProcess itself and may join again.
  if (!MpiBelongsHere()) {
    FARANDOLE_RETURN_IF_ERROR(RefuseDescendant(environment, launcher.value()));
  }
  context->BeginMpi(launcher.value());
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
  // The doorbell's own count only grows. Under the mutex, so that two threads that read the
  // counters do not both add the same difference.
  std::lock_guard lock(wake_ups_);
  const int64_t wakes = doorbell_->wakes();
  counters_.AddShared(Counter::kWakeUps, wakes - wake_ups_counted_);
  wake_ups_counted_ = wakes;
}

// The caller sleeps: were it to run the engine in its thread's place, it could be the one that is
// stuck. The wait has no limit of its own: a rank that stopped earlier would end those still at
// work. A peer's death, and the watchdog where this rank's engine is stuck, end the leave.
bool Context::Shutdown(int64_t timeout_ns) {
  std::lock_guard lock(shutdown_);
  if (down_) return true;
  if (engine_ == nullptr) {
    // There is no engine that could leave. A thread that still joins cannot be stopped, only left.
    if (joiner_.joinable() && !given_up_) (void)GiveUpJoining();  // no caller can receive the error
    return down_ = true;
  }
  if (leaving_ == nullptr) leaving_ = engine_->Leave();
  if (!leaving_->SleepUntilDoneFor(timeout_ns)) return false;
  StopEngine();
  return true;
}

// One thread may close the ranks of its process one after another: the first would wait for ever.
void Context::Close() {
  if (Shutdown(job_ != nullptr ? ToNs(config_.shutdown_timeout_s) : -1)) return;
  std::lock_guard lock(shutdown_);
  if (!down_) StopEngine();
}

// A rank that ends well waits for the others. One that ends badly ends the job in any case. Another
// thread may be inside Shutdown then, without a limit.
void Context::EndAtExit(int exit_code) {
  if (exit_code == 0) {
    Close();
  } else {
    const std::unique_lock lock(shutdown_, std::try_to_lock);
    if (!lock || leaving_ == nullptr) return;
    if (!down_) StopEngine();
  }
  if (shutdown_status_.ok()) return;
  log_->Write(LogLevel::kWarning, shutdown_status_.message());
}

Status Context::shutdown_status() {
  std::lock_guard lock(shutdown_);
  return shutdown_status_;
}

// Under shutdown_, once. In this order: whether all have left is asked before Stop fails what is
// pending; the timeline takes spans until the engine thread has ended; the planes go last, since
// the engine calls them.
void Context::StopEngine() {
  UnlistOpen(this);
  down_ = true;
  shutdown_status_ = leaving_->done() ? leaving_->status()
                                      : Timeout(
                                            "shutdown: this rank ends before every rank has "
                                            "shut down; ranks still at work may be ended now");
  const bool clean = engine_->ShutDownCleanly();
  given_up_ = !engine_->Stop(kStopTimeoutNs);
  if (given_up_) {
    UnwaitedThreadBegins();  // for good
    shutdown_status_ = engine_->lifecycle().final_error();
  }
  const Status traced = timeline_->Stop();
  if (!traced.ok()) log_->Write(LogLevel::kWarning, traced.message());
  if (uses_mpi_ && !clean) MpiContextFailed();
  if (given_up_) return;  // the stuck thread may still use all there is
  // MPI objects must be gone before MPI is finalised; after a failure they may hold requests, so
  // they stay, with the planes over them. What knows shared memory alone goes, and with it the
  // memory: the last of planes_, and the transport that leads to others of this host.
  if (uses_mpi_ && !clean) {
    if (shared_.memory != nullptr) planes_.pop_back();
    for (std::unique_ptr<DataPlane>& plane : planes_) (void)plane.release();
    (void)host_plane_.release();
    for (std::unique_ptr<DataPlane>& plane : cross_planes_) (void)plane.release();
    (void)gpu_.release();
    (void)(network_ != nullptr ? new std::shared_ptr(network_) : nullptr);
    if (network_ == nullptr) (void)transport_.release();
  }
  // The CUDA plane, one of planes_, uses host_plane_ until it ends; the hierarchical one uses
  // cross_planes_.
  planes_.clear();
  host_plane_.reset();
  for (std::unique_ptr<DataPlane>& plane : cross_planes_) plane.reset();
  if (clean) transport_->Leave();
  transport_.reset();
  network_.reset();
  // Only now: another thread may call exit at any time, and FinaliseAtExit must not finalise MPI
  // while objects of ours still use it.
  if (uses_mpi_ && clean) MpiContextEnded();
}

}  // namespace farandole
