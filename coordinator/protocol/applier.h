// Decisions on their way down: checked, applied to this node's tables, forwarded, and executed.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/protocol/batching.h"
#include "coordinator/protocol/in_flight_batches.h"
#include "coordinator/protocol/node_state.h"
#include "coordinator/protocol/vote_tally.h"

namespace farandole {

/// The only one that changes agreed state, and the only one that notifies the listener what became
/// of submissions and sets.
///
/// Invariants: numbers ascend; a decision is applied before it is forwarded, and forwarded before
/// the listener hears of it; a key's number is released after the last event about it.
/// Lifetime: what it is made with outlives it.
class Applier {
 public:
  Applier(NodeState& node, VoteTally& tally) : node_(node), tally_(tally) {}
  Applier(const Applier&) = delete;
  Applier& operator=(const Applier&) = delete;

  /// A decision from the parent or of this rank's Decider.
  /// @return Internal if it contradicts what this node knows; it is not forwarded then.
  Status Dispatch(const DownMessage& message);
  /// Batches of the last decision, as far as this rank counts them: who decides counts all. 0 if it
  /// was no work or was not applied.
  size_t batches() const { return batches_; }
  /// Whether this rank, and nobody else, reports this batch done; once.
  bool TakeReport(int64_t number, int32_t index);
  /// Nothing refers to this key any more: frees its number and ids.
  void ReleaseKey(KeyId id);
  /// Nobody in the child's branch votes any more by the ids that a decision has retired.
  Status ReceiveUnused(int child, const UpMessage& message);

 private:
  Status Apply(const DownMessage& message);
  Result<SetState*> FindDecided(uint32_t uid, const DownMessage& message);
  Status ApplyWork(const DownMessage& message);
  bool ApplyKnown(KnownWork& work, SetState& set);
  void KnowRepeated(const DownMessage& message, const SetState& set);
  Status ApplyId(const CachedSignature& cached, SetState& set);
  Status ApplyItem(const WorkItem& item, SetState& set);
  Status ApplyKey(KeyId id, const Signature& signature, SetState& set,
                  const std::vector<RankMask>& absent, const Mask& skipped,
                  const std::vector<int64_t>& rows);
  Status CheckItem(const WorkItem& item, const SetState& set) const;
  Status CheckDecided(const Key& key, const Signature& signature, const SetState& set,
                      const std::vector<RankMask>& absent, const Mask& skipped,
                      const std::vector<int64_t>& rows) const;
  Status CheckOwnRows(const Key& key, const SetState& set, const std::vector<int64_t>& rows) const;
  Status CheckOwnVote(const Key& key, const Signature& signature, const SetState& set,
                      const std::vector<RankMask>& absent, const Mask& skipped) const;
  Status CheckSetChange(const DownMessage& message) const;
  Status CheckNamedRank(const DownMessage& message) const;
  Status ApplyRetirement(const DownMessage& message);
  void FreeIfUnused(SetState& set);
  Status ApplyJoinDone(const DownMessage& message);
  Status ApplyRefusal(const DownMessage& message);
  Status ApplySetChange(const DownMessage& message);
  Status ApplyLeft(const DownMessage& message);
  Status EndOwn(const DownMessage& message, const Status& status);
  void EndSet(SetState& set, Status why);
  void EndKeys(const SetState& set);
  void ReleaseKeys();
  bool TakePending(Key& key);
  void TrackBatches(const DownMessage& message, const SetState& set);
  void Forward(const DownMessage& message);
  void Notify(const DownMessage& message);
  WorkDecision Work(const DownMessage& message) const;

  NodeState& node_;
  VoteTally& tally_;

  // Of the decision being applied; they keep their capacity.
  std::vector<DecidedKey> decided_;
  std::vector<std::pair<KeyId, Status>> ended_;
  std::vector<std::pair<uint32_t, Status>> ended_sets_;
  std::vector<KeyId> released_;             // of the sets that it ended
  std::shared_ptr<const KnownWork> known_;  // is all of it; `decided_` and `plans_` are empty then
  std::vector<BatchPlan> plans_;
  size_t batches_ = 0;  // of plans_ or known_
  RepeatedWork repeated_;

  InFlightBatches reports_;  // batches this rank reports
};

}  // namespace farandole
