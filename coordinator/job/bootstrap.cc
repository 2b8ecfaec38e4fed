#include "coordinator/job/bootstrap.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/graces.h"
#include "coordinator/control/host_transport.h"
#include "coordinator/control/in_process.h"
#include "coordinator/control/tcp_network.h"
#include "coordinator/job/world.h"
#include "coordinator/liveness/listen_beside.h"
#include "coordinator/membership/encoding.h"
#include "core/futex.h"
#include "core/pmi_store.h"
#include "ops/cpu/kernels.h"
#include "ops/p2p/plane.h"
#include "ops/shm/plane.h"

namespace farandole {

// All doorbells exist before the first rank does, because a rank rings those of the others. A
// rank's Connections hold the job and declare it before transport and planes, so the hubs outlive
// both.
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

// For a join that was given up to end; what takes longer is a call of the system that stands still.
constexpr int64_t kCancelNs = kNsPerSecond;
// How long one call of a user's store waits for a key: in between, Joined looks at the time.
constexpr int64_t kStoreSliceNs = 20 * kNsPerMs;

std::string PlaceOf(const Launcher& launcher) {
  return "rank " + std::to_string(launcher.rank) + " of " + std::to_string(launcher.size);
}

std::string InSeconds(double seconds) {
  char text[32];
  (void)std::snprintf(text, sizeof(text), "%g s", seconds);  // long enough for any double
  return text;
}

int64_t DeadlineNs(const Config& config) {
  return SteadyClock().NowNs() + ToNs(config.init_timeout_s);
}

std::unique_ptr<Log> LogOfRank(const Config& config, int rank, int size) {
  return std::make_unique<PrefixLog>(config.log_level,
                                     std::to_string(rank) + "/" + std::to_string(size));
}

Hello MyHello(const Config& config, const DataPlane& flat) {
  Hello mine;
  mine.version = FARANDOLE_BUILD_ID;
  mine.host = ThisHost();
  mine.planes.emplace_back(flat.name());
  mine.config = config;
  return mine;
}

}  // namespace

// Hides the values by which this process has joined jobs before: rank 0 writes another one with
// each start, so what has not changed is that of the job before. Thread safety: the joiner.
class Bootstrap::RenewedStore final : public Store {
 public:
  explicit RenewedStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  Status Set(const std::string& key, const std::string& value) override {
    last_ = value;
    return store_->Set(key, value);
  }
  Result<std::string> Get(const std::string& key, int64_t timeout_ns) override {
    Result<std::string> value = store_->Get(key, timeout_ns);
    if (!value.ok()) return value;
    last_ = value.value();
    if (!World::Get().HasUsed(last_)) return value;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(timeout_ns, kStoreSliceNs)));
    return Timeout("rank 0 has not renewed \"" + key + "\" in the store since the job before");
  }
  // The job of the last value has been joined.
  void NoteUsed() const { World::Get().NoteUsed(last_); }

 private:
  const std::shared_ptr<Store> store_;
  std::string last_;
};

// Has the calls of the joiner made by the thread that waits in Joined, which is the user's: his
// store may be Python's, which no thread must call that outlives the interpreter.
//
// Thread safety: Serve and Close from the waiting thread, the rest from the joiner.
class Bootstrap::RelayedStore final : public Store {
 public:
  RelayedStore(std::shared_ptr<Store> store, int64_t deadline_ns, std::function<void()> ask)
      : store_(std::move(store)), deadline_ns_(deadline_ns), ask_(std::move(ask)) {}

  Status Set(const std::string& key, const std::string& value) override {
    return Ask({key, value}, deadline_ns_ - SteadyClock().NowNs()).status();
  }
  Result<std::string> Get(const std::string& key, int64_t timeout_ns) override {
    return Ask({key, std::nullopt}, timeout_ns);
  }

  // The user's code runs without the lock. The joiner may have another request meanwhile.
  void Serve() {
    std::unique_lock lock(mutex_);
    if (!request_ || answer_) return;
    const Request request = *request_;
    const int number = number_;
    lock.unlock();
    Result<std::string> answer = Call(request);
    lock.lock();
    if (answer.status().code() == Code::kTimeout) {  // asked again
      why_late_ = answer.status().message();
      return;
    }
    if (request_ && number == number_) answer_ = std::move(answer);
    changed_.notify_all();
  }

  bool has_request() {
    const std::lock_guard lock(mutex_);
    return request_ && !answer_;
  }

  void Close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }

 private:
  struct Request {
    std::string key;
    std::optional<std::string> value;  // nullopt: of a Get
  };
  Result<std::string> Call(const Request& request) {
    if (!request.value) return store_->Get(request.key, kStoreSliceNs);
    const Status status = store_->Set(request.key, *request.value);
    return status.ok() ? Result<std::string>(std::string()) : Result<std::string>(status);
  }

  // A Get that is asked for again is the same request: where its answer takes longer than the
  // joiner waits at a time, it counts for whichever wait it comes in.
  Result<std::string> Ask(Request request, int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    const std::string key = request.key;
    const bool is_set = request.value.has_value();
    if (is_set || !request_ || request_->value || request_->key != key) {
      request_ = std::move(request);
      ++number_;
      answer_.reset();
      why_late_.clear();
    }
    ask_();
    const auto limit = std::chrono::nanoseconds(std::max<int64_t>(timeout_ns, 0));
    changed_.wait_for(lock, limit, [this] { return answer_.has_value() || is_closed_; });
    if (answer_) {
      request_.reset();
      return *std::exchange(answer_, std::nullopt);
    }
    if (is_closed_) return Aborted("init was given up");
    return Timeout(std::string("init: the store has not ") + (is_set ? "taken" : "given") + " \"" +
                   key + "\" in time" + (why_late_.empty() ? "" : ": " + why_late_));
  }

  const std::shared_ptr<Store> store_;
  const int64_t deadline_ns_;
  const std::function<void()> ask_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Request> request_;
  int number_ = 0;  // of the request
  std::optional<Result<std::string>> answer_;
  std::string why_late_;  // what the store said last
  bool is_closed_ = false;
};

// MPI objects must be gone before MPI is finalised; after a failure they may hold requests, so they
// stay, with the planes over them. What knows shared memory alone goes, and with it the memory.
void Connections::Close(bool clean) {
  if (uses_mpi && !clean) {
    (void)host_plane.release();
    for (std::unique_ptr<DataPlane>& plane : cross_planes) (void)plane.release();
    (void)(between_hosts != nullptr ? new std::shared_ptr(between_hosts) : nullptr);
    if (between_hosts == nullptr) (void)transport.release();
  }
  host_plane.reset();
  for (std::unique_ptr<DataPlane>& plane : cross_planes) plane.reset();
  if (clean && uses_mpi && hub != nullptr) hub->Leave();
  if (clean) transport->Leave();
  transport.reset();
  between_hosts.reset();
  if (hub != nullptr) hub->Shutdown();  // what is leaked must not ring the doorbell
  network.reset();
  // Only now: another thread may call exit at any time, and World must not finalise MPI
  // while objects of ours still use it.
  if (uses_mpi && clean) World::Get().MpiGenerationEnded();
}

MemberService::Options MemberOptions(const Config& config, std::string key, std::string job,
                                     std::vector<SocketAddress> where) {
  MemberService::Options options;
  options.key = std::move(key);
  options.job = std::move(job);
  options.where = std::move(where);
  options.ports = config.ports;
  options.is_anywhere = config.interfaces.empty();
  options.log_level = config.log_level;
  options.silence_ns = ToNs(config.liveness_timeout_s);
  options.join_ns = ToNs(std::max(config.init_timeout_s, kLongestJoinS));
  options.most = static_cast<int>(config.slots);  // a rank without a slot has nothing to do
  return options;
}

std::shared_ptr<InProcessJob> JobInProcess(int size) {
  return std::make_shared<InProcessJob>(size);
}

// Two planes: members must start a set's batches in one order on each plane, and the batches that
// the CUDA plane starts for itself have no place in the order of the decided ones.
Result<std::unique_ptr<Connections>> ConnectInProcess(std::shared_ptr<InProcessJob> job, int rank,
                                                      const Config& config) {
  auto made = std::make_unique<Connections>();
  made->doorbell = job->bells[static_cast<size_t>(rank)];
  made->liveness = std::make_unique<LivenessTable>(made->doorbell.get());
  made->transport = job->hub.Create(rank, made->doorbell.get(), made->liveness.get());
  const int size = made->transport->size();
  made->log = LogOfRank(config, rank, size);
  made->flat =
      std::make_unique<SharedMemoryPlane>(job->local, rank, BestCpuKernels(), &made->counters);
  made->host_plane = std::make_unique<SharedMemoryPlane>(job->staged, rank, BestCpuKernels());
  made->buffers = job->local;
  made->job = std::move(job);
  // All ranks are built from one config by one thread: they agree without exchanging anything.
  const std::vector<std::string> alike(static_cast<size_t>(size),
                                       EncodeHello(MyHello(config, *made->flat)));
  Result<Rendezvous> rendezvous = Agree(alike, rank);
  if (!rendezvous.ok()) return rendezvous.status();
  FARANDOLE_RETURN_IF_ERROR(CheckSlots(config, size));
  made->rendezvous = std::move(rendezvous).value();
  return made;
}

Bootstrap::Bootstrap(const Config& config, const Launcher& launcher, std::string network)
    : config_(config),
      launcher_(launcher),
      network_(std::move(network)),
      deadline_ns_(DeadlineNs(config)),
      connections_(std::make_unique<Connections>()) {
  connections_->log = LogOfRank(config, launcher.rank, launcher.size);
  connections_->doorbell = std::make_shared<FutexDoorbell>();
  connections_->liveness =
      std::make_unique<LivenessTable>(connections_->doorbell.get(), LivenessTable::kCauseNs);
  connections_->job_name = launcher.job;
}

Result<std::shared_ptr<Bootstrap>> Bootstrap::Begin(const Environment& environment,
                                                    const Config& config,
                                                    const Launcher& launcher) {
  Result<std::string> network = ChooseNetwork(launcher, config.network);
  if (!network.ok()) return network.status();
  World& world = World::Get();
  if (network.value() == "mpi") {
    if (world.has_mpi_timed_out()) {
      return Unavailable(
          "an earlier init() of this process over MPI timed out, and it cannot join the job any "
          "more; end it and start the job again");
    }
    World::AbandonedJoin& abandoned = world.abandoned();
    const std::lock_guard lock(abandoned.mutex);
    if (abandoned.join != nullptr && abandoned.process == getpid()) {
      Bootstrap& join = *abandoned.join;
      if (join.launcher_.identity != launcher.identity) {
        return Unavailable("an init() of this process over MPI was interrupted, as " +
                           PlaceOf(join.launcher_) +
                           ", and goes on: MPI can be initialized once, " +
                           "so it cannot join as " + PlaceOf(launcher));
      }
      join.deadline_ns_.store(DeadlineNs(config));
      return std::exchange(abandoned.join, nullptr);
    }
  }
  // A process that joined before has set kRankProcess itself and may join again.
  if (!world.is_rank()) FARANDOLE_RETURN_IF_ERROR(RefuseDescendant(environment, launcher));
  std::shared_ptr<Bootstrap> made(new Bootstrap(config, launcher, std::move(network).value()));
  made->BeginJoining();
  return made;
}

// MPI_Init_thread may wait until every rank has called it; it takes no deadline and no signal ends
// it. So a thread of its own joins the job, and is left behind when the time is up:
// docs/decisions.md. It shares this object.
void Bootstrap::BeginJoining() {
  const auto ring = [this] {
    news_.fetch_add(1);
    FutexWake(news_, INT_MAX);
  };
  const bool has_pmi = network_ == "tcp" && launcher_.pmi_descriptor >= 0;
  const std::shared_ptr<Store> store =
      has_pmi ? PmiStore(launcher_.pmi_descriptor) : launcher_.store;
  if (store != nullptr) store_ = std::make_shared<RelayedStore>(store, deadline_ns_, ring);
  // Before the thread exists, since the process may end while it starts.
  World::Get().UnwaitedThreadBegins();
  const auto join = [this, ring, self = shared_from_this()] {
    const bool is_mpi = network_ == "mpi";
    if (is_mpi) World::Get().MpiGenerationStarted();
    try {
      status_ = Join();
    } catch (...) {
      status_ = FromException();
    }
    // Nothing collective was begun that other ranks could wait in: MPI may be finalised at exit.
    if (is_mpi && !connections_->uses_mpi) World::Get().MpiGenerationEnded();
    if (stop_.stop_requested()) connections_.reset();
    World::Get().UnwaitedThreadEnds();
    is_done_.store(true);
    ring();
  };
  try {
    joiner_ = std::thread(join);
  } catch (...) {
    World::Get().UnwaitedThreadEnds();
    throw;
  }
}

int64_t Bootstrap::TimeLeftNs() const {
  return std::max<int64_t>(deadline_ns_.load() - SteadyClock().NowNs(), 0);
}

// Wakes now and then, because the deadline depends on where the joiner is. In MPI_Init_thread
// nobody else watches the time. Later the steps of Join have limits of their own, and kInitGraceNs
// lets their errors, which name the missing ranks, come first.
Result<std::unique_ptr<Connections>> Bootstrap::Joined(int64_t timeout_ns) {
  const int64_t until_ns = timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
  for (;;) {
    const uint32_t seen = news_.load();
    if (store_ != nullptr) store_->Serve();
    if (is_done_.load()) break;
    const int64_t now_ns = SteadyClock().NowNs();
    const int64_t grace_ns = in_mpi_init_.load() ? 0 : kInitGraceNs;
    if (now_ns >= deadline_ns_.load() + grace_ns) return GiveUp();
    if (now_ns >= until_ns) return std::unique_ptr<Connections>();
    const bool is_asked = store_ != nullptr && store_->has_request();
    const int64_t nap_ns = is_asked ? kNsPerMs : 100 * kNsPerMs;
    FutexWait(news_, seen, std::min(until_ns - now_ns, nap_ns));
  }
  joiner_.join();
  if (connections_->uses_mpi && status_.code() == Code::kTimeout) World::Get().MpiTimedOut();
  FARANDOLE_RETURN_IF_ERROR(status_);
  return std::move(connections_);
}

// A thread inside MPI may return into this object at any time: it is leaked.
Status Bootstrap::GiveUp() {
  const std::string late =
      " did not return within " + InSeconds(config_.init_timeout_s) + " (FARANDOLE_INIT_TIMEOUT_S)";
  const std::string way_out = "; this process cannot join any more and should end";
  if (network_ == "tcp") {
    Cancel();
    return Timeout("init: a call of the system, for rank 0's address or the job's key," + late);
  }
  World::Get().MpiTimedOut();
  World::Get().MpiGenerationFailed();
  joiner_.detach();
  (void)new std::shared_ptr<Bootstrap>(shared_from_this());
  if (!in_mpi_init_.load()) return Timeout("init: a call of MPI" + late + way_out);
  return Timeout("init: MPI_Init_thread" + late + ": it waits until all " +
                 std::to_string(launcher_.size) +
                 " ranks call init(), and some rank has not, or has died" + way_out);
}

// A thread that is left behind ends when its call returns, and takes what it has opened with it.
void Bootstrap::Cancel() {
  stop_.request_stop();
  if (store_ != nullptr) store_->Close();
  const int64_t until_ns = SteadyClock().NowNs() + kCancelNs;
  for (;;) {
    const uint32_t seen = news_.load();
    const int64_t left_ns = until_ns - SteadyClock().NowNs();
    if (is_done_.load()) return joiner_.join();
    if (left_ns <= 0) return joiner_.detach();
    FutexWait(news_, seen, left_ns);
  }
}

void Bootstrap::Abandon() {
  if (!joiner_.joinable()) return;
  if (network_ == "tcp") return Cancel();
  World::AbandonedJoin& abandoned = World::Get().abandoned();
  const std::lock_guard lock(abandoned.mutex);
  abandoned.join = shared_from_this();
  abandoned.process = getpid();
}

Status Bootstrap::Join() {
  Result<Network*> network = network_ == "mpi" ? StartMpi() : StartTcp();
  if (!network.ok()) return network.status();
  return Connect(*network.value());
}

Result<Network*> Bootstrap::StartMpi() {
  in_mpi_init_.store(true);
  Result<MpiRuntime*> mpi = World::Get().Mpi(config_, launcher_, *connections_->log);
  in_mpi_init_.store(false);
  const std::string announced =
      launcher_.source + " announced " + std::to_string(launcher_.size) + " ranks, but ";
  if (!mpi.ok()) {
    return Status(mpi.status().code(),
                  announced + "MPI cannot be used: " + mpi.status().message() +
                      (launcher_.has_mpi ? "; FARANDOLE_NETWORK=tcp goes without" : ""));
  }
  // A libmpi that does not belong to the launcher's mpirun starts as a job of one rank: every rank
  // would train by itself.
  if (mpi.value()->size() != launcher_.size) {
    return Unavailable(
        announced + mpi.value()->library_version() + " sees " +
        std::to_string(mpi.value()->size()) +
        (launcher_.has_mpi
             ? "; the launcher and the MPI library belong to different installations"
             : "; no MPI launcher started this process, and FARANDOLE_NETWORK asks for MPI"));
  }
  connections_->uses_mpi = true;  // from here on MPI_Finalize could wait for ranks that do not come
  return mpi.value();
}

Result<Network*> Bootstrap::StartTcp() {
  Result<std::string> key = launcher_.key;
  if (launcher_.key.empty()) key = World::Get().Key(launcher_, deadline_ns_, stop_.get_token());
  if (!key.ok()) return key.status();
  Result<int> socket = launcher_.listener != nullptr ? launcher_.listener->Release()
                                                     : World::Get().Listener(launcher_);
  if (!socket.ok()) return socket.status();
  std::shared_ptr<Store> store = store_;
  if (!launcher_.folder.empty()) {
    Result<std::unique_ptr<Store>> folder = OpenFileStore(launcher_.folder);
    if (!folder.ok()) return folder.status();
    store = std::move(folder).value();
  }
  TcpNetworkOptions options;
  if (store != nullptr) renewed_ = std::make_shared<RenewedStore>(std::move(store));
  options.store = renewed_;
  options.stop = stop_.get_token();
  options.rank = launcher_.rank;
  options.size = launcher_.size;
  options.address = launcher_.address;
  options.listen_descriptor = socket.value();
  options.key = std::move(key).value();
  options.job = launcher_.job;
  options.interfaces = config_.interfaces;
  options.ports = config_.ports;
  options.streams = static_cast<int>(config_.tcp_streams);
  options.patience_ns = ToNs(config_.liveness_timeout_s);
  options.clock = &SteadyClock();
  options.log = connections_->log.get();
  Result<std::unique_ptr<Network>> network = MakeTcpNetwork(std::move(options));
  if (!network.ok()) return network.status();
  connections_->network = std::move(network).value();
  return connections_->network.get();
}

// From CreateTransport on each step is collective over all ranks, so all make them in this order,
// and each has what is left of one deadline.
Status Bootstrap::Connect(Network& network) {
  Connections& made = *connections_;
  Result<std::unique_ptr<Transport>> transport = network.CreateTransport(Links());
  if (!transport.ok()) return transport.status();
  made.transport = std::move(transport).value();
  made.hub = network.hub();
  if (renewed_ != nullptr) renewed_->NoteUsed();
  World::Get().NoteRank(launcher_);
  for (std::unique_ptr<DataPlane>* plane : {&made.flat, &made.host_plane}) {
    FARANDOLE_RETURN_IF_ERROR(CreatePlane(network, *plane));
  }
  Result<Rendezvous> rendezvous =
      RunRendezvous(*made.transport, MyHello(config_, *made.flat), TimeLeftNs());
  if (!rendezvous.ok()) return rendezvous.status();
  made.rendezvous = std::move(rendezvous).value();
  if (config_.is_elastic && launcher_.key.empty()) FARANDOLE_RETURN_IF_ERROR(MeetMembers());
  if (made.uses_mpi) FARANDOLE_RETURN_IF_ERROR(WatchOtherHosts());
  FARANDOLE_RETURN_IF_ERROR(ShareHostMemory());
  const std::vector<int>& parent = made.rendezvous.parent;
  const int rank = made.transport->rank();
  made.transport->SetNeighbours(made.uses_mpi ? Neighbours(parent, rank)
                                              : WatchedRanks(made.rendezvous.host, parent, rank));
  return AddCrossPlanes(network);
}

Status Bootstrap::CreatePlane(Network& network, std::unique_ptr<DataPlane>& plane) {
  Result<std::unique_ptr<DataPlane>> made = CreateP2pPlane(network, Links(), BestCpuKernels());
  if (!made.ok()) return made.status();
  plane = std::move(made).value();
  return {};
}

// With what is left of the init timeout.
LinkOptions Bootstrap::Links() {
  LinkOptions links;
  links.doorbell = connections_->doorbell.get();
  links.liveness = connections_->liveness.get();
  links.counters = &connections_->counters;
  links.timeout_ns = TimeLeftNs();
  links.memory = &connections_->memory;
  return links;
}

// Of the first generation: the later ones know their members from its proposal.
Status Bootstrap::MeetMembers() {
  Connections& made = *connections_;
  const JobKey key = made.hub->key();
  Result<std::shared_ptr<MemberService>> service = MemberService::Create(
      MemberOptions(config_, TextOf(key), launcher_.job, made.hub->Peer(launcher_.rank)));
  if (!service.ok()) return service.status();
  made.service = std::move(service).value();
  Result<std::vector<std::string>> texts =
      made.transport->Allgather(EncodeMembership({.sender = made.service->self()}), TimeLeftNs());
  if (!texts.ok()) return texts.status();
  for (const std::string& text : texts.value()) {
    Result<MembershipMessage> message = DecodeMembership(TextBytes(text));
    if (!message.ok()) return message.status();
    made.first.members.push_back(std::move(message.value().sender));
  }
  made.first.generation = {1, made.first.members.front().id};
  return {};
}

// MPI carries work and bad news alike, and none while it is stuck; it notices no death by itself.
Status Bootstrap::WatchOtherHosts() {
  Connections& made = *connections_;
  const std::vector<int>& host = made.rendezvous.host;
  const int rank = made.transport->rank();
  if (std::ranges::adjacent_find(host, std::ranges::not_equal_to()) == host.end()) return {};
  std::vector<int> elsewhere = WatchedRanks(host, made.rendezvous.parent, rank);
  std::erase_if(elsewhere, [&](int peer) {
    return host[static_cast<size_t>(peer)] == host[static_cast<size_t>(rank)];
  });
  HubOptions options;
  options.party.rank = rank;
  options.size = made.transport->size();
  options.connect_timeout_ns = TimeLeftNs();
  options.patience_ns = ToNs(config_.liveness_timeout_s);
  options.only_watches = true;
  options.clock = &SteadyClock();
  options.log = made.log.get();
  options.liveness = made.liveness.get();
  Result<std::shared_ptr<StreamHub>> hub =
      ListenBeside(*made.transport, elsewhere, options, config_, TimeLeftNs());
  if (!hub.ok()) return hub.status();
  made.hub = std::move(hub).value();
  return {};
}

// All ranks come to the same decisions here: the setting is agreed, and so is the outcome.
Status Bootstrap::ShareHostMemory() {
  Connections& made = *connections_;
  const int hosts = 1 + *std::ranges::max_element(made.rendezvous.host);
  if (!config_.shared_memory || hosts == made.transport->size()) return {};
  auto peers = std::make_unique<PeerWatch>(*made.liveness);
  Result<HostGroup> shared = ShareMemory(
      *made.transport, made.rendezvous.host, *made.doorbell,
      [&](int rank, pid_t pid) { (void)peers->Add(rank, pid); }, TimeLeftNs());
  if (!shared.ok()) return shared.status();
  made.shared = std::move(shared).value();
  made.buffers = made.shared.memory;
  if (made.shared.memory != nullptr) {
    const std::vector<int>& ranks = made.shared.memory->ranks();
    const auto mine = std::ranges::find(ranks, made.transport->rank()) - ranks.begin();
    made.peers = std::move(peers);
    made.peers->UsePulses(PulsesOf(*made.shared.memory), ranks, static_cast<size_t>(mine),
                          ToNs(config_.liveness_timeout_s));
    made.peers->SetDescribeLast([memory = made.shared.memory](int rank, int64_t* age_ns) {
      const auto at = std::ranges::find(memory->ranks(), rank) - memory->ranks().begin();
      const FlightRing& ring = *FlightsOf(*memory)[static_cast<size_t>(at)];
      return DescribeLast(ring, SteadyClock().NowNs(), age_ns);
    });
    made.between_hosts = std::move(made.transport);
    made.transport = MakeHostTransport(made.between_hosts, made.shared.memory, made.liveness.get());
  }
  if (!made.shared.failure.empty() && made.transport->rank() == 0) {
    made.log->Write(LogLevel::kWarning,
                    "no shared memory on some host, whose ranks use the network instead: " +
                        made.shared.failure);
  }
  return {};
}

// Collective, or nothing is done, on all ranks alike: they know who shares memory.
Status Bootstrap::AddCrossPlanes(Network& network) {
  const std::vector<int>& group = connections_->shared.group;
  const bool any = std::ranges::any_of(group, [](int memory) { return memory >= 0; });
  const bool all = std::ranges::adjacent_find(group, std::ranges::not_equal_to()) == group.end();
  if (!config_.hierarchical_allreduce || !any || all) return {};
  for (std::unique_ptr<DataPlane>& cross : connections_->cross_planes) {
    FARANDOLE_RETURN_IF_ERROR(CreatePlane(network, cross));
  }
  return {};
}

}  // namespace farandole
