// Work that has been decided before, so that its keys are counted, decided and applied as one.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "coordinator/protocol/batching.h"
#include "coordinator/protocol/state.h"

namespace farandole {

/// A Work decision of ids alone, and the votes of its next round. Nothing of it is agreed: each
/// node knows what has come back to it, and messages are the same with and without.
///
/// It stands for its keys as long as nothing tells them apart: each contributor votes for all of
/// them by their ids, in this order and without anything besides, and so does the decision. Anyone
/// who looks at one of the keys (SignatureCache::At) dissolves it, and each key has its own round
/// and submission again. So whatever may change the outcome, as a retired id, a join, a vote with
/// an exception or a stall, needs no rule here.
struct KnownWork : std::enable_shared_from_this<KnownWork> {
  uint32_t set = kGlobalSet;
  std::vector<uint32_t> ids;
  std::vector<DecidedKey> keys;  ///< What the listener is handed: without masks or rows.
  std::vector<BatchPlan> plans;  ///< Its batches, if nothing is decided with it.
  FusionKey fusion_key;          ///< The keys', with the bytes of all.
  int64_t freed = 0;             ///< No vote of who has applied fewer decisions means these ids.

  // Of each key, in place of its round and own submission.
  Contributors voted;
  int32_t votes = 0;
  bool sent = false;
  bool used = false;   // voted for since it is known
  size_t own = 0;      // so many, from the first on, are submitted here
  int64_t closed = 0;  // 0: not since it is known

  bool IsAllOwn() const { return own == keys.size(); }
  /// Key `i` has its own round from now on. The vote of this rank is in there if it IsAllOwn.
  void Restore(size_t i, const CachedSignature* cached, Key& key) const;
};

/// Which decisions come again and again. Bounded; a collision makes work known too early, which
/// only costs time.
class RepeatedWork {
 public:
  /// `ids` are decided. @return whether it pays to know them as one. Each time the answer is yes,
  /// what was known has been dissolved since the last time; then it takes twice as many decisions,
  /// at most kMost.
  bool Repeats(std::span<const uint32_t> ids);

 private:
  static constexpr int32_t kMost = 64;
  struct Seen {
    uint64_t hash = 0;
    int32_t times = 0;
    int32_t needed = 1;
  };
  std::array<Seen, 256> seen_;
  size_t next_ = 0;  // replaced next
};

}  // namespace farandole
