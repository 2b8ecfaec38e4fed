#include "coordinator/engine/engine_loop.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "coordinator/engine/engine_observer.h"
#include "core/pause.h"

namespace farandole {
namespace {

constexpr int kMessagesPerIteration = 64;
constexpr int64_t kTickPeriodNs = 100 * kNsPerMs;  // how late a stall may be noticed
// After its final error an engine over a polled transport moves its last messages along, at least
// for so long when it is stopped. A message that such a transport calls drained may still wait for
// a connection.
constexpr int64_t kSpreadAtLeastNs = 100 * kNsPerMs;
constexpr int64_t kSpreadPollNs = kNsPerMs;
// How often an engine that fails looks for the peers' errors meanwhile.
constexpr int64_t kCausePollNs = 2 * kNsPerMs;
// How long an interpreter may take from its exit handlers to the exit code.
constexpr int64_t kAnnouncedNs = 5 * kNsPerSecond;
// So long a rank waits for the others of its host before it votes: not at the cost of the messages
// that it relays, and long enough for as many ranks as share a core to come to it.
constexpr int64_t kAgreeNs = 100 * kNsPerUs;
constexpr int64_t kCrowdedAgreeNs = 500 * kNsPerUs;  // without a core for each
// On other cores they are there in less, if they come at once; later one may wait for this core.
constexpr int64_t kAgreeSpinNs = 4 * kNsPerUs;
constexpr int kLooks = 16;  // between two looks at the clock

// The earlier of two waits, where a negative one means "no limit".
int64_t Sooner(int64_t a, int64_t b) {
  if (a < 0) return b;
  return b < 0 ? a : std::min(a, b);
}

Executor::Options ExecutorOptions(const EngineOptions& options) {
  return {options.negotiation.rank,
          {options.negotiation.FusionThreshold(DeviceKind::kCpu),
           options.negotiation.FusionThreshold(DeviceKind::kCuda)},
          {options.progress_timeout_ns, options.cuda_progress_timeout_ns},
          options.launched_bytes};
}

}  // namespace

EngineLoop::EngineLoop(const EngineOptions& options, const EngineParts& parts,
                       const ProcessSetInfo& global, const SharedParts& shared)
    : parts_(parts),
      lifecycle_(shared.lifecycle),
      operations_(shared.operations),
      submissions_(shared.submissions),
      announcer_(shared.announcer),
      steps_(shared.steps),
      gpu_(shared.gpu),
      liveness_(shared.liveness),
      callers_(shared.callers),
      callbacks_(shared.callbacks),
      longest_spread_ns_(options.longest_spread_ns),
      has_own_core_(options.spin_ns > 0),
      agree_ns_(has_own_core_ ? kAgreeNs : kCrowdedAgreeNs),
      negotiation_(options.negotiation, *this, parts.observe_negotiation),
      executor_(ExecutorOptions(options), parts.planes, *parts.counters, *this, shared.memory),
      coalescer_(*parts.transport, *parts.counters, shared.liveness),
      last_event_ns_(parts.clock->NowNs()),
      stall_shutdown_ns_(options.negotiation.stall_shutdown_ns) {
  Note(executor_.AddSet(global));
}

// The watchdog reads began_ns_: it is set as long as a library may hold up the thread in here.
EngineLoop::Outcome EngineLoop::RunOnce(Runner runner) {
  runner_ = runner;
  now_ns_ = parts_.clock->NowNs();
  began_ns_.store(now_ns_, std::memory_order_relaxed);
  parts_.counters->Add(Counter::kEngineLoops);
  Outcome outcome;
  try {
    outcome = lifecycle_.failed() ? Outcome{false, SpreadFailure()} : Advance();
  } catch (...) {
    outcome = FailForMemory();
  }
  began_ns_.store(0, std::memory_order_relaxed);
  return outcome;
}

// What was half done stays so: the engine ends. Without memory even for that, the next iteration
// tries again.
EngineLoop::Outcome EngineLoop::FailForMemory() {
  try {
    Note(ResourceExhausted("the engine: " + FromException().message()));
    if (!lifecycle_.failed()) FailEverywhere();
  } catch (...) {
    return {false, kNsPerMs};
  }
  return {false, 0};
}

// What is submitted or has arrived is negotiated and sent before batches run, which takes longest;
// what they have freed is negotiated and sent after them. An error is only noted where it is found,
// which may be inside a callback of negotiation or executor, and acted on at the end, when neither
// is running.
EngineLoop::Outcome EngineLoop::Advance() {
  Outcome outcome;
  int64_t wake_in_ns = -1;
  negotiation_.SetStallShutdown(stall_shutdown_ns_.load(std::memory_order_relaxed));
  outcome.moved = TakeSubmissions(&wake_in_ns);
  if (ReceiveMessages()) outcome.moved = true;
  FlushOutgoing();
  if (RunBatches()) {
    outcome.moved = true;
    FlushOutgoing();
  }
  if (outcome.moved) last_event_ns_ = now_ns_;
  operations_.Collect(executor_);
  if (is_failing_) FailEverywhere();
  outcome.sleep_ns = SleepFor(wake_in_ns);
  FinishLeaving();
  return outcome;
}

bool EngineLoop::TakeSubmissions(int64_t* wake_in_ns) {
  if (now_ns_ >= leave_due_ns_) {
    leave_due_ns_ = kNever;
    if (lifecycle_.Leave({}).is_new) submissions_.PushLeave();
  }
  Operation* const oldest = submissions_.TakeReady(now_ns_, wake_in_ns);
  if (oldest == nullptr) return false;
  // After an idle time the negotiation's clock is as old as the last iteration's. No Tick, which
  // may ask IsBlocked, while submissions are in neither table.
  negotiation_.SetTime(now_ns_);
  if (oldest->next != nullptr || !MayAgree(*oldest)) {
    SubmitAll(oldest);
  } else {
    Started(*oldest);
    if (!RunAgreed(*oldest)) CastVote(*oldest);
  }
  return true;
}

// An operation whose caller waits, while nothing else of this rank is in flight. It has run before:
// its key is bound to it. Steps, which nobody waits for, are left out by their votes (FindKnown).
bool EngineLoop::MayAgree(const Operation& operation) const {
  return runner_ == Runner::kWaiter && operation.is_awaited && executor_.Idle() && !is_failing_ &&
         !lifecycle_.failed() && operations_.Find(operation.key) == &operation &&
         operation.signature.device == DeviceKind::kCpu;
}

// Where the other ranks of the set, on this host, come soon and all agree, it runs as if it had
// been decided. @return whether it does.
bool EngineLoop::RunAgreed(Operation& operation) {
  Agreement* const agreement = executor_.AgreementOf(operation.name.set);
  if (agreement == nullptr) return false;
  const Negotiation::Known known =
      negotiation_.FindKnown(operation.key, operation.signature, operation.vote);
  if (known.id == kNoId) return false;
  const bool is_agreed = AllAgree(*agreement, known);
  const int64_t began_ns = std::exchange(now_ns_, parts_.clock->NowNs());
  steps_.NoteWait(operation.is_of_all_ranks, now_ns_ - began_ns);
  negotiation_.SetTime(now_ns_);
  if (!is_agreed) return false;
  negotiation_.NoteAgreed(known);
  parts_.counters->Add(Counter::kAgreements);
  agreed_ns_ = now_ns_;
  OnWork({0, operation.name.set, {&known.key, 1}});
  return true;
}

// A member that finds another operation proposed, or is later than this, votes.
bool EngineLoop::AllAgree(Agreement& agreement, const Negotiation::Known& known) const {
  Agreement::State state = agreement.Propose(known.round, known.id);
  bool yields = !has_own_core_;
  for (int looks = 1; state == Agreement::State::kOpen; ++looks) {
    yields ? std::this_thread::yield() : Pause();
    state = agreement.Look();
    const bool looks_again = !yields && looks % kLooks != 0;
    if (state != Agreement::State::kOpen || looks_again) continue;
    const int64_t waited_ns = parts_.clock->NowNs() - now_ns_;
    yields = yields || waited_ns >= kAgreeSpinNs;
    if (waited_ns >= agree_ns_) state = agreement.Decline();
  }
  return state == Agreement::State::kAgreed;
}

void EngineLoop::SubmitAll(Operation* oldest) {
  for (Operation* operation = oldest; operation != nullptr;) {
    // Read before Submit, which may end the operation: its owner may then push it again at once,
    // and that overwrites `next`.
    Operation* next = operation->next;
    Submit(*operation);
    operation = next;
  }
}

// The operation keeps the number of its key, so the name is hashed at the first submission only. An
// invalid submission ends that operation alone; Internal is a broken protocol and ends the engine.
void EngineLoop::Submit(Operation& operation) {
  if (submissions_.IsJoin(operation) || submissions_.IsLeave(operation))
    return SubmitChange(operation);
  Started(operation);
  CastVote(operation);
}

void EngineLoop::CastVote(Operation& operation) {
  if (lifecycle_.failed()) return Complete(operation, lifecycle_.final_error());
  if (operation.key == Operation::kUnknownKey) operation.key = negotiation_.Intern(operation.name);
  operations_.Bind(operation);
  Status accepted = negotiation_.Submit(operation.key, operation.signature, operation.vote);
  if (accepted.ok()) return;
  if (accepted.code() == Code::kInternal) Note(accepted);
  const bool is_step = operation.name.kind == OpKind::kStep;
  Complete(operation, accepted);
  if (is_step && agreed_error_.ok()) announcer_.StartLater(operation);
}

void EngineLoop::Started(Operation& operation) {
  parts_.counters->Add(Counter::kSubmissions);
  operation.submitted_ns = now_ns_;
  operation.decided_ns = 0;
  for (EngineObserver* const one : parts_.observers.submitted) one->OnSubmitted(operation, now_ns_);
}

// Joins or leaves: what was started before is submitted by now.
void EngineLoop::SubmitChange(Operation& change) {
  change.in_flight.store(false);
  if (lifecycle_.failed()) return;  // FailInFlight ends both
  if (submissions_.IsJoin(change)) {
    if (const Status joined = negotiation_.Join(); !joined.ok()) lifecycle_.EndJoin(joined);
  } else {
    Leave();
  }
}

// Once, or announced first; it may become final between the taking and this reading.
void EngineLoop::Leave() {
  if (has_left_ || lifecycle_.is_shut_down()) return;
  const Lifecycle::Parting parting = lifecycle_.parting();
  has_left_ = parting.is_final;
  leave_due_ns_ = parting.is_final ? kNever : now_ns_ + kAnnouncedNs;
  const Status left =
      parting.is_final ? negotiation_.Leave(parting.failure) : negotiation_.AnnounceLeave();
  if (!left.ok()) lifecycle_.EndLeave(left);
}

// Who is gone by the table has sent all it ever will: that is taken first. Once all have left, a
// peer may go as it likes.
bool EngineLoop::ReceiveMessages() {
  if (is_failing_) return false;  // FailEverywhere looks for what matters
  const bool has_news = liveness_.news() > 0;
  negotiation_.SetTime(now_ns_);  // an idle rank has had no Tick for long, and may be asked
  const Result<int> received = coalescer_.Receive(negotiation_, kMessagesPerIteration);
  if (!received.ok() && !lifecycle_.is_shut_down()) Note(received.status());
  if (!received.ok()) return false;
  const bool has_all = received.value() < kMessagesPerIteration;
  if (has_news && has_all && !lifecycle_.is_shut_down()) is_failing_ = true;
  return received.value() > 0;
}

// Lets the negotiation decide and send what has added up, in one transport message per peer.
void EngineLoop::FlushOutgoing() {
  if (given_up_.load()) return;
  negotiation_.Flush();
  Note(negotiation_.fault());
  if (is_failing_) return;  // nobody should hear what a broken negotiation says
  tick_ns_ = std::min(tick_ns_, negotiation_.due_ns());
  // A Tick may add reports and queries to what is sent next.
  if (now_ns_ >= tick_ns_) tick_ns_ = negotiation_.Tick(now_ns_);
  if (negotiation_.Busy()) tick_ns_ = std::min(tick_ns_, now_ns_ + kTickPeriodNs);
  Note(coalescer_.Flush());
  if (agreed_error_.ok()) return;
  liveness_.NoteAgreed(agreed_error_);  // not before it is on its way down
  is_failing_ = true;
}

bool EngineLoop::RunBatches() {
  if (is_failing_ || executor_.Idle()) {
    executor_poll_ns_ = kByDoorbell;
    return false;
  }
  // A GPU has come into use while this caller runs the loop; it releases the lock after this one.
  if (runner_ != Runner::kEngine && gpu_.in_use()) return false;
  const Executor::StepResult step = executor_.Step(now_ns_);
  executor_poll_ns_ = step.poll_after_ns;
  Note(step.status);
  return step.moved;
}

// All that can become due without a ring of the doorbell: submissions that are held, planes and
// transports that have to be polled, progress deadlines, and the negotiation's times.
int64_t EngineLoop::SleepFor(int64_t wake_in_ns) {
  // All members are in this call: whoever has to come to a core needs less than a sleep would cost.
  if (!executor_.Idle() && now_ns_ - agreed_ns_ < agree_ns_) return 0;
  const bool busy = negotiation_.Busy() || !executor_.Idle();
  wake_in_ns = Sooner(wake_in_ns, executor_poll_ns_);
  wake_in_ns = Sooner(wake_in_ns, parts_.transport->PollAfterNs(busy, now_ns_ - last_event_ns_));
  wake_in_ns = Sooner(wake_in_ns, executor_.NextStepNs());
  if (is_failing_) wake_in_ns = Sooner(wake_in_ns, kCausePollNs);
  if (leave_due_ns_ != kNever)
    wake_in_ns = Sooner(wake_in_ns, std::max<int64_t>(leave_due_ns_ - now_ns_, 0));
  if (tick_ns_ != kNever) wake_in_ns = Sooner(wake_in_ns, std::max<int64_t>(tick_ns_ - now_ns_, 0));
  return wake_in_ns;
}

bool EngineLoop::IsBusy() const {
  return negotiation_.Busy() || !executor_.Idle() || submissions_.IsWanted() || lifecycle_.failed();
}

// Also a rank that has left relays messages for those below it, so its leave ends only when all
// ranks have left and its last message is on its way.
void EngineLoop::FinishLeaving() {
  if (!lifecycle_.is_shut_down() || lifecycle_.is_drained() || !parts_.transport->Drained()) return;
  if (!executor_.Idle()) return;  // what is launched on a GPU was promised to its users
  lifecycle_.SetDrained();
  operations_.FailInFlight(Aborted("farandole has been shut down"));
}

// A second end is an error of ours, unless the watchdog has ended everything meanwhile.
void EngineLoop::Complete(Operation& operation, const Status& status) {
  for (EngineObserver* const one : parts_.observers.finished)
    one->OnFinished(operation, status, now_ns_);
  if (operation.Finish(status) || lifecycle_.failed()) return;
  Note(Internal(Describe(operation.name) + ": finished twice"));
}

// This rank's final error, or a peer's that has arrived, ends the work of all ranks. One cause
// often fails several of them at once, e.g. by their deadlines: what peers say of it counts. As
// long as the table awaits a better explanation the next iteration looks again.
void EngineLoop::FailEverywhere() {
  if (!given_up_.load()) coalescer_.Drain(kMessagesPerIteration);
  if (!agreed_error_.ok()) liveness_.NoteAgreed(agreed_error_);  // before a peer ended by it
  const LivenessTable::Cause cause = liveness_.Judge();
  if (!cause.is_final && !lifecycle_.failed()) return;
  failed_here_ = cause.is_shared ? cause.error : FailedHere(parts_.transport->rank(), cause.error);
  failed_here_ns_ = now_ns_;
  // After Shutdown no rank acts on an error, and peers may be gone.
  if (!lifecycle_.is_shut_down() && !given_up_.load()) {
    coalescer_.SpreadAbort(failed_here_, cause.is_shared);
    // A transport that rings and has no message waiting needs no further polls to move them on.
    spreading_abort_.store(parts_.transport->PollAfterNs(true, 0) != kByDoorbell ||
                           !parts_.transport->Drained());
  }
  Fail(failed_here_);
}

// The iteration of an engine that has failed: it moves nothing but the report of its error.
// @return how long to sleep.
int64_t EngineLoop::SpreadFailure() {
  if (given_up_.load()) return -1;
  if (failed_here_.ok()) FailEverywhere();  // it is the watchdog that has failed this engine
  SubmitAll(submissions_.TakeAll());
  operations_.FailInFlight(lifecycle_.final_error());
  if (!spreading_abort_.load()) return -1;
  coalescer_.Drain(kMessagesPerIteration);
  const int64_t spread_ns = now_ns_ - failed_here_ns_;
  const bool enough = stop_.load() && parts_.transport->Drained() && spread_ns >= kSpreadAtLeastNs;
  if (enough || spread_ns >= longest_spread_ns_) spreading_abort_.store(false);
  return kSpreadPollNs;
}

// The order matters: first the planes give up users' memory, which takes a while on a GPU, and only
// then the works may end, after which users may free it. That is once the engine counts as failed,
// as the watchdog ends works then, too.
void EngineLoop::Fail(const Status& error) {
  if (!given_up_.load()) executor_.AbandonAll();
  if (!lifecycle_.failed() && !lifecycle_.is_shut_down()) {
    for (EngineObserver* const one : parts_.observers.all) one->OnFailed(error, now_ns_);
  }
  lifecycle_.Fail(error);
  SubmitAll(submissions_.TakeAll());
  operations_.FailInFlight(lifecycle_.final_error());
}

void EngineLoop::SendUp(int parent, const UpMessage& message) {
  Note(coalescer_.Add(parent, message));
}

void EngineLoop::SendDown(int child, const DownMessage& message) {
  Note(coalescer_.Add(child, message));
}

void EngineLoop::OnWork(const WorkDecision& work) {
  // A rank that has joined takes part without ever having started an operation on its GPU.
  if (work.device() == DeviceKind::kCuda) gpu_.SetInUse();
  parts_.counters->Add(Counter::kDecisions);
  // The last rank may have submitted since this iteration began; for 0 see RunAgreed.
  if (work.number > 0) now_ns_ = parts_.clock->NowNs();
  for (EngineObserver* const one : parts_.observers.decided)
    one->OnDecided(work, operations_, now_ns_);
  Note(executor_.Execute(work, now_ns_));
}

void EngineLoop::OnEnded(KeyId key, const Status& status) {
  Operation* operation = operations_.Find(key);
  if (operation == nullptr) return;
  // The training loops of the ranks have parted: one may wait in a collective that the others never
  // call. Nobody waits for the comparison itself, so all operations end with its error.
  const bool is_step = operation->name.kind == OpKind::kStep;
  if (is_step && status.code() == Code::kMismatch) agreed_error_ = status;
  // A Skip: no rank has contributed anything, so no output is written.
  if (status.ok()) {
    operation->work->SetSkipped(FullMask(static_cast<int>(operation->signature.tensors.size())));
  }
  // What fails in the same iteration, e.g. because a peer has left, ends for that reason, once the
  // engine counts as failed: see Fail.
  if (!status.ok() && !agreed_error_.ok()) return;
  Complete(*operation, status);
  // After Complete, because the next announcement uses the same operation.
  if (is_step && agreed_error_.ok()) announcer_.StartLater(*operation);
}

// Also on ranks outside of the set: SetOf finds it there, and messages name its ranks.
void EngineLoop::OnSetAdded(const ProcessSetInfo& set) {
  operations_.AddSet(set);
  Note(executor_.AddSet(set));
}

void EngineLoop::OnSetEnded(uint32_t set, const Status& why) {
  operations_.EndSet(set, why);
  if (set == kGlobalSet) {
    liveness_.NoteParting(why);
    lifecycle_.EndJoin(why);  // a join cannot complete without it
  }
  executor_.EndSet(set);
}

void EngineLoop::OnJoinDone(int last_rank) {
  operations_.ResetUnnamed();  // before the join's end, after which the user may make such a call
  lifecycle_.OnJoined(last_rank);
}

void EngineLoop::OnLeft(int rank) {
  if (parts_.log->Enabled(LogLevel::kInfo)) {
    parts_.log->Write(LogLevel::kInfo, "rank " + std::to_string(rank) + " has left");
  }
}

void EngineLoop::OnReport(const std::string& text) { parts_.log->Write(LogLevel::kWarning, text); }

// A thread pushes what it submits before it waits: asked in this order, nothing is missed. What an
// iteration has taken from the queue it has submitted before it asks.
bool EngineLoop::IsBlocked() const {
  return !lifecycle_.failed() && executor_.Idle() && callbacks_.NoneMayStart() &&
         callers_.AllWait() && submissions_.Empty();
}

// `failure` is this rank's alone, such as no memory for its result; the other ranks complete.
void EngineLoop::OnOperationDone(Operation& operation) {
  for (EngineObserver* const one : parts_.observers.done) one->OnDone(operation, now_ns_);
  Complete(operation, operation.failure);
  if (operation.name.kind == OpKind::kStep) announcer_.StartLater(operation);
}

// The plane has worked since this iteration began.
void EngineLoop::OnBatchEnds() { now_ns_ = parts_.clock->NowNs(); }

void EngineLoop::OnBatchDone(const Batch& batch, int64_t began_ns) {
  for (EngineObserver* const one : parts_.observers.batch_done)
    one->OnBatchDone(batch, began_ns, now_ns_);
  if (batch.number > 0) negotiation_.BatchDone(batch.number, batch.index);  // 0: see RunAgreed
}

}  // namespace farandole
