#include "coordinator/engine/engine.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr int kMessagesPerStep = 64;
constexpr int64_t kTickPeriodNs = 100 * kNsPerMs;  // how late a stall may be noticed
// After its final error an engine over a polled transport moves its last messages along for so
// long, or, when it is stopped, at least and at most for so long. A message that such a transport
// calls drained may still wait for a connection.
constexpr int64_t kSpreadNs = kNsPerSecond;
constexpr int64_t kSpreadAtLeastNs = 100 * kNsPerMs;
constexpr int64_t kSpreadPollNs = kNsPerMs;

ProcessSetInfo GlobalSet(const NegotiationOptions& options) {
  ProcessSetInfo set;
  for (int rank = 0; rank < options.size; ++rank) set.ranks.push_back(rank);
  set.planes = options.planes;
  return set;
}

// The earlier of two waits, where a negative one means "no limit".
int64_t Sooner(int64_t a, int64_t b) {
  if (a < 0) return b;
  return b < 0 ? a : std::min(a, b);
}

}  // namespace

Engine::Engine(EngineOptions options, EngineParts parts)
    : options_(std::move(options)),
      parts_(std::move(parts)),
      memory_(parts_.memory != nullptr ? *parts_.memory : own_memory_),
      negotiation_(options_.negotiation, *this),
      executor_({options_.negotiation.rank,
                 {options_.negotiation.FusionThreshold(DeviceKind::kCpu),
                  options_.negotiation.FusionThreshold(DeviceKind::kCuda)},
                 {options_.progress_timeout_ns, options_.cuda_progress_timeout_ns}},
                parts_.planes, *parts_.counters, *this, memory_),
      coalescer_(*parts_.transport, options_.epoch, *parts_.counters) {
  const ProcessSetInfo global = GlobalSet(options_.negotiation);
  sets_[kGlobalSet] = global;
  deferred_error_ = executor_.AddSet(global);
  last_event_ns_ = parts_.clock->NowNs();
  if (!options_.threads) return;
  thread_ = std::thread([this] { EngineLoop(); });
  watch_ = std::thread([this] { WatchLoop(); });
}

Engine::StepResult Engine::RunOnce() {
  now_ns_ = parts_.clock->NowNs();
  step_began_ns_.store(now_ns_, std::memory_order_relaxed);
  parts_.counters->Add(Counter::kEngineSteps);
  StepResult result;
  int64_t wake_in_ns = -1;
  if (failed_.load()) {
    result.sleep_ns = StepFailed();
  } else {
    result.moved = TakeSubmissions(now_ns_, &wake_in_ns);
    negotiation_.SetTime(now_ns_);  // an idle rank has had no Tick for long, and may be asked
    Result<int> received = coalescer_.Receive(negotiation_, kMessagesPerStep);
    // Once all have left, a peer may go as it likes.
    if (!shut_down_.load()) Note(received.status());
    if (received.ok() && received.value() > 0) result.moved = true;
    FlushOutgoing();
    if (RunBatches()) {
      result.moved = true;
      FlushOutgoing();
    }
    if (result.moved) last_event_ns_ = now_ns_;
    if (ends_operations_) CollectEnded();
    if (!deferred_error_.ok()) FailEverywhere();
    result.sleep_ns = SleepFor(wake_in_ns);
    FinishLeaving();
  }
  step_began_ns_.store(0, std::memory_order_relaxed);
  return result;
}

// The first error found in a step is the one that is acted on, at its end.
void Engine::Note(const Status& error) {
  if (deferred_error_.ok()) deferred_error_ = error;
}

// Lets the negotiation decide and send what has added up, in one transport message per peer.
void Engine::FlushOutgoing() {
  if (given_up_.load()) return;
  negotiation_.Flush();
  Note(negotiation_.fault());
  if (!deferred_error_.ok()) return;  // nobody should hear what a broken negotiation says
  if (now_ns_ >= tick_ns_) tick_ns_ = negotiation_.Tick(now_ns_);
  if (negotiation_.Busy()) tick_ns_ = std::min(tick_ns_, now_ns_ + kTickPeriodNs);
  Note(coalescer_.Flush());
  Note(agreed_error_);  // not before it is on its way down
}

bool Engine::RunBatches() {
  if (!deferred_error_.ok() || executor_.Idle()) {
    executor_poll_ns_ = kByDoorbell;
    return false;
  }
  if (caller_runs_ && uses_device_.load(std::memory_order_relaxed)) return false;
  const Executor::StepResult step = executor_.Step(now_ns_);
  executor_poll_ns_ = step.poll_after_ns;
  Note(step.status);
  return step.moved;
}

int64_t Engine::SleepFor(int64_t wake_in_ns) {
  const bool busy = negotiation_.Busy() || !executor_.Idle();
  wake_in_ns = Sooner(wake_in_ns, executor_poll_ns_);
  wake_in_ns = Sooner(wake_in_ns, parts_.transport->PollAfterNs(busy, now_ns_ - last_event_ns_));
  wake_in_ns = Sooner(wake_in_ns, executor_.NextStepNs());
  if (tick_ns_ != kNever) wake_in_ns = Sooner(wake_in_ns, std::max<int64_t>(tick_ns_ - now_ns_, 0));
  return wake_in_ns;
}

bool Engine::TakeSubmissions(int64_t now_ns, int64_t* wake_in_ns) {
  if (submissions_.Empty()) {
    // The ring that woke us may have been for something taken before it; the next one must ring
    // again. The exchange orders this against Start: either it rings, or its push is seen here.
    (void)rung_.exchange(false);
    if (submissions_.Empty()) return false;
  }
  if (HoldSubmissions(now_ns, wake_in_ns)) return false;
  tick_ns_ =
      negotiation_.Tick(now_ns);  // after an idle time its clock is as old as the last step's
  TakeAllSubmissions();
  return true;
}

// Small asynchronous submissions wait a moment for more of them, unless somebody waits for one.
bool Engine::HoldSubmissions(int64_t now_ns, int64_t* wake_in_ns) {
  if (urgent_.load() || held_bytes_.load(std::memory_order_relaxed) >= options_.linger_bytes)
    return false;
  if (held_since_ns_ == 0) held_since_ns_ = now_ns;
  const int64_t left = held_since_ns_ + options_.linger_ns - now_ns;
  if (left <= 0) return false;
  *wake_in_ns = Sooner(*wake_in_ns, left);
  return true;
}

void Engine::TakeAllSubmissions() {
  urgent_.store(false);
  (void)rung_.exchange(false);  // before taking; see TakeSubmissions
  held_bytes_.store(0, std::memory_order_relaxed);
  held_since_ns_ = 0;
  for (Operation* operation = submissions_.TakeAll(); operation != nullptr;) {
    Operation* next = operation->next;
    Submit(*operation);
    operation = next;
  }
}

void Engine::Submit(Operation& operation) {
  if (&operation == &join_ || &operation == &leave_) return SubmitMembership(operation);
  parts_.counters->Add(Counter::kSubmissions);
  operation.submitted_ns = now_ns_;
  operation.decided_ns = 0;
  if (failed_.load()) return Complete(operation, final_error());
  if (operation.key == Operation::kUnknownKey) {
    operation.key = negotiation_.Intern(operation.name);
    if (by_key_.size() <= operation.key) by_key_.resize(operation.key + 1, nullptr);
  }
  by_key_[operation.key] = &operation;  // another kind may have had the name before
  Status accepted = negotiation_.Submit(operation.key, operation.signature, operation.vote);
  if (accepted.code() == Code::kInternal) Note(accepted);
  if (!accepted.ok()) Complete(operation, accepted);
}

// Joins or leaves: what was started before is submitted by now.
void Engine::SubmitMembership(Operation& change) {
  change.in_flight.store(false);
  if (failed_.load()) return;  // FailInFlight ends both
  const bool joins = &change == &join_;
  const Status status = joins ? negotiation_.Join() : negotiation_.Leave();
  if (status.ok()) return;
  std::lock_guard lock(registry_);
  (void)(joins ? joining_ : leaving_)->Finish(status);  // false if a final error came first
}

void Engine::Complete(Operation& operation, const Status& status) {
  std::shared_ptr<Work> work = operation.work;
  operation.started.store(false);
  operation.GiveBack();
  if (work->Finish(status)) {
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
  } else if (!failed_.load()) {
    Note(Internal(Describe(operation.name) + ": finished twice"));
  }
}

// This rank's final error, or a peer's that has arrived, ends the work of all ranks.
void Engine::FailEverywhere() {
  if (failed_.load()) deferred_error_ = final_error();  // from outside, during a library call
  if (given_up_.load()) return Fail(deferred_error_);
  // One cause often fails several ranks at once, e.g. by their deadlines: the first word counts.
  if (const Status reported = coalescer_.Drain(kMessagesPerStep); !reported.ok())
    deferred_error_ = reported;
  failed_here_ = deferred_error_;
  failed_here_ns_ = now_ns_;
  if (!shut_down_.load()) {
    const bool is_agreed = failed_here_.message() == agreed_error_.message();
    coalescer_.SpreadAbort(failed_here_, is_agreed);
    spreading_abort_.store(parts_.transport->PollAfterNs(true, 0) != kByDoorbell);
  }
  Fail(failed_here_);
}

// @return how long to sleep.
int64_t Engine::StepFailed() {
  if (given_up_.load()) return -1;
  if (failed_here_.ok()) {  // it is the watch that has failed this engine
    deferred_error_ = final_error();
    FailEverywhere();
  }
  TakeAllSubmissions();
  FailInFlight(final_error());
  if (!spreading_abort_.load()) return -1;
  (void)coalescer_.Drain(kMessagesPerStep);
  const int64_t spread_ns = now_ns_ - failed_here_ns_;
  const bool enough = stop_.load() && parts_.transport->Drained() && spread_ns >= kSpreadAtLeastNs;
  if (enough || spread_ns >= kSpreadNs) spreading_abort_.store(false);
  return kSpreadPollNs;
}

// The first final error stands; the engine moves nothing but its word of it from here on.
void Engine::Fail(const Status& status) {
  {
    std::lock_guard lock(registry_);
    if (final_error_.ok()) final_error_ = status;
  }
  failed_.store(true);
  if (!given_up_.load()) executor_.AbandonAll();
  TakeAllSubmissions();
  FailInFlight(final_error());
}

void Engine::FailInFlight(const Status& status) {
  std::lock_guard lock(registry_);
  for (auto& entry : operations_) {
    if (entry.second->started.load()) Complete(*entry.second, status);
  }
  for (auto& operation : ending_operations_) {
    if (operation->started.load()) Complete(*operation, status);
  }
  if (joining_) (void)joining_->Finish(status);  // may have ended well before
  if (leaving_) (void)leaving_->Finish(status);
}

void Engine::FinishLeaving() {
  if (!shut_down_.load() || drained_.load() || !parts_.transport->Drained()) return;
  if (!executor_.Idle()) return;  // what is launched on a GPU was promised to its users
  drained_.store(true);
  {
    std::lock_guard lock(registry_);
    if (leaving_)
      (void)leaving_->Finish({});  // false if a final error came first, which then stands
  }
  FailInFlight(Aborted("farandole has been shut down"));
}

void Engine::SendUp(int parent, const UpMessage& message) { Note(coalescer_.Add(parent, message)); }

void Engine::SendDown(int child, const DownMessage& message) {
  Note(coalescer_.Add(child, message));
}

void Engine::OnWork(const WorkDecision& work) {
  if (work.device() == DeviceKind::kCuda) uses_device_.store(true, std::memory_order_relaxed);
  parts_.counters->Add(Counter::kDecisions);
  if (Traces()) TraceDecision(work);
  Status queued = executor_.Execute(work, now_ns_);
  Note(queued);
}

void Engine::OnEnded(KeyId key, const Status& status) {
  Operation* operation = FindOperation(key);
  if (operation == nullptr) return;
  // The training loops of the ranks have parted: one may wait in a collective that the others never
  // call. Nobody waits for the comparison itself, so all operations end with its error.
  const bool is_step = operation->name.kind == OpKind::kStep;
  if (is_step && status.code() == Code::kMismatch) agreed_error_ = status;
  if (status.ok()) {
    const int members = static_cast<int>(operation->signature.members.size());
    Mask all;
    for (int i = 0; i < members; ++i) SetBit(all, i, members);
    operation->work->SetSkipped(all);
  }
  // What ends in the same step, e.g. because a peer has left, ends for that reason.
  Complete(*operation, status.ok() || agreed_error_.ok() ? status : agreed_error_);
  if (is_step && agreed_error_.ok()) StartLaterStep(*operation);
}

void Engine::OnSetAdded(const ProcessSetInfo& set) {
  {
    std::lock_guard lock(registry_);
    sets_[set.uid] = set;
    last_uid_ = std::max(last_uid_, set.uid);
  }
  Status added = executor_.AddSet(set);
  Note(added);
}

void Engine::OnSetEnded(uint32_t set, const Status& why) {
  {
    std::lock_guard lock(registry_);
    sets_.erase(set);
    ended_sets_.Add({set, 0, why});
    if (set != kGlobalSet) EndOperations(set);
    // A join cannot complete without the global set; false if it has ended already.
    if (set == kGlobalSet && joining_) (void)joining_->Finish(why);
  }
  executor_.EndSet(set);
}

// Under registry_.
void Engine::EndOperations(uint32_t set) {
  const auto begin = operations_.lower_bound({set, OpKind{}, "", ""});
  auto end = begin;
  for (; end != operations_.end() && std::get<0>(end->first) == set; ++end) {
    // Its key is about to be another's, and several kinds may share it.
    end->second->key = Operation::kUnknownKey;
    ending_operations_.push_back(std::move(end->second));
  }
  operations_.erase(begin, end);
  holders_.erase(holders_.lower_bound({set, OpKind{}, ""}),
                 holders_.lower_bound({set + 1, OpKind{}, ""}));
  std::erase_if(unnamed_, [set](const auto& count) { return count.first.first == set; });
  ends_operations_ = !ending_operations_.empty();
}

// Keeps those that are not in flight any more for other sets, without what they held.
void Engine::CollectEnded() {
  std::lock_guard lock(registry_);
  std::erase_if(ending_operations_, [this](std::unique_ptr<Operation>& operation) {
    if (executor_.Knows(operation->name.set) || operation->in_flight.exchange(true)) return false;
    operation->Empty();
    operation->in_flight.store(false);
    spare_operations_.push_back(std::move(operation));
    return true;
  });
  ends_operations_ = !ending_operations_.empty();
}

void Engine::OnKeyReleased(KeyId key) {
  Operation* operation = FindOperation(key);
  if (operation == nullptr) return;
  operation->key = Operation::kUnknownKey;  // of one that was submitted after its set had ended
  by_key_[key] = nullptr;
}

void Engine::OnJoinDone(int last_rank) {
  std::lock_guard lock(registry_);
  last_joined_.store(last_rank);
  joins_.fetch_add(1);
  unnamed_.clear();
  if (joining_) (void)joining_->Finish({});  // cannot have ended otherwise than by a final error
}

void Engine::OnLeft(int rank) {
  if (parts_.log->Enabled(LogLevel::kInfo)) {
    parts_.log->Write(LogLevel::kInfo, "rank " + std::to_string(rank) + " has left");
  }
}

void Engine::OnShutdown() { shut_down_.store(true); }

void Engine::OnReport(const std::string& text) { parts_.log->Write(LogLevel::kWarning, text); }

void Engine::OnStalls(const std::vector<StallFacts>& stalls) {
  for (const std::string& line : stall_report_.Lines(stalls, now_ns_)) {
    parts_.log->Write(LogLevel::kWarning, line);
  }
  for (const StallFacts& stall : stalls) {
    if (parts_.log->Enabled(LogLevel::kDebug)) {
      parts_.log->Write(LogLevel::kDebug, DescribeStall(stall));
    }
    if (Traces()) TraceStall(stall);
  }
}

void Engine::OnStallShutdown(const std::string& text) { agreed_error_ = Timeout(text); }

Operation* Engine::FindOperation(KeyId key) {
  return key < by_key_.size() ? by_key_[key] : nullptr;
}

void Engine::OnOperationDone(Operation& operation) {
  if (operation.decided_ns != 0 && Traces()) TraceRun(operation);
  Complete(operation, {});
  if (operation.name.kind == OpKind::kStep) StartLaterStep(operation);
}

void Engine::OnBatchDone(const Batch& batch, int64_t began_ns) {
  if (Traces()) {
    parts_.timeline->Add(
        {0, "BATCH", began_ns, now_ns_, batch.number, batch.count * SizeOf(batch.dtype), false});
  }
  negotiation_.BatchDone(batch.number, batch.index);
}

}  // namespace farandole
