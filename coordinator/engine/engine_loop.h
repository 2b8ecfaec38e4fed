// The engine loop: an iteration takes submissions and messages, negotiates, executes and sends.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/control/frame_coalescer.h"
#include "coordinator/engine/caller_threads.h"
#include "coordinator/engine/engine_options.h"
#include "coordinator/engine/executor.h"
#include "coordinator/engine/lifecycle.h"
#include "coordinator/engine/operation_registry.h"
#include "coordinator/engine/step_announcer.h"
#include "coordinator/engine/step_clock.h"
#include "coordinator/engine/submission_queue.h"
#include "coordinator/liveness/table.h"
#include "coordinator/protocol/negotiation.h"

namespace farandole {

/// What users' calls and the engine loop share; the engine owns it.
struct SharedParts {
  Lifecycle& lifecycle;
  OperationRegistry& operations;
  SubmissionQueue& submissions;
  StepAnnouncer& announcer;
  StepClock& steps;
  RankDevice& gpu;
  BorrowedMemory& memory;
  LivenessTable& liveness;
  CallerThreads& callers;
  const CallbackThreads& callbacks;
};

/// Thread safety: the holder of the engine lock, except where a section says otherwise. Invariant:
/// only it touches transport and planes, and after GiveUp nobody does.
class EngineLoop final : private NegotiationListener, private ExecutorEvents {
 public:
  EngineLoop(const EngineOptions& options, const EngineParts& parts, const ProcessSetInfo& global,
             const SharedParts& shared);

  struct Outcome {
    bool moved = false;
    int64_t sleep_ns =
        -1;  ///< Nothing to do for so long unless the doorbell rings; -1: without limit.
  };
  /// Whose thread runs it: only the engine's may touch a GPU, and only a caller that waits, for
  /// what it has submitted or others have, may wait in here, for some us.
  enum class Runner : uint8_t { kEngine, kCaller, kWaiter };
  Outcome RunOnce(Runner runner);
  /// Time of the last RunOnce.
  int64_t now_ns() const override { return now_ns_; }
  /// There is something to do, or to be looked after.
  bool IsBusy() const;
  /// What this rank has submitted is in flight: news of it may come at any time.
  bool AwaitsPeers() const { return negotiation_.Pending() > 0 || !executor_.Idle(); }
  /// Ends everything: `error` is final unless there was another one.
  void Fail(const Status& error);
  Negotiation::TableSizes NegotiationSizes() const { return negotiation_.Sizes(); }

  // Any thread.
  /// When the RunOnce in progress began; 0: nobody runs.
  int64_t began_ns() const { return began_ns_.load(std::memory_order_relaxed); }
  /// RunOnce only moves a final error along now, and not for long.
  void RequestStop() { stop_.store(true); }
  /// RequestStop was called and RunOnce need not be called any more.
  bool HasStopped() const { return stop_.load() && (!spreading_abort_.load() || given_up_.load()); }
  /// The thread in RunOnce does not come back from a library: if it ever does, it uses no library.
  void GiveUp() { given_up_.store(true); }
  bool given_up() const { return given_up_.load(); }
  /// See Engine; from the next RunOnce on.
  void SetStallShutdown(int64_t age_ns) { stall_shutdown_ns_.store(age_ns); }
  /// Something has ended the job, and RunOnce deals with it.
  bool is_failing() const { return is_failing_.load(); }

 private:
  // NegotiationListener
  void SendUp(int parent, const UpMessage& message) override;
  void SendDown(int child, const DownMessage& message) override;
  void OnWork(const WorkDecision& work) override;
  void OnEnded(KeyId key, const Status& status) override;
  void OnSetAdded(const ProcessSetInfo& set) override;
  void OnSetEnded(uint32_t set, const Status& why) override;
  bool Holds(KeyId key) const override { return operations_.Find(key) != nullptr; }
  void OnKeyReleased(KeyId key) override { operations_.Release(key); }
  void OnVoteByName() override { parts_.counters->Add(Counter::kVotesByName); }
  void OnJoinDone(int last_rank) override;
  void OnLeft(int rank) override;
  void OnShutdown() override { lifecycle_.ShutDown(); }
  void OnReport(const std::string& text) override;
  void OnStallShutdown(const Status& error) override { agreed_error_ = error; }
  bool IsBlocked() const override;
  bool KnowsAllThreads() const override { return callers_.KnowsAll(); }
  std::vector<uint64_t> CallerIds() const override { return callers_.Ids(); }
  // ExecutorEvents
  Operation* FindOperation(KeyId key) override { return operations_.Find(key); }
  void OnOperationDone(Operation& operation) override;
  void OnBatchEnds() override;
  void OnBatchDone(const Batch& batch, int64_t began_ns) override;

  Outcome Advance();
  Outcome FailForMemory();
  bool TakeSubmissions(int64_t* wake_in_ns);
  void SubmitAll(Operation* oldest);
  void Submit(Operation& operation);
  void CastVote(Operation& operation);
  bool MayAgree(const Operation& operation) const;
  bool RunAgreed(Operation& operation);
  bool AllAgree(Agreement& agreement, const Negotiation::Known& known) const;
  void Started(Operation& operation);
  void SubmitChange(Operation& change);
  bool ReceiveMessages();
  void FlushOutgoing();
  bool RunBatches();
  void Leave();
  int64_t SleepFor(int64_t wake_in_ns);
  void FinishLeaving();
  void Complete(Operation& operation, const Status& status);
  /// What is found in an iteration is acted on at its end.
  void Note(const Status& error) {
    if (error.ok()) return;
    liveness_.Note(error);
    is_failing_ = true;
  }
  void FailEverywhere();
  int64_t SpreadFailure();

  const EngineParts& parts_;
  Lifecycle& lifecycle_;
  OperationRegistry& operations_;
  SubmissionQueue& submissions_;
  StepAnnouncer& announcer_;
  StepClock& steps_;
  RankDevice& gpu_;
  LivenessTable& liveness_;
  const CallerThreads& callers_;
  const CallbackThreads& callbacks_;
  const int64_t longest_spread_ns_;
  const bool has_own_core_;
  const int64_t agree_ns_;
  Negotiation negotiation_;
  Executor executor_;
  FrameCoalescer coalescer_;

  int64_t now_ns_ = 0;         // time of the current iteration, or of what it did last
  int64_t last_event_ns_ = 0;  // last iteration that moved something
  int64_t tick_ns_ = 0;        // when the negotiation wants its next Tick
  int64_t executor_poll_ns_ = -1;
  int64_t agreed_ns_ = -kNsPerSecond;  // when the members have agreed last
  Runner runner_ = Runner::kEngine;
  Status agreed_error_;  // final on all ranks, by a decision
  Status failed_here_;   // the final error as the holder of the engine lock knows it
  int64_t failed_here_ns_ = 0;
  bool has_left_ = false;
  int64_t leave_due_ns_ = kNever;  // of one that is announced

  std::atomic<int64_t> began_ns_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> is_failing_{false};       // the table has why
  std::atomic<bool> spreading_abort_{false};  // of the final error; the transport needs more polls
  std::atomic<bool> given_up_{false};
  std::atomic<int64_t> stall_shutdown_ns_;
};

}  // namespace farandole
