// Votes on their way up: counted per key, combined, and sent on once all below have voted.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "coordinator/protocol/node_state.h"

namespace farandole {

/// The rounds of one node. A round opens with its first vote, is complete when every contributor
/// has voted or joined, and is closed by the decision about its key. Calls no other component.
///
/// Invariants: a contributor votes once in a round; a key goes up once in a round; votes go up in
/// the order in which they were completed, and before a Join or Leave that follows them.
/// Lifetime: `node` outlives it.
class VoteTally {
 public:
  explicit VoteTally(NodeState& node) : node_(node) {}
  VoteTally(const VoteTally&) = delete;
  VoteTally& operator=(const VoteTally&) = delete;

  /// This rank's own vote: with every tensor present, by a signature that has an id; or any other.
  Status CountOwn(KeyId id, const CachedSignature& cached, const StepCount& step);
  Status CountOwn(KeyId id, KeyVotes votes);
  /// The same of known work, of which one more key is submitted; counted when all are.
  void CountOwn(KnownWork& work);
  /// Known work of which only some keys are submitted is none: their votes are counted. To be
  /// called before anything but a further submission.
  void CountPartial();
  /// @return Internal for votes that no correct child sends.
  Status ReceiveVotes(int child, const UpMessage& message);
  /// `rank`, this one or one below, has joined. @return Internal if it had joined already.
  Status Join(int rank);
  /// Below rank 0: a kLeaving or kLeave. What the rank voted for goes up first.
  void SendLeave(const UpMessage& message);

  /// Sends what has added up. @param number  The last decision of rank 0 that had been applied when
  /// it was cast.
  void SendVotes(int64_t number);
  void SendVotes() { SendVotes(node_.last_number()); }

  /// The key is decided: its round ends and the next vote opens another.
  /// @return Internal if a contributor has neither voted nor joined.
  Status CloseRound(Key& key, const SetState& set);
  /// The same of known work. @return false, and nothing has changed, if it is not complete.
  bool CloseRound(KnownWork& work, const SetState& set);
  /// The id means nothing soon: an open round says what it has meant, in full.
  void SpellOut(const CachedSignature& cached);
  /// The key's set has ended, complete or not.
  void DropRound(Key& key);

  /// A key to be decided here whose round is complete; or known work.
  struct Complete {
    KeyId key = 0;
    std::shared_ptr<const KnownWork> known;
  };
  /// Since ClearComplete, in order.
  const std::vector<Complete>& complete() const { return complete_; }
  void ClearComplete() { complete_.clear(); }
  /// Rounds with votes for which a caller waits somewhere.
  int64_t open_rounds() const { return open_rounds_; }
  /// -1: nobody has joined.
  int last_joined() const { return last_joined_; }

 private:
  Status CountIds(int contributor, std::span<const uint32_t> ids, const StepCount& step,
                  int64_t number);
  bool CountKnown(KnownWork& work, int contributor);
  Status CountId(int contributor, uint32_t id, const StepCount& step, int64_t number);
  KeyVotes InFull(int contributor, const CachedSignature& cached, const StepCount& step) const;
  void AddKnownRows(int contributor, const CachedSignature& cached, KeyVotes& votes) const;
  Status ReceiveRecord(int contributor, const KeyVotes& votes, int64_t number);
  Status Normalise(const Key& key, const SetState& set, int contributor, KeyVotes& votes) const;
  Status CountPlain(KeyId id, SetState& set, int contributor, const CachedSignature* cached,
                    const StepCount& step);
  Status CountRecord(KeyId id, SetState& set, int contributor, KeyVotes votes);
  Status EnterVote(Key& key, const SetState& set, int contributor, const Signature& signature);
  template <class Variant>
  void AddVariant(std::vector<Variant>& list, const Key& key, const SetState& set, int contributor,
                  Variant votes);
  std::vector<int32_t> Submitters(const Key& key, const SetState& set, int contributor) const;
  void AddJoined(Key& key, const SetState& set);
  bool IsComplete(const Round& round, const SetState& set) const;
  void CompleteIfAll(KeyId id, SetState& set);
  void CompleteAll();
  void SendRank(UpType type, int rank);

  NodeState& node_;
  UpMessage up_;         // votes that have added up; keeps its capacity
  size_t up_bytes_ = 0;  // of its records, about
  int64_t open_rounds_ = 0;
  std::vector<Complete> complete_;
  std::vector<KnownWork*> partial_;  // of which some keys are submitted
  int last_joined_ = -1;
};

}  // namespace farandole
