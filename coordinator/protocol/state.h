// What a node of the tree knows: plain structs shared by the negotiation's parts.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/protocol/listener.h"
#include "coordinator/protocol/messages.h"

namespace farandole {

/// Numbers of a node's contributors to a key: itself, then one per child.
inline constexpr int kSelf = 0;
constexpr int ContributorOfChild(int child) { return child + 1; }

/// A set of contributor numbers. Allocates only beyond 64 of them, once.
class Contributors {
 public:
  bool Test(int i) const;
  void Set(int i);
  void Clear();
  bool operator==(const Contributors&) const = default;

 private:
  uint64_t first_ = 0;
  std::vector<uint64_t> rest_;
};

/// The mask of `rank` in a list sorted by rank, or nullptr.
const Mask* FindMask(const std::vector<RankMask>& list, int32_t rank);

/// What is compared to fuse keys.
struct FusionKey {
  Collective collective;
  DType dtype = DType::kFloat32;
  /// Every tensor of the key goes into one kind of batch; false: the key travels alone.
  bool uniform = false;
  int64_t bytes = 0;
  bool With(const FusionKey& other) const;
};
FusionKey FusionKeyOf(const Signature& signature);

/// A (key, signature) with an id. Lives until the id is free again, or the key's set has ended.
struct CachedSignature {
  uint32_t id = kNoId;
  bool retired = false;  ///< This rank votes by it no more; those below may have.
  KeyId key = 0;
  Signature signature;
  std::vector<int64_t> rows;  ///< Allgather: WorkItem::rows of its last decision.
  FusionKey fusion_key;
};

/// The votes of a subtree on one use of a key.
struct Round {
  Contributors voted;
  int32_t votes = 0;     // contributors that voted; 0: the round is not open
  bool sent = false;     // gone up; on the node that decides: ready
  bool stalled = false;  // a Stall about it has gone up
  bool asked = false;    // a query about it has come down
  bool detailed = false;
  const CachedSignature* plain = nullptr;  // not detailed: all voters present with this signature
  StepCount step;                          // not detailed: what all contributors reported
  std::unique_ptr<KeyVotes> detail;        // detailed: everything else

  /// The votes in full; a plain round is turned into that form.
  KeyVotes& Detail(const KeyName& key);
};

struct KnownWork;

/// What every use reads and writes comes first, so that many keys take few cache lines each. While
/// `known` is set, what its head lists is there and not here.
struct Key {
  Round round;
  KnownWork* known = nullptr;
  uint32_t known_at = 0;      // position in it
  int64_t closed = 0;         // number of the decision that closed the last round here
  bool pending = false;       // an own submission is
  bool own_is_plain = false;  // it says what an id alone says, so that nothing below counts
  bool stalled = false;       // it has been reported
  bool is_live = false;       // not released
  bool is_idle = false;       // nobody has voted since TestIdle
  const CachedSignature* own_cached = nullptr;
  int64_t since_ns = 0;
  std::vector<const CachedSignature*> cached;
  KeyName name;  // its kind and function: see NameAfter

  std::unique_ptr<Signature> own;  // without an id
  Mask own_absent;                 // of the pending submission's vote
  std::vector<int64_t> own_rows;   // likewise
  std::string own_failure;         // what the pending submission's vote says failed

  std::vector<uint64_t> seen;  // on the node that decides: hashes of signatures decided once

  /// Nobody below has voted, and nothing waits for a decision.
  bool IsAtRest() const { return round.votes == 0 && !round.sent && !pending; }
  /// Whether nobody has voted since the last call. Asked before memory is released, so that what
  /// is used now and then keeps it.
  bool TestIdle() { return std::exchange(is_idle, true); }
  /// What this rank has pending.
  const Signature& OwnSignature() const {
    return own_cached != nullptr ? own_cached->signature : *own;
  }
  /// Messages name the key after `use` from now on.
  void NameAfter(const Signature& use) {
    name.kind = use.kind;
    name.function = use.function;
  }
};

/// Whether a caller waits for the key, so that it is polled for and can stall.
inline bool IsWaitedFor(const Key& key) { return key.name.kind != OpKind::kStep; }

/// A process set as this node sees it.
struct SetState {
  struct Branch {
    std::vector<int32_t> ranks;
    int32_t joined = 0;
    bool AllJoined() const { return joined == static_cast<int32_t>(ranks.size()); }
  };
  /// Where decisions about the set are made: on the lowest node that has all members below it.
  enum class DecidedAt : uint8_t { kAbove, kHere, kBelow };

  ProcessSetInfo info;
  DecidedAt decided_at = DecidedAt::kAbove;
  bool live = true;  // only the global set stays when it has ended
  Status why;        // it ended
  bool member = false;
  std::vector<Branch> branches;  // by contributor; [kSelf] holds this rank or nobody
  int32_t contributors = 0;      // branches with members
  int32_t joined = 0;            // contributors that have joined entirely
  int64_t last_number = 0;       // of the last decision about the set applied here
  int64_t last_round = 0;        // of the last one that ended what members may wait for

  // Ids that are retired (docs/protocol.md, "Ids"), the decision's number, and the branches
  // that may still vote by them. One decision of a set at a time.
  std::vector<uint32_t> retired;
  int64_t retired_by = 0;
  std::vector<bool> in_use;  // by contributor
  int32_t awaited = 0;

  bool IsDecidedHere() const { return decided_at == DecidedAt::kHere; }
  bool Contributes(int contributor) const {
    return !branches[static_cast<size_t>(contributor)].ranks.empty();
  }
  bool Contains(int rank) const;
};

uint64_t Hash(const Signature& signature);
uint64_t Hash(const KeyName& key);

}  // namespace farandole
