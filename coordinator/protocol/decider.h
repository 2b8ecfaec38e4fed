// A node's decisions: validates complete keys, fuses ready ones, numbers and sends what is decided.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordinator/protocol/applier.h"
#include "coordinator/protocol/in_flight_batches.h"
#include "coordinator/protocol/node_state.h"
#include "coordinator/protocol/validate.h"
#include "coordinator/protocol/vote_tally.h"

namespace farandole {

/// Takes the keys that `tally` has completed and hands decisions to `applier`, this rank's own,
/// which forwards them. Every node decides for the process sets of which it is the lowest node with
/// all members below; rank 0 also about sets, joins and leaves.
///
/// One order: a rank gets all decisions through its parent, so a node puts its own ones into the
/// sequence that those below it get. Two ranks that get the same two decisions get them in the same
/// order: that of the upper one of the two nodes that made them, or below.
///
/// Invariants: numbers ascend; what is ready in a set is decided before the set ends; at most
/// `window` unfinished batches per (set, device kind), but for that. An id given to a signature is
/// free again once the decision that ends its key's set has been handed over, or all nodes have
/// freed it after one that retired it.
/// Lifetime: `node`, `tally` and `applier` outlive it.
class Decider {
 public:
  Decider(NodeState& node, VoteTally& tally, Applier& applier)
      : node_(node), tally_(tally), applier_(applier), retire_above_(node.options.idle_id_bytes) {}
  Decider(const Decider&) = delete;
  Decider& operator=(const Decider&) = delete;

  /// Decides what is complete and what the window allows.
  void Decide();
  /// Before a decision from above is applied: what is ready in sets that it ends, or before the end
  /// of a join in all sets.
  void DecideBefore(const DownMessage& message);
  /// Rank 0: `rank` is going to leave, or has left; see Negotiation.
  void AnnounceLeave(int rank);
  /// @return Internal if it had left already.
  Status Leave(int rank, const FailureFacts& failure);
  /// A batch's reporter says that it is done. @return Internal if it is not unfinished.
  Status FreeBatch(int64_t number, int32_t index);
  /// The same, of this rank's own; an error is a fault().
  void FreeOwnBatch(int64_t number, int32_t index) { Note(FreeBatch(number, index)); }
  /// Numbers and sends what an observer asks or tells the ranks below: in the sequence of
  /// decisions, so that they answer after they have applied what was decided before.
  void Send(DownMessage message);
  /// Ends the job on every rank.
  void ShutDown(const Status& error);

  /// Not OK once a decision could not be applied here.
  const Status& fault() const { return fault_; }
  /// Handed out.
  size_t ids() const { return next_id_ - free_ids_.size(); }
  size_t queues() const { return queues_.size(); }

 private:
  /// What an id alone does not say.
  struct Detail {
    FusionKey fusion_key;
    std::vector<RankMask> absent;
    Mask skipped;
    std::vector<int64_t> rows;  // WorkItem::rows
    bool IsEmpty() const { return absent.empty() && skipped.empty() && rows.empty(); }
  };
  struct Ready {
    KeyId key = 0;
    bool taken = false;
    const CachedSignature* cached = nullptr;  // nullptr: the signature is in the round's detail
    std::unique_ptr<Detail> detail;           // not with a plain round, whose id says it all
    std::shared_ptr<const KnownWork> known;   // in place of a key

    const FusionKey& fusion_key() const {
      if (known != nullptr) return known->fusion_key;
      return detail != nullptr ? detail->fusion_key : cached->fusion_key;
    }
  };
  /// Ids that a decision has retired, until all nodes have freed them.
  struct Retired {
    uint32_t set = kGlobalSet;
    std::vector<uint32_t> ids;
  };
  struct Queue {
    std::vector<Ready> ready;  // those before `head`, and the taken ones, are decided
    size_t head = 0;
    size_t waiting = 0;
    int64_t unfinished = 0;  // batches
    bool active = false;     // listed in active_
  };

  void TakeComplete();
  void OnReady(KeyId id);
  void OnReady(std::shared_ptr<const KnownWork> known);
  void Enqueue(Ready ready, uint32_t set, DeviceKind device);
  void DecideOutcomes();
  void DecideSetChanges();
  void DecideAddSet(KeyId id);
  void DecideRemoveSet(KeyId id);
  void DecideQueues();
  void DecideSet(const SetState& set);
  void EndSetsOf(int rank);
  void DecideWork(uint32_t queue);
  void TakeReady(Queue& queue, size_t at);
  static bool SameAbsent(const Ready& a, const Ready& b);
  void TakeFusible(Queue& queue, size_t head);
  void AddToWork(const Ready& ready);
  WorkItem ItemOf(const Ready& ready);
  uint32_t IdFor(Key& key, const Signature& signature);
  uint32_t TakeId();
  size_t IdWeight() const;
  void DecideRetirements();
  void TakeBackIds();
  void DecideLeaves();
  void DecideLeave(int rank, const FailureFacts& failure);
  void DecideJoinDone();
  void Refuse(KeyId id, const Status& why);
  DownMessage& NewDecision(DownType type, uint32_t set);
  void Broadcast();
  void TrackBatches(uint32_t queue);
  void FreeSet(const SetState& set);
  void Note(const Status& status);

  NodeState& node_;
  VoteTally& tally_;
  Applier& applier_;

  DownMessage down_;       // the decision being made; keeps its capacity
  size_t item_bytes_ = 0;  // of its items, about
  int64_t next_number_ = 0;
  Status fault_;

  uint32_t next_id_ = 0;
  std::vector<uint32_t> free_ids_;  // below next_id_
  size_t id_bytes_ = 0;             // of the signatures that have one, about
  bool reported_full_ = false;
  size_t retire_above_ = 0;  // IdWeight
  std::vector<Retired> retired_;

  std::vector<std::pair<KeyId, Outcome>> outcomes_;
  std::vector<KeyId> set_changes_;
  std::unordered_map<uint32_t, Queue> queues_;  // by set and device kind: QueueOf
  std::vector<uint32_t> active_;                // queues with something ready
  InFlightBatches unfinished_;
  std::vector<int32_t> announced_;  // leaves of these ranks, which are still to come
  std::vector<std::pair<int32_t, FailureFacts>> leaving_;
  std::vector<int32_t> left_ranks_;
};

}  // namespace farandole
