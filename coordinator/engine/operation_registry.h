// This rank's operations and process sets: from a name to its operation, from an id to the one in
// flight, and what becomes of both when a set ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coordinator/engine/executor.h"
#include "coordinator/engine/lifecycle.h"
#include "coordinator/engine/operation.h"
#include "coordinator/protocol/process_sets.h"

namespace farandole {

/// Thread safety: as each section says. Invariant: at most one operation of a name is in flight
/// (Operation::Take). Lifetime: an operation is freed when nobody holds it and it has been idle;
/// those of a set that has ended, which somebody may hold, are used for other sets.
class OperationRegistry {
 public:
  /// `engine` is only written into its operations.
  /// `planes` as of EngineParts.
  OperationRegistry(Engine& engine, int rank, Lifecycle& lifecycle, const ProcessSetInfo& global,
                    std::span<DataPlane* const> planes);

  // Any thread.
  /// The operation of that key, held once more until ReleaseHandle; its description is replaced
  /// when it is not in flight. `version`, if wanted, receives the number of this description, for
  /// Claim. Of an allgather and an alltoall, ranks may pass different numbers of rows (the first
  /// dimension).
  /// @param splits  Of an alltoall: [tensors x ranks of the set], the rows that this rank sends to
  /// each rank, at most those of the tensor in all; empty: the same number to each. Empty for other
  /// kinds.
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
  /// Whoever prepared the operation needs it no more; what is in flight goes on.
  void ReleaseHandle(Operation& operation);
  /// See Engine::AddSet and Engine::RemoveSet.
  Result<Operation*> PrepareAddSet(const std::vector<int32_t>& ranks);
  Result<Operation*> PrepareRemoveSet(uint32_t uid);
  /// The operation's signature stays as it is until Engine::StartClaimed, or until the caller
  /// releases the operation.
  /// @param version That of the description the caller knows; 0: any, for callers who know that the
  /// process set is live.
  /// @return InvalidArgument if it or its name is in flight, or another thread has redefined it;
  /// Aborted if its process set has ended.
  Status Claim(Operation& operation, uint32_t version);
  /// The live set with exactly these ranks. @return InvalidArgument if there is none.
  Result<ProcessSetInfo> SetOf(const std::vector<int32_t>& ranks) const;
  /// The live set with that uid. @return InvalidArgument if there is none; why it ended, or why
  /// nothing can be started any more.
  Result<ProcessSetInfo> FindSet(uint32_t uid) const;

  /// Ends with `status` what was started, a join and a leave. Not while a plane may
  /// still touch the tensors.
  void FailInFlight(const Status& status);

  // The holder of the engine lock.
  /// This rank's operation with that id, or nullptr.
  Operation* Find(KeyId key) const { return key < by_key_.size() ? by_key_[key] : nullptr; }
  /// Its key is its own from now on; an operation of another kind may have had it before.
  void Bind(Operation& operation);
  /// The id will be another key's.
  void Release(KeyId key);
  void AddSet(const ProcessSetInfo& set);
  /// The set's operations are nobody's; those in flight go on.
  void EndSet(uint32_t set, const Status& why);
  /// Frees operations that nobody holds and nobody has used lately, once there are a quarter more
  /// than the last time left, and those of sets that have ended, when `executor` has no batch of
  /// them any more.
  void Collect(const Executor& executor);
  /// All ranks have joined: each begins to count its unnamed calls again.
  void ResetUnnamed();

  struct TableSizes {
    size_t sets = 0;
    size_t operations = 0;  ///< By name.
    size_t spare = 0;       ///< Of sets that have ended.
    size_t unnamed = 0;
    bool operator==(const TableSizes&) const = default;
  };
  TableSizes Sizes() const;

 private:
  /// Of a description, what ranks need not agree on: see Operation.
  struct Own {
    std::span<const int64_t> rows;
    std::span<const int64_t> splits;
    double prescale = 1.0;
  };

  void CollectEnded(const Executor& executor);
  void CollectIdle(const Executor& executor);
  bool IsCollected(Operation& operation, const Executor& executor);
  Result<Operation*> PrepareSetChange(OpKind kind, const Signature& signature);
  // Under mutex_.
  void Hold(Operation& operation);
  Result<Operation*> PrepareLocked(const KeyName& name, const Signature& signature,
                                   std::span<const int64_t> splits);
  /// `signature` is as all ranks agree on it.
  Result<Operation*> FindOrDefine(const KeyName& name, const Signature& signature, const Own& own);
  Result<Operation*> Define(const KeyName& name, const Signature& signature, const Own& own);
  std::unique_ptr<Operation> NewOperation(const KeyName& name);
  Result<Residuals> ResidualsFor(const KeyName& name, const Signature& signature) const;
  void Redefine(Operation& operation, const Signature& signature, const Own& own,
                Residuals residuals);
  Status CheckSet(const KeyName& name) const;
  Status WhyGone(uint32_t set, const std::string& who, const std::string& tensor = {}) const;
  Status WhyNotClaimed(const Operation& operation, uint32_t version) const;
  Status InFlight(const Operation& operation) const;

  Engine& engine_;
  const int rank_;
  const int size_;
  Lifecycle& lifecycle_;
  const std::span<DataPlane* const> planes_;

  // Under the engine lock.
  std::vector<Operation*> by_key_;  // KeyId -> this rank's operation or nullptr
  bool has_ending_ = false;         // ending_ is not empty
  int64_t collect_above_ = 0;       // idle_

  std::atomic<int64_t> idle_{0};  // of operations that nobody holds, with their tensors

  mutable std::mutex mutex_;  // of those below, and changes of an Operation's signature
  /// Set, kind, what the user called (Signature::function) and name.
  using Key = std::tuple<uint32_t, OpKind, std::string, std::string>;
  using KeyView = std::tuple<uint32_t, OpKind, std::string_view, std::string_view>;
  struct KeyLess {
    using is_transparent = void;
    bool operator()(const KeyView& a, const KeyView& b) const { return a < b; }
  };
  std::map<Key, std::unique_ptr<Operation>, KeyLess> operations_;
  /// By set, space of names (SpaceOf) and name: the operation in flight.
  std::map<std::tuple<uint32_t, OpKind, std::string>,
           std::shared_ptr<std::atomic<const Operation*>>>
      holders_;
  // Of sets that have ended: in flight still; and free.
  std::vector<std::unique_ptr<Operation>> ending_;
  std::vector<std::unique_ptr<Operation>> spare_;
  std::map<std::pair<uint32_t, OpKind>, uint64_t> unnamed_;
  std::map<uint32_t, ProcessSetInfo> sets_;
  uint32_t last_uid_ = kGlobalSet;  // of a set that is or was
  EndedSets ended_sets_;
};

}  // namespace farandole
