// One rank's engine: what users call, over the parts that take submissions, negotiate, batch,
// execute and finish.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coordinator/engine/callback_threads.h"
#include "coordinator/engine/caller_threads.h"
#include "coordinator/engine/engine_loop.h"
#include "coordinator/engine/engine_options.h"
#include "coordinator/engine/lifecycle.h"
#include "coordinator/engine/operation_registry.h"
#include "coordinator/engine/progress_thread.h"
#include "coordinator/engine/step_announcer.h"
#include "coordinator/engine/step_clock.h"
#include "coordinator/engine/submission_queue.h"
#include "coordinator/engine/watchdog.h"

namespace farandole {

/// Owns the parts and connects them. Each calls only those to its right:
///
///   Engine > ProgressThread, Watchdog > EngineLoop > Negotiation, Executor, FrameCoalescer,
///   StepAnnouncer, RankDevice > SubmissionQueue, OperationRegistry > Lifecycle > Work >
///   CallbackThreads
///
/// but for events, by which Negotiation and Executor report to the EngineLoop that called them. Who
/// observes the engine (EngineObserver, NegotiationObserver) it does not know by name.
///
/// Locks, in the order in which one thread takes them: the engine lock (ProgressThread), then the
/// mutexes of StepAnnouncer, OperationRegistry and Lifecycle, then that of CallbackThreads.
/// Starting a prepared operation and finishing it takes no mutex but the engine lock, and the last
/// of these if it has callbacks.
///
/// Thread safety: every public function from any thread, except RunOnce (see there).
/// Invariants: a started Work finishes exactly once; only the holder of the engine lock touches
/// transport and planes. After a final error (a plane failed, the protocol broke) every pending and
/// later Work gets that first error, on all ranks: an abort message reaches them. Lifetime:
/// outlives its Operations; Works may outlive it.
class Engine {
 public:
  Engine(EngineOptions options, EngineParts parts);
  /// Stops, see Stop, and waits until all callbacks have returned.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts an operation; `in` and `out` have one pointer per tensor. Never blocks. Memory is
  /// borrowed until the Work is done. `notify` wakes the engine thread; false: the
  /// caller is about to Wait.
  /// @param producers  Of an operation on a GPU: the streams in which inputs are made and outputs
  /// were last used, at least one; what they hold now comes before the operation.
  /// @return InvalidArgument if it is in flight, a contribution has no memory, or a producer is
  /// being captured, on another device than the rank's, missing or superfluous; Unavailable if
  /// there is no GPU to be used; what Claim returns; the engine's final error.
  Result<std::shared_ptr<Work>> Start(Operation& operation, std::span<const void* const> in,
                                      std::span<void* const> out, const Vote& vote = {},
                                      bool notify = true,
                                      std::span<const ProducerStream> producers = {},
                                      uint32_t version = 0);
  /// Start after OperationRegistry::Claim. On success the claim is the engine's.
  /// @param allocator  Of an allgather or alltoall: gives the memory of its results when their
  /// sizes are known; `out` is then empty. Without it, `out` has room for as many rows from each
  /// rank as this one passes, and the Work fails with Mismatch, on this rank, if others came.
  Result<std::shared_ptr<Work>> StartClaimed(ClaimedOperation& claimed,
                                             std::span<const void* const> in,
                                             std::span<void* const> out, const Vote& vote,
                                             bool notify,
                                             std::span<const ProducerStream> producers = {},
                                             std::shared_ptr<ResultAllocator> allocator = nullptr);
  /// This thread starts operations: until it waits for one, the rank is not blocked. Not called by
  /// threads that only submit what another one waits for, as those of a backward pass.
  void EnterCaller() { callers_.Enter(); }
  /// Reports to the other ranks of the set in which step of the optimizer `prefix` this rank's next
  /// round of gradients is, and waits for nobody. Ranks whose n-th announcements have different
  /// steps end with a final Mismatch. One is in flight at a time; those that follow wait in order,
  /// so that all ranks make equally many. @return the engine's final error.
  Status AnnounceStep(uint32_t set, const std::string& prefix, const StepCount& step);
  /// The calling thread has ended a step of training with all ranks, at the same point of each.
  /// Waits for nobody. `joins`: how many of Join had ended when the step began, if ranks agree on
  /// that: a rank that has joined takes no steps.
  void EndStep(int joins);
  /// Sleeps or works until `work` is done or `timeout_ns` (< 0: no limit) has passed. @return done?
  bool Wait(const Work& work, int64_t timeout_ns);
  /// The threads of the host's ranks need every core: what is to be waited for later is started
  /// without `notify`, and RunBriefly called, so that no engine thread takes a core from them.
  bool fills_cores() const { return options_.fills_cores && !gpu_.in_use(); }
  /// See ProgressThread::RunBriefly.
  void RunBriefly() { progress_.RunBriefly(); }
  /// done(); also makes the engine take collected submissions.
  bool Poll(const Work& work);
  /// Calls `call` once with the outcome of `work`: now, if it is done, else when it is, on one of
  /// CallbackThreads. @throw std::system_error if there is no thread to be had.
  void WhenDone(const std::shared_ptr<Work>& work, std::function<void(const Status&)> call);
  /// Sleeps up to `timeout_ns` (< 0: no limit) until no such call is due or runs; in one of them it
  /// does not. @return whether it need not have gone on.
  bool AwaitCallbacks(int64_t timeout_ns) { return callbacks_.Await(timeout_ns); }
  /// Whether the calling thread is one that makes such calls.
  bool IsInCallback() const { return callbacks_.IsHere(); }
  /// What is put into the stream from now on comes after `end` (of a work, may be nullptr). The
  /// host does not wait. @return InvalidArgument if they are of different devices, or the stream is
  /// being captured.
  Status MakeWait(const std::shared_ptr<DeviceEvent>& end, const ProducerStream& stream);
  /// The GPU of a stream. @return Unavailable if there is none to be used.
  Result<Device*> GpuOf(const ProducerStream& stream) { return gpu_.Use(stream.device); }

  /// A new process set. All ranks call it with the same ranks, and make their calls of AddSet in
  /// the same order: the n-th of one rank means the n-th of the others. Where they differ the Work
  /// ends with Mismatch on all ranks. The set's uid is that of
  /// OperationRegistry::SetOf(ranks) once the Work is done.
  /// @return ResourceExhausted while 256 calls are in flight.
  Result<std::shared_ptr<Work>> AddSet(const std::vector<int32_t>& ranks);
  /// As AddSet: calls of RemoveSet are matched by their order, too. The set's operations end with
  /// it: whoever still holds one may start it and gets Aborted.
  Result<std::shared_ptr<Work>> RemoveSet(uint32_t uid);
  /// How many lines its tables have. Tests without threads only, between iterations of its loop.
  struct TableSizes {
    Negotiation::TableSizes negotiation;
    OperationRegistry::TableSizes operations;
    bool operator==(const TableSizes&) const = default;
  };
  TableSizes Sizes() const;

  /// How long operations wait for ranks from now on, before that ends the job; <= 0: for
  /// ever. The rank that decides for a set goes by its own.
  void SetStallShutdown(int64_t age_ns) { loop_.SetStallShutdown(age_ns); }
  /// Takes part in everything as absent until all ranks have joined. The Work ends then; see
  /// Lifecycle::last_joined().
  Result<std::shared_ptr<Work>> Join();
  /// This rank submits nothing any more. The Work ends when all ranks have left, or with the final
  /// error. Repeated calls give the same Work. A leave that is only announced becomes final by
  /// another call, or after 5 s.
  std::shared_ptr<Work> Leave(Lifecycle::Parting parting = {});
  /// All ranks have left and all messages of this rank are on their way.
  bool ShutDownCleanly() const { return lifecycle_.is_shut_down() && lifecycle_.is_drained(); }
  /// Stops the threads; pending and later works end with Aborted. Afterwards transport and planes
  /// are not touched any more and may go. Idempotent; not from two threads at once.
  /// @return false if after `timeout_ns` (< 0: no limit) a thread is still inside a library call.
  /// It is left behind, and works end with a Timeout. When that call returns, nothing borrowed and
  /// no library is touched, but the engine is: it and all its parts must stay for ever.
  bool Stop(int64_t timeout_ns = -1);

  /// Keys, process sets and claims; joins and the final error.
  OperationRegistry& operations() { return operations_; }
  const OperationRegistry& operations() const { return operations_; }
  const Lifecycle& lifecycle() const { return lifecycle_; }

  int rank() const { return options_.negotiation.rank; }
  int size() const { return options_.negotiation.size; }
  const Counters& counters() const { return *parts_.counters; }
  const Clock& clock() const { return *parts_.clock; }
  Log& log() const { return *parts_.log; }

  /// One iteration of the engine loop. Tests without threads call it, one at a time.
  EngineLoop::Outcome RunOnce() { return loop_.RunOnce(EngineLoop::Runner::kEngine); }

 private:
  SharedParts Shared();
  bool GiveUp(int64_t waited_ns);

  const EngineOptions options_;
  const EngineParts parts_;
  BorrowedMemory own_memory_;
  LivenessTable own_liveness_;
  Lifecycle lifecycle_;
  OperationRegistry operations_;
  SubmissionQueue submissions_;
  StepAnnouncer announcer_;
  StepClock steps_;
  RankDevice no_gpu_{{}, 0};
  RankDevice& gpu_;
  CallerThreads callers_;
  CallbackThreads callbacks_{[this](const Work& work) { (void)progress_.Wait(work, -1, false); }};
  EngineLoop loop_;
  ProgressThread progress_;
  Watchdog watchdog_;
};

}  // namespace farandole
