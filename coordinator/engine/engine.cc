#include "coordinator/engine/engine.h"

#include <algorithm>
#include <utility>

#include "coordinator/engine/engine_observer.h"

namespace farandole {
namespace {

ProcessSetInfo GlobalSet(const NegotiationOptions& options) {
  ProcessSetInfo set;
  for (int rank = 0; rank < options.size; ++rank) set.ranks.push_back(rank);
  set.planes = options.PlanesOf(set.ranks);
  set.slots = options.slots;
  return set;
}

// Memory to read from is there for whatever this rank contributes, and memory to write to for what
// it takes; in variable-size collectives they lie apart. The root of a broadcast takes nothing.
Status CheckMemory(const Operation& operation, std::span<const void* const> in,
                   std::span<void* const> out, const Vote& vote) {
  if (!vote.failed.empty()) return {};
  const bool is_variable_size = IsVariableSize(operation.name.kind);
  const auto refuse = [&](size_t i, const char* why) {
    return InvalidArgument(Describe(operation.name) + ": tensor " + std::to_string(i) + why);
  };
  for (size_t i = 0; i < in.size(); ++i) {
    const Extent bytes = operation.extents[i];
    if (TestBit(vote.absent, static_cast<int>(i))) continue;
    if (bytes.in > 0 && in[i] == nullptr) {
      return refuse(i, " has no input; expected an address, or the vote absent");
    }
    const bool is_root = operation.name.kind == OpKind::kBroadcast && bytes.in > 0;
    if (bytes.out > 0 && !is_root && !out.empty() && out[i] == nullptr) {
      return refuse(i, " has no output; expected an address, or the vote absent");
    }
    if (bytes.in > 0 && is_variable_size && !out.empty() &&
        Overlap(in[i], bytes.in, out[i], bytes.out)) {
      return refuse(i, " has its output in the memory of its input; expected them apart");
    }
  }
  return {};
}

}  // namespace

Engine::Engine(EngineOptions options, EngineParts parts)
    : options_(std::move(options)),
      parts_(std::move(parts)),
      lifecycle_(rank()),
      operations_(*this, rank(), lifecycle_, GlobalSet(options_.negotiation), parts_.planes),
      submissions_(*parts_.doorbell, options_.linger_ns, options_.linger_bytes),
      announcer_(lifecycle_, operations_, submissions_),
      gpu_(parts_.gpu != nullptr ? *parts_.gpu : no_gpu_),
      loop_(options_, parts_, GlobalSet(options_.negotiation), Shared()),
      progress_(loop_, parts_, Shared(), options_),
      watchdog_(loop_, options_, parts_, Shared()) {
  if (!options_.threads) return;
  watchdog_.Start();
  try {
    progress_.Start();
  } catch (...) {  // no further thread can be had
    watchdog_.Stop();
    throw;
  }
}

SharedParts Engine::Shared() {
  return {lifecycle_,
          operations_,
          submissions_,
          announcer_,
          steps_,
          gpu_,
          parts_.memory != nullptr ? *parts_.memory : own_memory_,
          parts_.liveness != nullptr ? *parts_.liveness : own_liveness_,
          callers_,
          callbacks_};
}

Engine::~Engine() {
  Stop();
  callbacks_.Join();  // they use what is destroyed before them
}

// A thread with the engine lock that does not come back from a library keeps the engine, and
// everything it may touch is leaked by the caller. The watchdog ends first, since this function has
// its own deadline and GiveUp does what the watchdog would do. The engine lock is taken last
// because a waiting caller may be running the engine loop.
bool Engine::Stop(int64_t timeout_ns) {
  if (loop_.given_up()) return false;
  int64_t waited_ns = 0;
  if (progress_.IsRunning()) {
    loop_.RequestStop();
    parts_.doorbell->Close();  // a wake-up could come before the ticket of who is to be woken
    watchdog_.Stop();
    if (!progress_.Stop(timeout_ns, &waited_ns)) return GiveUp(timeout_ns);
  }
  const std::unique_lock lock = progress_.LockWithin(timeout_ns < 0 ? -1 : timeout_ns - waited_ns);
  if (!lock) return GiveUp(timeout_ns);
  loop_.Fail(Aborted("farandole has been shut down on rank " + std::to_string(rank())));
  return true;
}

// The borrowed memory is released; the stuck thread may not touch it when it returns. The order
// matters: the flag keeps the stuck thread from libraries, Fail revokes the borrowed memory, and
// only then the works end, after which users may free it.
bool Engine::GiveUp(int64_t waited_ns) {
  loop_.GiveUp();
  watchdog_.Fail(Timeout(
      "rank " + std::to_string(rank()) + ": shutdown: a thread is stuck inside a library call (" +
      std::to_string(waited_ns / kNsPerMs) + " ms after it was asked to stop) and is left behind"));
  operations_.FailInFlight(lifecycle_.final_error());
  progress_.Detach();
  return false;
}

Result<std::shared_ptr<Work>> Engine::Start(Operation& operation, std::span<const void* const> in,
                                            std::span<void* const> out, const Vote& vote,
                                            bool notify, std::span<const ProducerStream> producers,
                                            uint32_t version) {
  callers_.Enter();
  FARANDOLE_RETURN_IF_ERROR(operations_.Claim(operation, version));
  ClaimedOperation claimed(operation);
  return StartClaimed(claimed, in, out, vote, notify, producers);
}

Result<std::shared_ptr<Work>> Engine::StartClaimed(ClaimedOperation& claimed,
                                                   std::span<const void* const> in,
                                                   std::span<void* const> out, const Vote& vote,
                                                   bool notify,
                                                   std::span<const ProducerStream> producers,
                                                   std::shared_ptr<ResultAllocator> allocator) {
  Operation& operation = *claimed;
  // What can refuse the request comes before Submit, which hands it to the engine. RecordProducers
  // is the last check, as it already puts events into the user's streams.
  operation.allocator = std::move(allocator);
  FARANDOLE_RETURN_IF_ERROR(CheckMemory(operation, in, out, vote));
  FARANDOLE_RETURN_IF_ERROR(lifecycle_.CheckStart());
  FARANDOLE_RETURN_IF_ERROR(operation.RecordProducers(gpu_, vote, producers));
  for (EngineObserver* const one : parts_.observers.starting) {
    if (std::string refused = one->Refuse(operation, in, vote); !refused.empty()) {
      Vote failed = vote;
      failed.failed = std::move(refused);
      return submissions_.Submit(claimed, in, out, failed, notify);
    }
  }
  return submissions_.Submit(claimed, in, out, vote, notify);
}

Status Engine::AnnounceStep(uint32_t set, const std::string& prefix, const StepCount& step) {
  return announcer_.Announce(set, prefix, step, !fills_cores());
}

void Engine::EndStep(int joins) {
  const int64_t now_ns = parts_.clock->NowNs();
  const LinkUse link = parts_.hub != nullptr ? parts_.hub->Use(now_ns) : LinkUse();
  const std::optional<StepTimes> times = steps_.End(rank(), joins, link, now_ns);
  if (!times) return;
  for (EngineObserver* const one : parts_.observers.all) one->OnStep(*times);
}

bool Engine::Wait(const Work& work, int64_t timeout_ns) { return progress_.Wait(work, timeout_ns); }

bool Engine::Poll(const Work& work) {
  if (work.done()) return true;
  // A caller that polls waits: without this its operation would be held for the linger time.
  submissions_.Hurry();
  if (options_.threads) parts_.doorbell->Summon();
  return work.done();
}

void Engine::WhenDone(const std::shared_ptr<Work>& work, std::function<void(const Status&)> call) {
  if (work->done()) return call(work->status());
  std::unique_ptr<Callback> callback = callbacks_.Make(std::move(call));
  callbacks_.WaitFor(work);  // first: once the work has the callback the engine may end
  if (work->AddCallback(callback)) return;
  callbacks_.Discard();
  callback->call(work->status());
}

Status Engine::MakeWait(const std::shared_ptr<DeviceEvent>& end, const ProducerStream& stream) {
  return gpu_.MakeWait(end, stream.device, stream.stream);
}

Result<std::shared_ptr<Work>> Engine::AddSet(const std::vector<int32_t>& ranks) {
  const Result<Operation*> prepared = operations_.PrepareAddSet(ranks);
  if (!prepared.ok()) return prepared.status();
  const HeldOperation held(prepared.value());
  return Start(*prepared.value(), {}, {});
}

Result<std::shared_ptr<Work>> Engine::RemoveSet(uint32_t uid) {
  const Result<Operation*> prepared = operations_.PrepareRemoveSet(uid);
  if (!prepared.ok()) return prepared.status();
  const HeldOperation held(prepared.value());
  return Start(*prepared.value(), {}, {});
}

Engine::TableSizes Engine::Sizes() const { return {loop_.NegotiationSizes(), operations_.Sizes()}; }

Result<std::shared_ptr<Work>> Engine::Join() {
  Result<Lifecycle::Change> join = lifecycle_.Join();
  if (!join.ok()) return join.status();
  // Through the queue, behind what was started before: a join speaks of what this rank has not
  // submitted. A leave, below, likewise.
  if (join.value().is_new) submissions_.PushJoin();
  return join.value().work;
}

std::shared_ptr<Work> Engine::Leave(Lifecycle::Parting parting) {
  Lifecycle::Change leave = lifecycle_.Leave(std::move(parting));
  if (leave.is_new) submissions_.PushLeave();
  return leave.work;
}

}  // namespace farandole
