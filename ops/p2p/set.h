// A process set of a plane over messages: its link, and the staging memory of its messages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/counters.h"
#include "core/status.h"
#include "ops/cpu/collective.h"
#include "ops/p2p/chunk_plan.h"
#include "ops/p2p/link.h"

namespace farandole {

/// Staging memory of one chunk in flight. The link reads and writes here only, never in user
/// memory.
struct P2pSlot {
  int number = 0;
  std::byte* packed = nullptr;  ///< This rank's contribution.
  std::byte* inbox = nullptr;   ///< Contributions to this rank's shard, `inbox_bytes` per member.
  std::byte* result = nullptr;  ///< The reduced chunk.
  std::array<bool, P2pLink::kGroups> is_pending =
      {};  ///< By P2pLink::Group: has messages in flight.
};

/// Why messages cannot be mismatched: within one (set, round, sender, receiver), batches run one
/// after the other and chunks in order on both sides, and a link matches messages in the order sent
/// with receives in the order posted; both sides derive the same sequence and lengths from the
/// batches. That holds for small gathers, too: what they exchange one after the other are chunks.
/// Links of sets that live at the same time do not mix messages, because their uids differ modulo
/// kMaxLiveSets. A set B may equal in that a set A that was removed before B was added, while some
/// members still run A's last batches. On each member B then waits for `earlier`, which is A, to be
/// removed here: all of A's messages are complete before the first of B is posted. So between any
/// two members, messages of A are sent before those of B, and received before them, whatever is in
/// flight. B's wait ends: A's batches were decided before B was, and nothing that they need waits
/// for a later decision.
///
/// Thread safety: the holder of the engine lock only. Invariant: the first batch in the queue is
/// the only one with messages. Lifetime: staging that a link may still use when the set ends is
/// never freed.
class P2pSet final : public CpuSet {
 public:
  /// @param counts  May be nullptr.
  P2pSet(uint32_t set, std::span<const int> members_ranks, int index, const CpuKernels& cpu,
         Counters* counts)
      : CpuSet(set, members_ranks, index, cpu), counters_(counts), size_(StagingFor(members())) {}
  ~P2pSet() override;

  /// For the first batch: a set that is never used needs no link and no memory. Later it does
  /// nothing.
  /// @return ResourceExhausted if the memory cannot be had.
  Status Open(const P2pLinkFactory& links);

  bool SharesNumberWith(uint32_t other) const { return uid % kMaxLiveSets == other % kMaxLiveSets; }
  const StagingSize& size() const { return size_; }
  P2pSlot& SlotOf(int64_t chunk) { return slots_[static_cast<size_t>(chunk % kLinkSlots)]; }
  void Count(Counter counter, int64_t n) const {
    if (counters_ != nullptr) counters_->Add(counter, n);
  }

  Status Send(P2pSlot& slot, P2pLink::Round round, int to, const std::byte* data, int64_t bytes);
  Status Receive(P2pSlot& slot, P2pLink::Round round, int from, std::byte* data, int64_t bytes);
  /// True also where the group has no messages.
  Result<bool> AllComplete(P2pSlot& slot, P2pLink::Group group);
  /// As P2pLink::BytesFrom: of the last AllComplete, if the member has sent a message.
  int64_t BytesFrom(int member) const { return link_->BytesFrom(member); }
  /// Staging with messages in flight is never freed, and counted (quarantined bytes).
  void Quarantine();

  /// The set with the same number modulo kMaxLiveSets that was added last before this one, until it
  /// is removed. Maintained by the plane.
  P2pSet* earlier = nullptr;

 private:
  Counters* const counters_;
  const StagingSize size_;
  std::unique_ptr<P2pLink> link_;
  int64_t staging_bytes_ = 0;
  std::byte* staging_ = nullptr;
  std::array<P2pSlot, kLinkSlots> slots_;
};

}  // namespace farandole
