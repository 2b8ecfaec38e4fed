#include "coordinator/job/generation.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/host_transport.h"
#include "coordinator/job/world.h"
#include "ops/cpu/kernels.h"
#include "ops/gpu/nccl/backend.h"
#include "ops/gpu/plane.h"
#include "ops/hierarchical/plane.h"
#include "ops/shm/plane.h"

namespace farandole {

namespace {

// For the engine to end its step, after the others have left or the shutdown timeout, and to report
// its peers of a final error, for which it takes up to a second.
constexpr int64_t kStopTimeoutNs = 3 * kNsPerSecond;

/// What libraries that compute with OpenMP use in each rank, as torch does; 1 where nobody says.
int ComputeThreads(const Environment& environment) {
  const auto found = environment.find("OMP_NUM_THREADS");
  if (found == environment.end()) return 1;
  int threads = 0;  // "4,2" is of nested regions
  const std::string& text = found->second;
  (void)std::from_chars(text.data(), text.data() + text.size(), threads);
  return std::clamp(threads, 1, 1024);
}

// Members of an elastic job learn of its end from each other as well.
constexpr int64_t kElasticSpreadNs = 100 * kNsPerMs;

EngineOptions MakeOptions(const Config& config, const Rendezvous& rendezvous,
                          const HostGroup& shared, int rank, int size, int threads) {
  EngineOptions options;
  options.negotiation.rank = rank;
  options.negotiation.size = size;
  options.negotiation.parent = rendezvous.parent;
  options.negotiation.planes = rendezvous.planes;
  options.negotiation.fusion_threshold_bytes = config.fusion_threshold_bytes;
  options.negotiation.cuda_fusion_threshold_bytes = config.cuda_fusion_threshold_bytes;
  options.negotiation.window = static_cast<int>(config.window);
  options.negotiation.max_ids = static_cast<uint32_t>(config.id_table_size);
  options.negotiation.slots = static_cast<int>(config.slots);
  options.negotiation.join_allreduce_only = config.join_allreduce_only;
  options.negotiation.divergence_check = config.divergence_check;
  if (!config.stall_check_disable) {
    options.negotiation.stall_ns = ToNs(config.stall_warning_s);
    options.negotiation.stall_shutdown_ns = ToNs(config.stall_shutdown_s);
  } else {
    options.negotiation.stall_ns = 0;
  }
  options.progress_timeout_ns = ToNs(config.plane_timeout_s);
  options.cuda_progress_timeout_ns = ToNs(config.cuda_timeout_s);
  options.shutdown_timeout_ns = ToNs(config.shutdown_timeout_s);
  if (config.is_elastic) options.longest_spread_ns = kElasticSpreadNs;
  // A spinning caller would only keep the core from the rank it waits for. A launcher may have
  // bound each rank to a core of its own.
  const auto here = static_cast<int>(std::thread::hardware_concurrency());
  const int cores = std::max(here, shared.cores);
  if (rendezvous.local_size > cores) options.spin_ns = 0;
  options.fills_cores = shared.memory != nullptr && rendezvous.local_size == size &&
                        rendezvous.local_size * threads >= cores;
  return options;
}

Lifecycle::Parting OfThisProcess(Lifecycle::Parting parting) {
  parting.failure.host = HostName();
  parting.failure.pid = getpid();
  return parting;
}

// For the others to leave a generation of an elastic job as well.
constexpr int64_t kLeaveTogetherNs = 2 * kNsPerSecond;
// How often a join is asked whether it is to be given up.
constexpr int64_t kSliceNs = 10 * kNsPerMs;

constexpr const char* kNotOverMpi =
    "init: an elastic job goes over TCP, and this one over MPI, which ends with its first rank; "
    "FARANDOLE_NETWORK=tcp and FARANDOLE_ADDRESS, or init's address, make it one";
constexpr const char* kNotElastic =
    "reinit: this job is not elastic; init(elastic=True), is_elastic or FARANDOLE_ELASTIC=1, the "
    "same on all ranks, makes it so, over TCP";

// For its exit code to reach the others.
constexpr int64_t kSayCodeNs = 100 * kNsPerMs;
// For callbacks at the exit of the program.
constexpr int64_t kLastCallsNs = kNsPerSecond;

}  // namespace

// Engine knows nothing of generations; a handle of one of its operations finds its generation here.
struct Generation::OwnedEngine final : Engine {
  OwnedEngine(Generation& owner, EngineOptions options, EngineParts parts)
      : Engine(std::move(options), std::move(parts)), generation(owner) {}
  Generation& generation;
};

Generation& Generation::Of(const Engine& engine) {
  return static_cast<const OwnedEngine&>(engine).generation;
}

Engine& Generation::engine() { return *engine_; }

void Generation::SetTimeout(double timeout_s) {
  if (!has_timeout_) return;
  config_.stall_shutdown_s = timeout_s;
  if (!config_.stall_check_disable) engine_->SetStallShutdown(ToNs(timeout_s));
}

const Engine& Generation::engine() const { return *engine_; }

bool Generation::IsInCallback() const { return engine_ != nullptr && engine_->IsInCallback(); }

Generation::~Generation() {
  if (engine_ != nullptr) Close();
  if (bootstrap_ != nullptr) bootstrap_->Abandon();
  if (service_ != nullptr && !is_succeeded_) service_->Leave();
}

Result<bool> Generation::Joined(int64_t timeout_ns) {
  if (beginning_ != nullptr) return HasBegun(timeout_ns);
  if (engine_ != nullptr) return true;
  if (service_ != nullptr) return JoinedAsMember(timeout_ns);
  Result<std::unique_ptr<Connections>> joined = bootstrap_->Joined(timeout_ns);
  if (!joined.ok()) return joined.status();
  if (joined.value() == nullptr) return false;
  bootstrap_.reset();
  StartEngine(std::move(joined).value(), World::Get().CountGeneration());
  World::Get().List(this);
  if (joined_->service != nullptr) {
    service_ = std::exchange(joined_->service, nullptr);
    list_ = std::move(joined_->first);
    service_->Begin(list_, Running());
  }
  return true;
}

// A join that fails, or that the members give up, is followed by another list. A newcomer that has
// other settings than the members leaves, and the next list is one without it.
Result<bool> Generation::JoinedAsMember(int64_t timeout_ns) {
  const int64_t until_ns = timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
  for (;;) {
    if (!assignment_) {
      const Result<bool> is_assigned = TakeAssignment(until_ns);
      if (!is_assigned.ok() || !is_assigned.value()) return is_assigned;
    }
    const Result<bool> joined = JoinedAt(*assignment_, until_ns);
    if (joined.ok() && !joined.value()) return false;
    const bool is_newcomer = !config_.members.empty();
    if (is_newcomer && DiffersFromFirst(joined.status(), assignment_->rank)) return joined.status();
    if (joined.ok()) list_ = std::move(assignment_->list);
    assignment_.reset();
    service_->Joined(joined.ok() ? std::optional(Running()) : std::nullopt);
    if (!joined.ok()) continue;
    BeginTogether();
    if (until_ns == kNever) return Joined(-1);
    return Joined(std::max<int64_t>(until_ns - SteadyClock().NowNs(), 0));
  }
}

// The first collective, after which newcomers count. A generation that ends in it has begun, too:
// the next call says why.
void Generation::BeginTogether() {
  const KeyName name = {kGlobalSet, OpKind::kBarrier, "farandole.members"};
  Signature signature;
  signature.kind = OpKind::kBarrier;
  uint32_t version = 0;
  Result<Operation*> barrier = engine_->operations().Prepare(name, signature, &version);
  if (!barrier.ok()) return;
  const HeldOperation held(barrier.value());
  Result<std::shared_ptr<Work>> work = engine_->Start(*held, {}, {}, {}, true, {}, version);
  if (work.ok()) beginning_ = std::move(work).value();
}

Result<bool> Generation::HasBegun(int64_t timeout_ns) {
  if (!engine_->Wait(*beginning_, timeout_ns)) return false;
  if (std::exchange(beginning_, nullptr)->status().ok()) service_->Computed(list_.generation);
  return true;
}

// @return false: not yet.
Result<bool> Generation::TakeAssignment(int64_t until_ns) {
  const int64_t by_ns = std::min(until_ns, let_in_by_ns_);
  const int64_t left_ns = std::max<int64_t>(by_ns - SteadyClock().NowNs(), 0);
  Result<std::optional<MemberAssignment>> assigned =
      service_->AwaitAssignment(by_ns == kNever ? -1 : left_ns);
  if (!assigned.ok()) return assigned.status();
  assignment_ = std::move(assigned).value();
  if (assignment_ || SteadyClock().NowNs() < let_in_by_ns_) return assignment_.has_value();
  return Timeout("init: none of the members at " + config_.members +
                 " has let this process in within FARANDOLE_INIT_TIMEOUT_S");
}

// @return false: not yet; an error: it has failed, or is given up.
Result<bool> Generation::JoinedAt(MemberAssignment& assignment, int64_t until_ns) {
  const auto size = static_cast<int>(assignment.list.members.size());
  if (size == 1) {
    const uint64_t number = World::Get().CountGeneration();
    FARANDOLE_RETURN_IF_ERROR(JoinInProcess(JobInProcess(1), 0, number));
    World::Get().List(this);
    return true;
  }
  if (bootstrap_ == nullptr) {
    Launcher launcher;
    launcher.source = "the job's members";
    launcher.rank = assignment.rank;
    launcher.size = size;
    launcher.job = service_->job();
    launcher.is_chosen = true;
    launcher.address = assignment.list.root;
    launcher.key = service_->key();
    launcher.listener = assignment.listener;
    Config config = config_;  // a rank may compute for long before it learns of the change
    config.init_timeout_s = std::max(config.init_timeout_s, kLongestJoinS);
    Result<std::shared_ptr<Bootstrap>> begun = Bootstrap::Begin({}, config, launcher);
    if (!begun.ok()) return begun.status();
    bootstrap_ = std::move(begun).value();
  }
  for (;;) {
    const int64_t left_ns = std::max<int64_t>(until_ns - SteadyClock().NowNs(), 0);
    Result<std::unique_ptr<Connections>> joined = bootstrap_->Joined(std::min(left_ns, kSliceNs));
    if (!joined.ok()) {
      bootstrap_.reset();
      return joined.status();
    }
    if (joined.value() != nullptr) {
      bootstrap_.reset();
      StartEngine(std::move(joined).value(), World::Get().CountGeneration());
      World::Get().List(this);
      return true;
    }
    if (service_->IsGivenUp()) {
      std::exchange(bootstrap_, nullptr)->Abandon();
      return Aborted("the members of the job have given up this generation");
    }
    if (left_ns == 0) return false;
  }
}

RunningGeneration Generation::Running() {
  return {[this](const Status& why) { joined_->liveness->NoteAgreed(why); },
          [this] { return engine_->lifecycle().failed() || engine_->lifecycle().is_shut_down(); },
          [this] { return FindLosses(); }};
}

Losses Generation::FindLosses() const {
  Losses losses;
  const LivenessTable::Absent absent = joined_->liveness->absent();
  const auto id_of = [this](int rank) { return list_.members.at(static_cast<size_t>(rank)).id; };
  for (const int rank : absent.ended) losses.dead.insert(id_of(rank));
  for (const int rank : absent.silent) losses.suspects.insert(id_of(rank));
  // Leaders watch for each other's hosts. Who is suspected and can be reached after all says so.
  for (const int rank : absent.cut_off) {
    const std::string& host = list_.members.at(static_cast<size_t>(rank)).host;
    losses.suspects.insert(id_of(rank));
    for (const Member& member : list_.members) {
      if (member.host == host && host != service_->self().host) losses.suspects.insert(member.id);
    }
  }
  return losses;
}

std::string Generation::members(int rank) const {
  std::string text;
  for (const Member& one : list_.members) {
    if (rank == -1 || list_.members.at(static_cast<size_t>(rank)).id == one.id)
      text += (text.empty() ? "" : ",") + one.address;
  }
  return text;
}

// A pipe of the launcher's. This process is a reader, too, so that without the launcher neither
// opening it blocks nor writing is a SIGPIPE. Python takes the variable away, and tells more.
void Generation::NotifyLauncher() const {
  if (service_ == nullptr) return;
  const Environment environment = ReadEnvironment();
  const std::string* path = Find(environment, "_FARANDOLE_REPORT");
  if (path == nullptr) return;
  const int pipe = open(path->c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (pipe < 0) return;
  struct stat about {};
  const std::string report = "{\"member\": \"" + service_->self().address + "\"}\n";
  if (fstat(pipe, &about) == 0 && S_ISFIFO(about.st_mode))
    (void)!write(pipe, report.data(), report.size());  // without the launcher nobody wants it
  close(pipe);
}

void Generation::AddRecorder() {
  FlightRecorder::Options options;
  options.rank = joined_->transport->rank();
  options.size = joined_->transport->size();
  if (const std::string& own = config_.flight_recorder_dir; own != "none")
    options.folder = own.empty() ? config_.record : own;
  options.job = joined_->job_name;
  options.host = HostName();
  options.version = FARANDOLE_BUILD_ID;
  if (const std::shared_ptr<HostMemory>& memory = joined_->shared.memory; memory != nullptr) {
    options.rings = FlightsOf(*memory);
    options.mine = static_cast<size_t>(std::ranges::find(memory->ranks(), options.rank) -
                                       memory->ranks().begin());
    options.memory = memory;
  }
  Result<std::unique_ptr<FlightRecorder>> made = FlightRecorder::Create(std::move(options));
  if (made.ok()) {
    recorder_ = std::move(made).value();
  } else {
    joined_->log->Write(LogLevel::kWarning, made.status().message());
  }
}

// Nothing of a GPU is touched by this: the plane begins with its first batch.
void Generation::AddGpuPlane() {
  gpu_ = std::make_unique<RankDevice>([this] { return World::Get().Devices(config_); },
                                      joined_->rendezvous.local_rank);
  GpuPlaneOptions options;
  options.device = gpu_.get();
  options.host = joined_->host_plane.get();
  options.nccl = MakeNcclProvider(config_.nccl_library, config_.share_gpu, config_.nccl_register);
  options.counters = &joined_->counters;
  options.log = joined_->log.get();
  options.host_name = ThisHost();
  options.share_gpu = config_.share_gpu;
  options.wake = [this] { joined_->doorbell->Ring(); };
  // After those of the hello: its position is the number that Agree gave it.
  planes_.push_back(MakeGpuPlane(std::move(options)));
}

// The hierarchical plane has one number on all ranks, so it comes before the one that only those
// have who share memory.
void Generation::AddMemoryPlanes(NegotiationOptions& options) {
  options.memory = joined_->shared.group;
  options.hosts_plane = options.planes[static_cast<size_t>(DeviceKind::kCpu)];
  std::unique_ptr<DataPlane> memory;
  if (joined_->shared.memory != nullptr) {
    memory = std::make_unique<SharedMemoryPlane>(joined_->shared.memory, joined_->transport->rank(),
                                                 BestCpuKernels(), &joined_->counters);
  }
  if (joined_->cross_planes[0] != nullptr) {
    std::vector<DataPlane*> cross;
    for (const std::unique_ptr<DataPlane>& plane : joined_->cross_planes)
      cross.push_back(plane.get());
    DataPlane* const flat = planes_[options.hosts_plane].get();
    options.hosts_plane = static_cast<uint8_t>(planes_.size());
    planes_.push_back(std::make_unique<HierarchicalPlane>(
        HierarchicalPlane::Options{joined_->shared.group, memory.get(), cross, flat},
        BestCpuKernels()));
  }
  options.memory_plane = static_cast<uint8_t>(planes_.size());
  if (memory != nullptr) planes_.push_back(std::move(memory));
}

void Generation::StartEngine(std::unique_ptr<Connections> joined, uint64_t number) {
  number_ = number;
  joined_ = std::move(joined);
  planes_.push_back(std::move(joined_->flat));
  const int rank = joined_->transport->rank();
  const int size = joined_->transport->size();
  const MemberList& list = assignment_ ? assignment_->list : joined_->first;  // not list_ yet
  timeline_ = std::make_unique<Timeline>(
      SteadyClock(),
      TimelineOwner{rank, size, joined_->job_name, std::max<uint64_t>(list.generation.number, 1)});
  if (!config_.timeline.empty() && config_.timeline != "DYNAMIC") {
    // The other ranks are in by now: training without a timeline is better than a rank less.
    const Status started = timeline_->Start(config_.timeline, config_.timeline_marks);
    if (!started.ok()) joined_->log->Write(LogLevel::kError, started.message());
  }
  AddRecorder();
  AddGpuPlane();
  EngineOptions options =
      MakeOptions(config_, joined_->rendezvous, joined_->shared, rank, size, compute_threads_);
  options.negotiation.in_order = in_order_;
  AddMemoryPlanes(options.negotiation);
  EngineParts parts;
  parts.transport = joined_->transport.get();
  for (const std::unique_ptr<DataPlane>& plane : planes_) parts.planes.push_back(plane.get());
  parts.doorbell = joined_->doorbell.get();
  parts.liveness = joined_->liveness.get();
  parts.peers = joined_->peers.get();
  parts.hub = joined_->hub.get();
  parts.clock = &SteadyClock();
  parts.counters = &joined_->counters;
  parts.log = joined_->log.get();
  parts.gpu = gpu_.get();
  diagnosis_ = std::make_unique<Diagnosis>(Diagnosis::Options{rank, config_.nan_check, parts.log,
                                                              timeline_.get(), recorder_.get(),
                                                              joined_->rendezvous.host_names});
  diagnosis_->Observe(parts);
  parts.memory = &joined_->memory;
  engine_ = std::make_unique<OwnedEngine>(*this, std::move(options), parts);
  wraps_ = std::make_unique<WrapComparison>(*engine_);
}

std::shared_ptr<std::byte> Generation::AllocateShared(int64_t bytes) {
  const std::shared_ptr<SharedMemory>& memory = joined_->buffers;
  if (memory == nullptr) return nullptr;
  Result<std::shared_ptr<std::byte>> buffer = memory->Allocate(static_cast<size_t>(bytes));
  if (buffer.ok()) return std::move(buffer).value();
  joined_->log->Write(LogLevel::kWarning,
                      "no shared memory for a buffer, whose tensors are copied to be "
                      "reduced: " +
                          buffer.status().message());
  return nullptr;
}

Status Generation::JoinInProcess(std::shared_ptr<InProcessJob> job, int rank, uint64_t number) {
  Result<std::unique_ptr<Connections>> joined = ConnectInProcess(std::move(job), rank, config_);
  if (!joined.ok()) return joined.status();
  StartEngine(std::move(joined).value(), number);
  return {};
}

// @return whether this process is to be, or to begin, part of an elastic job.
bool Generation::TakeElastic(const InitOptions& init, Config& config) {
  if (init.is_elastic) config.is_elastic = true;
  if (!init.members.empty()) config.members = init.members;
  if (!config.members.empty()) config.is_elastic = true;
  if (init.apart) config.is_elastic = false, config.members.clear();
  return config.is_elastic;
}

// Of a process that joins no others at first: it comes later, or is alone.
Status Generation::MakeService(const Launcher& launcher) {
  const int64_t until_ns = SteadyClock().NowNs() + ToNs(config_.init_timeout_s);
  Result<std::string> key = World::Get().Key(launcher, until_ns, {});
  if (!key.ok()) return key.status();
  const JobKey open = PublicKey(launcher.job);
  Result<std::vector<std::string>> members = MembersAt(config_.members);
  if (!members.ok()) return members.status();
  Result<std::vector<SocketAddress>> where = WhereToListen(config_.interfaces, members.value());
  if (!where.ok()) return where.status();
  const std::string text = key.value().empty() ? TextOf(open) : std::move(key).value();
  Result<std::shared_ptr<MemberService>> service =
      MemberService::Create(MemberOptions(config_, text, launcher.job, std::move(where).value()));
  if (!service.ok()) return service.status();
  service_ = std::move(service).value();
  let_in_by_ns_ = until_ns;
  if (!members.value().empty()) service_->Ask(std::move(members).value());
  return {};
}

void Generation::BeginAlone() {
  list_.generation = {1, service_->self().id};
  list_.members = {service_->self()};
  World::Get().List(this);
  service_->Begin(list_, Running());
}

Result<std::unique_ptr<Generation>> Generation::BeginNext(Generation& ended) {
  if (ended.service_ == nullptr) return InvalidArgument(kNotElastic);
  if (ended.service_->has_left()) {
    return InvalidArgument("reinit: this process has left the job; init() joins one");
  }
  if (std::exchange(ended.is_succeeded_, true)) {
    return InvalidArgument(
        "reinit: this generation has been followed by another one, or by an error");
  }
  std::unique_ptr<Generation> next(new Generation());
  next->config_ = ended.config_;
  next->config_.members.clear();
  next->has_timeout_ = ended.has_timeout_;
  next->in_order_ = ended.in_order_;
  next->compute_threads_ = ended.compute_threads_;
  next->service_ = ended.service_;
  next->list_ = ended.list_;
  next->service_->Agree(ended.FindLosses());
  return next;
}

// A single rank never loads MPI, also if mpirun started it.
Result<std::unique_ptr<Generation>> Generation::Begin(const InitOptions& asked) {
  const Environment environment = ReadEnvironment();
  Result<Config> config = ParseConfig(environment);
  if (!config.ok()) return config.status();
  InitOptions init = asked;
  init.is_elastic = TakeElastic(asked, config.value());
  Result<Launcher> launcher = DetectLauncher(environment, init);
  if (!launcher.ok()) return launcher.status();
  std::unique_ptr<Generation> generation(new Generation());
  generation->config_ = std::move(config).value();
  generation->has_timeout_ = !environment.contains("FARANDOLE_STALL_SHUTDOWN_S") &&
                             !environment.contains("FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS");
  if (generation->has_timeout_) generation->config_.stall_shutdown_s = init.timeout_s;
  if (init.slots > 0 || init.apart) generation->config_.slots = init.slots;
  generation->in_order_ = init.in_order;
  generation->compute_threads_ = ComputeThreads(environment);
  if (init.is_elastic) {
    const bool begins = generation->config_.members.empty();
    const Result<std::string> network =
        ChooseNetwork(launcher.value(), generation->config_.network);
    const bool is_mpi = generation->config_.network == "mpi" ||
                        (launcher.value().size > 1 && network.ok() && network.value() == "mpi");
    if (is_mpi) return InvalidArgument(kNotOverMpi);
    if (!begins || launcher.value().size == 1) {
      FARANDOLE_RETURN_IF_ERROR(generation->MakeService(launcher.value()));
      if (!begins) return generation;
    }
  }
  if (launcher.value().size == 1) {
    FARANDOLE_RETURN_IF_ERROR(
        generation->JoinInProcess(JobInProcess(1), 0, World::Get().CountGeneration()));
    if (init.is_elastic) generation->BeginAlone();
    return generation;
  }
  Result<std::shared_ptr<Bootstrap>> begun =
      Bootstrap::Begin(environment, generation->config_, launcher.value());
  if (!begun.ok()) return begun.status();
  generation->bootstrap_ = std::move(begun).value();
  return generation;
}

Result<std::vector<std::unique_ptr<Generation>>> Generation::InProcess(int size) {
  if (size < 1 || size > 1024) {
    return InvalidArgument("size " + std::to_string(size) +
                           " of an in-process job; expected 1 to 1024");
  }
  Result<Config> config = ParseConfig(ReadEnvironment());
  if (!config.ok()) return config.status();
  const std::shared_ptr<InProcessJob> job = JobInProcess(size);
  const uint64_t number = World::Get().CountGeneration();  // of all of them
  std::vector<std::unique_ptr<Generation>> generations;
  for (int rank = 0; rank < size; ++rank) {
    generations.emplace_back(new Generation());
    generations.back()->config_ = config.value();
  }
  for (int rank = 0; rank < size; ++rank) {
    FARANDOLE_RETURN_IF_ERROR(
        generations[static_cast<size_t>(rank)]->JoinInProcess(job, rank, number));
  }
  return generations;
}

void Generation::CountWakeUps() {
  // The doorbell's own count only grows. Under the mutex, so that two threads that read the
  // counters do not both add the same difference.
  std::lock_guard lock(wake_ups_);
  const int64_t wakes = joined_->doorbell->wakes();
  joined_->counters.AddShared(Counter::kWakeUps, wakes - wake_ups_counted_);
  wake_ups_counted_ = wakes;
}

// The caller sleeps: were it to run the engine in its thread's place, it could be the one that is
// stuck. The wait has no limit of its own: a rank that stopped earlier would end those still at
// work. A peer's death, and the watchdog where this rank's engine is stuck, end the leave.
bool Generation::LeaveAndStop(int64_t timeout_ns, Lifecycle::Parting parting) {
  std::lock_guard lock(shutdown_);
  if (down_) return true;
  if (engine_ == nullptr) {
    // There is no engine that could leave. Another thread may go on with the join from here.
    if (bootstrap_ != nullptr) std::exchange(bootstrap_, nullptr)->Abandon();
    return down_ = true;
  }
  if (service_ != nullptr) {
    service_->Leave();
    const std::string self = RankName(engine_->rank());
    return LeaveTogether(timeout_ns, std::move(parting), Aborted(self + " has left the job"));
  }
  leaving_ = engine_->Leave(OfThisProcess(std::move(parting)));
  if (!leaving_->SleepUntilDoneFor(timeout_ns)) return false;
  StopEngine();
  return true;
}

// Those that leave together complete what all have started. A rank that computes meanwhile learns
// of it in its next collective: after 2 s it is not waited for.
bool Generation::LeaveTogether(int64_t timeout_ns, Lifecycle::Parting parting, const Status& why) {
  const int64_t now_ns = SteadyClock().NowNs();
  if (leave_by_ns_ == 0) leave_by_ns_ = now_ns + kLeaveTogetherNs;
  const int64_t left_ns = std::max<int64_t>(leave_by_ns_ - now_ns, 0);
  leaving_ = engine_->Leave(OfThisProcess(std::move(parting)));
  const bool is_limited = timeout_ns >= 0 && timeout_ns < left_ns;
  if (!leaving_->SleepUntilDoneFor(is_limited ? timeout_ns : left_ns)) {
    if (is_limited) return false;
    joined_->liveness->NoteAgreed(why);
    (void)leaving_->SleepUntilDoneFor(kStopTimeoutNs);  // else StopEngine says what is stuck
  }
  const bool is_own = engine_->lifecycle().final_error().message() == why.message();
  StopEngine();
  if (is_own) shutdown_status_ = {};
  return true;
}

bool Generation::EndForNext(int64_t timeout_ns) {
  std::lock_guard lock(shutdown_);
  if (down_ || engine_ == nullptr || service_ == nullptr) return true;
  return LeaveTogether(timeout_ns, {}, Aborted(kMembersChange));
}

// One thread may close the ranks of its process one after another: the first would wait for ever.
void Generation::LeaveAndStop() {
  const bool is_in_process = joined_ != nullptr && joined_->job != nullptr;
  if (LeaveAndStop(is_in_process ? ToNs(config_.shutdown_timeout_s) : -1, {})) return;
  std::lock_guard lock(shutdown_);
  if (!down_) StopEngine();
}

// Not under the mutex, since a callback may ask for the shutdown, too. All works have ended when
// the engine is down, so no callback comes to be due later.
bool Generation::Shutdown(int64_t timeout_ns, Lifecycle::Parting parting) {
  const int64_t until_ns = timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
  if (!LeaveAndStop(timeout_ns, std::move(parting))) return false;
  if (engine_ == nullptr || given_up()) return true;
  const int64_t left_ns = std::max<int64_t>(until_ns - SteadyClock().NowNs(), 0);
  return engine_->AwaitCallbacks(timeout_ns < 0 ? -1 : left_ns);
}

void Generation::Close() {
  LeaveAndStop();
  // One that is stuck in a library does not return; true: there is no limit.
  if (engine_ != nullptr && !given_up()) (void)engine_->AwaitCallbacks(-1);
}

// A rank that ends well waits for the others. One that ends badly ends the job in any case. Another
// thread may be inside Shutdown then, without a limit.
void Generation::EndAtExit(int exit_code) {
  if (recorder_ != nullptr) recorder_->FinishDumps();
  if (exit_code == 0) {
    LeaveAndStop();
    (void)engine_->AwaitCallbacks(
        kLastCallsNs);  // one that waits for ever must not hold up the exit
  } else {
    const std::unique_lock lock(shutdown_, std::try_to_lock);
    if (!lock || leaving_ == nullptr) return;
    if (!down_) {
      const std::string code = "has exited with code " + std::to_string(exit_code);
      const FailureFacts facts = {.cause = code, .kind = FailureKind::kExited, .number = exit_code};
      leaving_ = engine_->Leave(OfThisProcess({true, facts}));
      (void)leaving_->SleepUntilDoneFor(kSayCodeNs);
      StopEngine();
    }
  }
  if (shutdown_status_.ok()) return;
  joined_->log->Write(LogLevel::kWarning, shutdown_status_.message());
}

Status Generation::shutdown_status() {
  std::lock_guard lock(shutdown_);
  return shutdown_status_;
}

// What has gone wrong in the end is told once: what a later call says of this generation is either
// that, or that there is another one.
Generation::Explained Generation::Explain(const Status& failure) {
  const Lifecycle& lifecycle = engine_->lifecycle();
  if (lifecycle.failed() && failure.code() == lifecycle.final_error().code()) has_told_.store(true);
  const uint64_t ended_at = ended_at_.load();
  const uint64_t now = World::Get().generations();
  if (ended_at == 0 || now == ended_at || failure.code() == Code::kInvalidArgument)
    return {failure, false};
  return {Aborted("generation " + std::to_string(number_) + " of this process has ended (" +
                  failure.message() + "), and init() has begun generation " + std::to_string(now) +
                  ", which has operations, works, gradients and process sets of its own"),
          true};
}

// Under shutdown_, once. In this order: whether all have left is asked before Stop fails what is
// pending; the timeline takes spans until the engine thread has ended; the planes go last, since
// the engine calls them.
void Generation::StopEngine() {
  World::Get().Unlist(this);
  if (service_ != nullptr) service_->Forget();
  down_ = true;
  shutdown_status_ = leaving_->done() ? leaving_->status()
                                      : Timeout(
                                            "shutdown: this rank ends before every rank has "
                                            "shut down; ranks still at work may be ended now");
  const bool clean = engine_->ShutDownCleanly();
  given_up_ = !engine_->Stop(kStopTimeoutNs);
  if (given_up_) {
    World::Get().UnwaitedThreadBegins();  // for good
    shutdown_status_ = engine_->lifecycle().final_error();
  }
  const Status traced = timeline_->Stop();
  if (!traced.ok()) joined_->log->Write(LogLevel::kWarning, traced.message());
  if (joined_->uses_mpi && !clean) World::Get().MpiGenerationFailed();
  if (recorder_ != nullptr) recorder_->FinishDumps();
  ended_at_.store(World::Get().generations());
  if (given_up_) return;  // the stuck thread may still use all there is
  // Planes over MPI stay after a failure, see Connections::Close; what knows shared memory alone
  // goes, and with it the memory.
  if (joined_->uses_mpi && !clean) {
    if (joined_->shared.memory != nullptr) planes_.pop_back();
    for (std::unique_ptr<DataPlane>& plane : planes_) (void)plane.release();
    (void)gpu_.release();
  }
  planes_.clear();
  joined_->Close(clean);
}

}  // namespace farandole
