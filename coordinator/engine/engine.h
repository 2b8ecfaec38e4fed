// One rank's engine: takes submissions, negotiates, batches, executes, finishes.
//
// The engine thread and any thread that waits share one step function, RunOnce, under one lock, the
// engine lock: a waiting caller takes the engine lock when the engine sleeps and so saves two
// wake-ups between cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "coordinator/control/frame_coalescer.h"
#include "coordinator/engine/executor.h"
#include "coordinator/engine/operation.h"
#include "coordinator/engine/submission_queue.h"
#include "coordinator/protocol/negotiation.h"
#include "coordinator/protocol/process_sets.h"
#include "core/clock.h"
#include "core/counters.h"
#include "core/doorbell.h"
#include "core/log.h"
#include "core/timeline.h"
#include "core/transport.h"
#include "ops/cuda/rank_gpus.h"
#include "ops/data_plane.h"

namespace farandole {

struct EngineOptions {
  NegotiationOptions negotiation;
  uint32_t epoch = 0;  ///< Distinguishes it from earlier lives of the same job.
  int64_t progress_timeout_ns = 60 * kNsPerSecond;  ///< Of started work.
  /// The same on a GPU, where started work also waits for what peers' GPUs have to do before it.
  int64_t cuda_progress_timeout_ns = 600 * kNsPerSecond;
  /// A join or a leave that a stuck engine does not take for so long fails it.
  int64_t shutdown_timeout_ns = 30 * kNsPerSecond;
  int64_t linger_ns = 100 * kNsPerUs;  ///< Small asynchronous submissions wait this long for more.
  int64_t linger_bytes = int64_t{64} << 10;  ///< More than this pending: no waiting.
  int64_t spin_ns =
      100 * kNsPerUs;   ///< A waiting caller spins so long; 0 with more ranks than cores.
  bool threads = true;  ///< false: tests drive RunOnce themselves.
};

/// Everything an engine uses and does not own; outlives it.
struct EngineParts {
  Transport* transport = nullptr;
  std::vector<DataPlane*> planes;  ///< By number, as agreed at start.
  FutexDoorbell* doorbell = nullptr;
  const Clock* clock = nullptr;
  Counters* counters = nullptr;
  Log* log = nullptr;
  RankGpus* gpus = nullptr;      ///< For tensors on a GPU; nullptr: there are none.
  Timeline* timeline = nullptr;  ///< May be nullptr.
  /// Of users' tensors, shared with the planes; nullptr: the engine's own.
  BorrowedMemory* memory = nullptr;
};

/// Thread safety: every public function from any thread, except RunOnce (see there).
/// Invariants: a started Work finishes exactly once; only the holder of the engine lock touches
/// transport and planes. After a final error (a plane failed, the protocol broke) every pending and
/// later Work gets that first error, on all ranks: an abort message reaches them. Lifetime:
/// outlives its Operations; Works may outlive it.
class Engine final : private NegotiationListener, private ExecutorEvents {
 public:
  Engine(EngineOptions options, EngineParts parts);
  /// Stops; see Stop.
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// The operation of that key; its description is replaced when it is not in flight.
  /// `version`, if wanted, receives the number of this description, for Claim.
  /// @param splits  Part of the description of an alltoall, and empty for other kinds: [tensors x 2
  /// x ranks of the set], the rows (of the first dimension) that this rank sends to each rank, then
  /// those it receives from each. Ranks differ in them by right; what one sends to another, the
  /// other must receive.
  /// @return InvalidArgument (see Validate, CheckSplits), or if the key is in flight with another
  /// description or its set is unknown.
  Result<Operation*> Prepare(const KeyName& name, const Signature& signature,
                             uint32_t* version = nullptr, std::span<const int64_t> splits = {});
  /// The next operation without a name of this kind on this set: the n-th call takes slot n mod
  /// 256.
  /// @return nullptr while that slot is busy: the call has to wait; nothing was counted.
  Result<Operation*> PrepareUnnamed(uint32_t set, OpKind kind, const Signature& signature,
                                    uint32_t* version = nullptr,
                                    std::span<const int64_t> splits = {});
  /// Starts an operation; `in` and `out` have one pointer per member. Never blocks. Memory is
  /// borrowed until the Work is done. With `quiet` the engine thread is not woken: the caller is
  /// about to Wait.
  /// @param producers  Of an operation on a GPU: the streams in which inputs are made and outputs
  /// were last used, at least one; what they hold now comes before the operation.
  /// @return InvalidArgument if it is in flight, a contribution has no memory, or a producer is
  /// being captured, on another device than the first, missing or superfluous; Unavailable if
  /// there is no GPU to be used; what Claim returns; the engine's final error.
  Result<std::shared_ptr<Work>> Start(Operation& operation, std::span<const void* const> in,
                                      std::span<void* const> out, const Vote& vote = {},
                                      bool quiet = false,
                                      std::span<const ProducerStream> producers = {},
                                      uint32_t version = 0);
  /// The first half of Start: its signature stays as it is until StartClaimed, or until the caller
  /// gives it back.
  /// @param version That of the description the caller knows; 0: any, for callers who know that the
  /// process set is live.
  /// @return InvalidArgument if it or its name is in flight, or another thread has described it
  /// anew; Aborted if its process set has ended.
  Status Claim(Operation& operation, uint32_t version);
  /// The second half. On failure the operation is free again.
  Result<std::shared_ptr<Work>> StartClaimed(Operation& operation, std::span<const void* const> in,
                                             std::span<void* const> out, const Vote& vote,
                                             bool quiet,
                                             std::span<const ProducerStream> producers = {});
  /// Reports to the other ranks of the set in which step of the optimizer `prefix` this rank's next
  /// round of gradients is, and waits for nobody. Ranks whose n-th announcements have different
  /// steps end with a final Mismatch. One is in flight at a time; those that follow wait in order,
  /// so that all ranks make equally many. @return the engine's final error.
  Status AnnounceStep(uint32_t set, const std::string& prefix, const StepCount& step);
  /// Sleeps or works until `work` is done or `timeout_ns` (< 0: no limit) has passed. @return done?
  bool Wait(const Work& work, int64_t timeout_ns);
  /// done(); also makes the engine take collected submissions.
  bool Poll(const Work& work);
  /// What is put into the stream from now on comes after `end` (of a work, may be nullptr). The
  /// host does not wait. @return InvalidArgument if they are of different devices.
  Status MakeWait(const std::shared_ptr<DeviceEvent>& end, const ProducerStream& stream);

  /// A new process set. All ranks call it with the same ranks, and make their calls of AddSet in
  /// the same order: the n-th of one rank means the n-th of the others. Where they differ the Work
  /// ends with Mismatch on all ranks. The set's uid is SetOf(ranks) once the Work is done.
  /// @return ResourceExhausted while 256 calls are in flight.
  Result<std::shared_ptr<Work>> AddSet(const std::vector<int32_t>& ranks);
  /// As AddSet: calls of RemoveSet are matched by their order, too. The set's operations end with
  /// it: whoever still holds one may start it and gets Aborted.
  Result<std::shared_ptr<Work>> RemoveSet(uint32_t uid);
  /// The live set with exactly these ranks. @return InvalidArgument if there is none.
  Result<ProcessSetInfo> SetOf(const std::vector<int32_t>& ranks) const;
  /// The live set with that uid. @return InvalidArgument if there is none; why it ended, or why
  /// nothing can be started any more.
  Result<ProcessSetInfo> FindSet(uint32_t uid) const;

  /// How many lines its tables have. Tests without threads only, between steps.
  struct TableSizes {
    Negotiation::TableSizes negotiation;
    size_t sets = 0;
    size_t operations = 0;  ///< By name.
    size_t spare = 0;       ///< Of sets that have ended.
    size_t unnamed = 0;
    bool operator==(const TableSizes&) const = default;
  };
  TableSizes Sizes() const;

  /// Takes part in everything as absent until all ranks have joined. The Work ends then; see
  /// last_joined().
  Result<std::shared_ptr<Work>> Join();
  int last_joined() const { return last_joined_.load(); }
  /// How many joins of all ranks have ended.
  int joins() const { return joins_.load(); }
  /// Announces that this rank submits nothing any more. The Work ends when all ranks have left, or
  /// with the final error. Repeated calls give the same Work.
  std::shared_ptr<Work> Leave();
  /// All ranks have left and all messages of this rank are on their way.
  bool ShutDownCleanly() const { return shut_down_.load() && drained_.load(); }
  /// Stops the threads; pending and later works end with Aborted. Afterwards transport and planes
  /// are not touched any more and may go. Idempotent; not from two threads at once.
  /// @return false if after `timeout_ns` (< 0: no limit) a thread is still inside a library call.
  /// It is left behind, and works end with a Timeout. When that call returns, nothing borrowed and
  /// no library is touched, but the engine is: it and all its parts must stay for ever.
  bool Stop(int64_t timeout_ns = -1);
  /// OK, or the first final error.
  Status final_error() const;

  int rank() const { return options_.negotiation.rank; }
  int size() const { return options_.negotiation.size; }
  const Counters& counters() const { return *parts_.counters; }

  struct StepResult {
    bool moved = false;
    int64_t sleep_ns =
        -1;  ///< Nothing to do for so long unless the doorbell rings; -1: without limit.
  };
  /// One step: drain submissions and messages, decide, execute, send. Tests without threads call
  /// it, one at a time.
  StepResult RunOnce();

 private:
  // NegotiationListener
  void SendUp(int parent, const UpMessage& message) override;
  void SendDown(int child, const DownMessage& message) override;
  void OnWork(const WorkDecision& work) override;
  void OnEnded(KeyId key, const Status& status) override;
  void OnSetAdded(const ProcessSetInfo& set) override;
  void OnSetEnded(uint32_t set, const Status& why) override;
  void OnKeyReleased(KeyId key) override;
  void OnJoinDone(int last_rank) override;
  void OnLeft(int rank) override;
  void OnShutdown() override;
  void OnReport(const std::string& text) override;
  void OnStalls(const std::vector<StallFacts>& stalls) override;
  void OnStallShutdown(const std::string& text) override;
  // ExecutorEvents
  Operation* FindOperation(KeyId key) override;
  void OnOperationDone(Operation& operation) override;
  void OnBatchDone(const Batch& batch, int64_t began_ns) override;

  // Steps of RunOnce; under the engine lock.
  bool TakeSubmissions(int64_t now_ns, int64_t* wake_in_ns);
  bool HoldSubmissions(int64_t now_ns, int64_t* wake_in_ns);
  void Submit(Operation& operation);
  void TakeAllSubmissions();
  bool RunBatches();
  void FlushOutgoing();
  int64_t SleepFor(int64_t wake_in_ns);
  void Note(const Status& error);
  void FailEverywhere();
  int64_t StepFailed();
  void Fail(const Status& status);
  void FailInFlight(const Status& status);
  void Complete(Operation& operation, const Status& status);
  bool Traces() const { return parts_.timeline != nullptr && parts_.timeline->on(); }
  void TraceDecision(const WorkDecision& work);
  void TraceRun(Operation& operation);
  void TraceStall(const StallFacts& stall);
  void TraceSpan(Operation& operation, const char* what, int64_t begin_ns);

  Status RecordReady(Operation& operation, const Vote& vote,
                     std::span<const ProducerStream> producers);
  Result<RankGpu> GpuOf(const ProducerStream& stream);
  static void UseGpu(Operation& operation, int distance);
  static Status RecordProducer(Operation& operation, Device& device, StreamHandle stream);
  Result<Operation*> PrepareLocked(KeyName name, const Signature& signature,
                                   std::span<const int64_t> splits);
  Status InFlight(const Operation& operation) const;
  Status CheckSet(const KeyName& name) const;
  Status WhyGone(uint32_t set, const std::string& who) const;
  void Redefine(Operation& operation, const Signature& signature, std::span<const int64_t> splits);
  Status Refusal() const;
  Status StartStep(Operation& operation, const StepCount& step, uint32_t version);
  void StartLaterStep(Operation& operation);
  Result<std::shared_ptr<Work>> StartControl(OpKind kind, const Signature& signature);
  Status WhyNotClaimed(const Operation& operation, uint32_t version) const;
  std::unique_ptr<Operation> NewOperation(const KeyName& name);
  void EndOperations(uint32_t set);
  void CollectEnded();
  void FinishLeaving();

  void EngineLoop();
  void WatchLoop();
  bool MembershipChanges() const;
  void RunAsCaller(const Work& work, int64_t deadline_ns);
  void HandBack(uint32_t ticket);
  void PushMembership(Operation& change);
  void SubmitMembership(Operation& change);
  bool LockWithin(int64_t timeout_ns);
  bool GiveUp(int64_t waited_ns);
  void FailFromOutside(const Status& status);

  const EngineOptions options_;
  const EngineParts parts_;
  BorrowedMemory own_memory_;
  BorrowedMemory& memory_;

  // Under the engine lock.
  std::mutex engine_lock_;
  std::atomic<int> engine_lock_wanted_{0};
  Negotiation negotiation_;
  Executor executor_;
  FrameCoalescer coalescer_;
  std::vector<Operation*> by_key_;  // KeyId -> this rank's operation or nullptr
  int64_t now_ns_ = 0;              // time of the current step
  int64_t last_event_ns_ = 0;       // last step that moved something
  bool caller_runs_ = false;        // the step is a waiting caller's, who must not touch a GPU
  int64_t held_since_ns_ = 0;       // first sight of submissions still held; 0: none
  int64_t tick_ns_ = 0;             // when the negotiation wants its next Tick
  Status failed_here_;              // the final error as the holder of the engine lock knows it
  int64_t failed_here_ns_ = 0;
  Status deferred_error_;         // found inside a negotiation callback
  bool ends_operations_ = false;  // ending_operations_ is not empty
  int64_t executor_poll_ns_ = -1;
  StallReport stall_report_;
  Status agreed_error_;  // final on all ranks, by a decision of rank 0

  // Any thread.
  SubmissionQueue submissions_;
  Operation join_, leave_;  // their positions_ in the queue, behind what was started before
  std::atomic<bool> urgent_{
      false};                      // somebody waits, or enough is pending: do not hold submissions
  std::atomic<bool> rung_{false};  // the doorbell was rung for what is in the queue
  std::atomic<int64_t> held_bytes_{0};
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int> last_joined_{-1};
  std::atomic<int> joins_{0};
  std::atomic<bool> shut_down_{false};
  std::atomic<bool> drained_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> spreading_abort_{false};  // of the final error; the transport needs more polls
  std::atomic<uint32_t> thread_done_{0};      // the engine thread touches nothing here any more
  std::atomic<bool> given_up_{false};         // by Stop: use no library, even if a call returns
  std::atomic<int64_t> step_began_ns_{0};     // 0: nobody is in RunOnce
  std::atomic<bool> failed_{false};
  std::atomic<bool> uses_device_{false};  // callers leave the engine lock to the engine thread

  std::mutex announcements_;     // Operation::later_steps; before registry_
  mutable std::mutex registry_;  // the tables below, and changes of an Operation's signature
  /// By set, kind, what the user called (Signature::function) and name.
  std::map<std::tuple<uint32_t, OpKind, std::string, std::string>, std::unique_ptr<Operation>>
      operations_;
  /// By set, space of names (SpaceOf) and name: the operation in flight.
  std::map<std::tuple<uint32_t, OpKind, std::string>,
           std::shared_ptr<std::atomic<const Operation*>>>
      holders_;
  // Of sets that have ended: in flight still; and free, to be used for other sets. They are never
  // freed, because whoever prepared one may hold it.
  std::vector<std::unique_ptr<Operation>> ending_operations_;
  std::vector<std::unique_ptr<Operation>> spare_operations_;
  std::map<std::pair<uint32_t, OpKind>, uint64_t> unnamed_;
  std::map<uint32_t, ProcessSetInfo> sets_;
  uint32_t last_uid_ = kGlobalSet;  // of a set that is or was
  EndedSets ended_sets_;
  Status final_error_;
  std::shared_ptr<Work> joining_;
  std::shared_ptr<Work> leaving_;

  std::atomic<uint32_t> watch_stop_{0};
  std::thread thread_;
  std::thread watch_;
};

}  // namespace farandole
