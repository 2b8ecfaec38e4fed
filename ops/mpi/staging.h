// Staging of the MPI plane, per process set: members, tags, the memory that MPI reads and writes,
// and the requests that use it.
#pragma once

#include <mpi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/borrowed_memory.h"
#include "core/counters.h"
#include "core/status.h"
#include "ops/cpu/collective.h"
#include "ops/mpi/chunk_plan.h"

namespace farandole {

/// What all sets of one plane share.
struct MpiBulk {
  MPI_Comm comm = MPI_COMM_NULL;
  Counters* counters = nullptr;      ///< May be nullptr.
  BorrowedMemory* memory = nullptr;  ///< Users' tensors; released while MPI runs. May be nullptr.

  void Count(Counter counter, int64_t n) const {
    if (counters != nullptr) counters->Add(counter, n);
  }
};

/// Which of a batch's two kinds of message; each has its own tag, because contributions of later
/// chunks are sent before results of earlier ones.
enum class Round : int { kContribution = 0, kResult = 1 };

/// Requests of one kind of one slot, one per member; members without one hold MPI_REQUEST_NULL.
using MemberRequests = std::vector<MPI_Request>;

/// Staging memory of one chunk in flight. MPI reads and writes here only, never in user memory.
struct MpiSlot {
  std::byte* packed = nullptr;  ///< This rank's contribution.
  std::byte* inbox = nullptr;   ///< Contributions to this rank's shard, `inbox_bytes` per member.
  std::byte* result = nullptr;  ///< The reduced chunk.
  std::array<MemberRequests, 2> sends;     ///< By Round.
  std::array<MemberRequests, 2> receives;  ///< By Round.
};

inline constexpr int kMpiSlots = 4;

/// Why messages cannot be mismatched: every message of a set between two members carries the set's
/// tag for its round. Within one (set, round, sender, receiver), batches run one after the other
/// and chunks in order on both sides, and MPI matches messages of one (sender, tag) in the order
/// sent with receives in the order posted; both sides derive the same sequence and lengths from the
/// batches. That holds for small gathers, too: what they exchange one after the other are chunks.
/// Sets that live at the same time have different tags, because their uids differ modulo the number
/// of tags (kMaxLiveSets). A set B may have the tags of a set A that was removed before B was
/// added, while some members still run A's last batches. On each member B then waits for `earlier`,
/// which is A, to be removed here: all of A's sends and receives are complete before the first of B
/// is posted. So between any two members, messages of A are sent before those of B, and received
/// before them, whatever is in flight. B's wait ends: A's batches were decided before B was, and
/// nothing that they need waits for a later decision.
///
/// Thread safety: the holder of the engine lock only. Invariant: the first batch in the queue is
/// the only one with requests. Lifetime: staging that MPI may still use when the set ends is never
/// freed.
class MpiSet final : public CpuSet {
 public:
  MpiSet(uint32_t set, std::span<const int> members_ranks, int index, const CpuKernels& cpu,
         const MpiBulk& bulk)
      : CpuSet(set, members_ranks, index, cpu), bulk_(bulk), size_(StagingFor(members())) {}
  ~MpiSet() override;

  /// For the first batch: a set that is never used needs no memory. Later it does nothing.
  /// @return ResourceExhausted if the memory cannot be had.
  Status AllocateStaging();

  bool SharesTagsWith(uint32_t other) const { return uid % kMaxLiveSets == other % kMaxLiveSets; }
  const StagingSize& size() const { return size_; }
  MpiSlot& SlotOf(int64_t chunk) { return slots_[static_cast<size_t>(chunk % kMpiSlots)]; }
  const MpiBulk& bulk() const { return bulk_; }

  Status Send(MpiSlot& slot, Round round, int to, const std::byte* data, int64_t bytes);
  Status Receive(MpiSlot& slot, Round round, int from, std::byte* data, int64_t bytes);
  /// Whether all of `requests` are complete. Never blocks.
  Result<bool> AllComplete(MemberRequests& requests, const char* what);
  /// After AllComplete returned true for receives: the length of the message from a member.
  int64_t BytesFrom(int member) const;

  /// No further batch starts. Staging with live requests is never freed, and counted (quarantined
  /// bytes).
  void Quarantine();

  /// The set with the same tags that was added last before this one, until it is removed.
  /// Maintained by the plane.
  MpiSet* earlier = nullptr;

 private:
  int TagOf(Round round) const;
  bool HasLiveRequests() const;

  const MpiBulk bulk_;
  const StagingSize size_;
  int64_t staging_bytes_ = 0;
  std::byte* staging_ = nullptr;
  std::array<MpiSlot, kMpiSlots> slots_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace farandole
