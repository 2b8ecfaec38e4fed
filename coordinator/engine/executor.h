// Runs what was decided: divides decisions into batches, starts them on planes in order, steps them
// to their end.
//
// The sizes of results that ranks do not know when they submit are known here: an allgather's come
// with the decision, and an alltoall's are exchanged on the set's CPU plane just before its
// payload. Then the operation's allocator gives the memory. An adasum is composed of several
// collectives here too (ops/cpu/adasum.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "coordinator/engine/operation.h"
#include "coordinator/protocol/batching.h"
#include "coordinator/protocol/listener.h"
#include "core/borrowed_memory.h"
#include "core/clock.h"
#include "core/counters.h"
#include "ops/cpu/adasum.h"
#include "ops/data_plane.h"

namespace farandole {

/// What the executor reports to the engine. Called from inside Execute and Step.
class ExecutorEvents {
 public:
  virtual ~ExecutorEvents() = default;
  /// This rank's operation, or nullptr if it never prepared that key.
  virtual Operation* FindOperation(KeyId key) = 0;
  /// A batch is done or launched. Comes before what it ends.
  virtual void OnBatchEnds() {}
  /// As of the last batch's end, or of what came after it: no reading of the clock of its own.
  virtual int64_t now_ns() const = 0;
  /// All batches of the operation are done, or launched: its work then has their end.
  virtual void OnOperationDone(Operation& operation) = 0;
  /// It is complete, or launched and rank 0 may decide on further ones.
  /// @param began_ns  When its plane was handed it.
  virtual void OnBatchDone(const Batch& batch, int64_t began_ns) = 0;
};

/// Thread safety: the holder of the engine lock only. Invariants: the batches of a set are started
/// in decision order; an operation is done exactly once, when the last batch that holds a tensor of
/// it is. No allocation once grown.
class Executor {
 public:
  struct Options {
    int rank = 0;
    std::array<int64_t, kDeviceKindCount> fusion_threshold_bytes = {};
    /// Started work that does not move for so long is a failure.
    std::array<int64_t, kDeviceKindCount> progress_timeout_ns = {};
    /// Launched batches leave the window at once while a GPU has no more bytes than this to do.
    int64_t launched_bytes = int64_t{256} << 20;
  };
  /// `planes` by number as agreed at start; they outlive the executor.
  /// `memory` is held while a plane runs; it outlives the executor too.
  Executor(Options options, std::vector<DataPlane*> planes, Counters& counters,
           ExecutorEvents& events, BorrowedMemory& memory);

  Status AddSet(const ProcessSetInfo& set);
  /// Batches already queued still run.
  void EndSet(uint32_t set);
  /// Whether this rank is in the set and it has not ended, or batches of it are in flight.
  bool Knows(uint32_t set) const { return sets_.contains(set); }

  /// How the members of the set agree without votes on what to run in host memory; or nullptr.
  Agreement* AgreementOf(uint32_t set);

  /// Whether a batch in flight names the operation, which may be done.
  bool Uses(const Operation& operation) const;

  /// Queues the batches of `work`; operations without one (barriers, empty tensors, all skipped)
  /// finish at once.
  Status Execute(const WorkDecision& work, int64_t now_ns);

  struct StepResult {
    bool moved = false;
    int64_t poll_after_ns =
        kByDoorbell;  ///< When a plane that has no doorbell wants the next Step.
    Status status;    ///< Not OK: final; every batch was abandoned.
  };
  /// Starts queued batches and steps every running one once.
  StepResult Step(int64_t now_ns);
  bool Idle() const { return running_.empty(); }
  /// In how many ns Step is wanted again for the sake of the progress deadlines; -1: Idle.
  int64_t NextStepNs() const;
  /// Gives everything up; operations are not finished by this.
  void AbandonAll();

 private:
  struct Running;
  /// What an alltoall exchanges before its payload: with each rank, the rows for it and the most
  /// rows that this rank sends to any.
  struct SizeExchange {
    bool is_known = false;
    Batch batch;
    Segment segment;
    std::vector<int64_t> sent;      // two numbers for each rank
    std::vector<int64_t> received;  // likewise
    std::vector<int64_t> counts;    // 2 for each rank
  };
  struct Set {
    std::vector<int> ranks;
    std::vector<SlotRange> slots;  // as Batch::slots
    int my_index = -1;
    std::array<DataPlane*, kDeviceKindCount> planes = {};
    /// Last progress, in active_ns_, by the device whose deadline it puts off.
    std::array<int64_t, kDeviceKindCount> moved_ns = {};
    int64_t running = 0;
    bool ended = false;
    /// Its batch that has yet to start another collective on a plane, the payload of an alltoall or
    /// a later phase of an adasum: no later batch of the set starts before.
    const Running* starting = nullptr;
    std::unique_ptr<AdasumAllreduce> adasum;  // once there was one; `starting` runs it
  };
  struct Running {
    Batch batch;
    std::vector<Segment> segments;
    std::vector<int> absent;
    std::vector<int64_t> counts;  // allgather, reducescatter: elements of each rank's split
    std::vector<int64_t> sends;   // alltoall: elements to each rank, and from each
    std::vector<int64_t> receives;
    SizeExchange sizes;  // alltoall
    size_t tensor = 0;   // allgather, alltoall: which tensor of the operation
    int64_t width = 1;   // of the batch's elements in one of the tensor
    std::vector<std::shared_ptr<DeviceEvent>> ready;  // CUDA: of my operations
    std::vector<Operation*> operations;               // mine, each once
    Set* set = nullptr;
    DataPlane* plane = nullptr;
    PlaneOperation* operation = nullptr;  // nullptr until started
    bool launched = false;
    bool credited = false;  // its place in the window is free
    int64_t device_bytes = 0;
    int64_t began_ns = 0;
    int64_t started_ns = 0;  // of `operation`, in active_ns_
  };

  void CountActiveTime(int64_t now_ns);
  Status ProvideResults(Operation& operation, const DecidedKey& key);
  Status Fill(Running& run, const WorkDecision& work, const BatchPlan& plan, Set& set);
  /// Whether a batch may be launched together with its neighbours on a GPU.
  static bool CanBeJoined(const WorkDecision& work, const BatchPlan& plan);
  Status AddSegments(Running& run, const WorkDecision& work, const BatchPlan& plan,
                     bool absent_here);
  Status AddCounts(Running& run, const DecidedKey& key);
  /// Alltoall: the batch in which each pair of ranks exchanges its sizes, on the set's CPU plane.
  void FillSizes(Running& run);
  /// Once they are exchanged. @return whether there is nothing to send on any rank; Internal for
  /// sizes that no rank may send.
  Result<bool> TakeSizes(Running& run);
  void CountBytes(const Batch& batch, int64_t bytes);
  Status ClaimOperations(const WorkDecision& work, std::span<const BatchPlan> plans,
                         int64_t now_ns);
  static DataPlane& PlaneOf(const Running& run);
  bool Advance(Running& run, StepResult* result);
  Status StartIfNew(Running& run);
  static Result<PlaneOperation*> Start(Running& run);
  /// One Step of a started batch. @return whether it is done.
  bool StepOne(Running& run, StepResult* result);
  void Launch(Running& run);
  void CreditLaunched();
  void Credit(Running& run);
  void Finish(size_t position);
  /// Where the batch, or an exchange of sizes before it, runs.
  static DeviceKind DeviceOf(const Running& run);
  void NoteProgress(const Running& run);
  int64_t DeadlineOf(const Running& run) const;
  int64_t TimeoutOf(const Running& run) const;
  Status DescribeTimeout(const Running& run) const;
  Set* FindSet(uint32_t set);
  void DropIfEnded(uint32_t uid);

  const Options options_;
  const std::vector<DataPlane*> planes_;
  Counters& counters_;
  ExecutorEvents& events_;
  BorrowedMemory& memory_;
  const int64_t period_ns_;  // while anything runs, Step is wanted at least this often
  int64_t now_ns_ = 0;       // as set last
  /// What deadlines count: time without what passed while the process was stopped, or the machine
  /// slept.
  int64_t active_ns_ = 0;
  std::unordered_map<uint32_t, std::unique_ptr<Set>> sets_;
  std::vector<std::unique_ptr<Running>> running_;  // in decision order
  std::vector<std::unique_ptr<Running>> pool_;
  std::vector<BatchPlan> plans_;
  std::vector<Operation*> decided_;  // by position in the decision; nullptr: not mine
};

}  // namespace farandole
