// The collectives over messages: a process set with its link and staging memory, and one batch as a
// resumable state machine.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "core/counters.h"
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
  using CpuSet::CpuSet;
  ~P2pSet() override;

  /// For the first batch: a set that is never used needs no link and no memory. Later it does
  /// nothing.
  /// @return ResourceExhausted if the memory cannot be had.
  Status Open(const P2pLinkFactory& links);

  bool SharesNumberWith(uint32_t other) const { return uid % kMaxLiveSets == other % kMaxLiveSets; }
  const StagingSize& size() const { return size_; }
  P2pSlot& SlotOf(int64_t chunk) { return slots_[static_cast<size_t>(chunk % kLinkSlots)]; }

  Status Send(P2pSlot& slot, P2pLink::Round round, int to, const std::byte* data, int64_t bytes);
  Status Receive(P2pSlot& slot, P2pLink::Round round, int from, std::byte* data, int64_t bytes);
  /// True also where the group has no messages.
  Result<bool> AllComplete(P2pSlot& slot, P2pLink::Group group);
  /// As P2pLink::BytesFrom: of the last AllComplete, if the member has sent a message.
  int64_t BytesFrom(int member) const { return link_->BytesFrom(member); }
  /// As P2pLink::PollAfterNs.
  int64_t PollAfterNs() { return link_->PollAfterNs(); }
  /// Ends messages in flight. If the link cannot, staging is never freed, and counted (quarantined
  /// bytes).
  void Quarantine();

  /// The set with the same number modulo kMaxLiveSets that was added last before this one, until it
  /// is removed. Maintained by the plane.
  P2pSet* earlier = nullptr;

 private:
  const StagingSize size_ = StagingFor(members());
  std::unique_ptr<P2pLink> link_;
  int64_t staging_bytes_ = 0;
  std::byte* staging_ = nullptr;
  std::array<P2pSlot, kLinkSlots> slots_;
};

/// Every chunk passes five stages, each in chunk order: posted (its slot is free, receives are
/// posted), packed (contributions sent), reduced (contributions received and reduced, results
/// sent), unpacked (results received and written to the user's tensors), retired (all sends
/// complete: the slot is free). A few chunks are in flight at a time, so that one is packed while
/// another travels. A subclass says what is sent, received and reduced.
///
/// It cannot deadlock: no call waits, receives are posted before anything is sent, and the lowest
/// chunk not yet retired on any member needs nothing but messages of chunks that have their slots.
/// Where chunks are rounds (`in_rounds_`) it also needs the one before, which is retired
/// everywhere.
///
/// Thread safety and lifetime: as CpuCollective.
class P2pCollective : public CpuCollective {
 protected:
  using Round = P2pLink::Round;
  using Group = P2pLink::Group;

  /// Divides the batch. @return The number of chunks.
  virtual int64_t Prepare() = 0;
  /// Posts all receives of a chunk.
  virtual Status PostReceives(int64_t chunk) = 0;
  /// Packs and sends this member's contribution; not called unless `contributes_`.
  virtual Status SendContributions(int64_t chunk) = 0;
  /// All contributions are received: reduces or copies them, and sends results.
  virtual Status Reduce(int64_t chunk) = 0;
  /// All results are received: writes them to the tensors.
  virtual void Unpack(int64_t chunk) = 0;

  P2pSet& set() const { return static_cast<P2pSet&>(*set_); }
  void CountCopied(int64_t bytes) const { set().Count(Counter::kBytesCopied, bytes); }
  /// Where contributions from `member` are received.
  std::byte* Inbox(const P2pSlot& slot, int member) const {
    return slot.inbox + member * set().size().inbox_bytes;
  }
  /// Present members' contributions from element `at` of the inboxes on; this rank's own lies at
  /// `own`.
  std::span<const void* const> Sources(const P2pSlot& slot, int64_t at, const void* own) {
    return CpuCollective::Sources([&](int member) -> const void* {
      return member == my_index() ? own : Inbox(slot, member) + at * wire_bytes_;
    });
  }

  bool in_rounds_ = false;  // a chunk is sent when the one before has been reduced

 private:
  void Begin() final;
  Progress Advance() final;
  void Cancel() final { set().Quarantine(); }
  bool AdvanceStage();
  bool AllComplete(int64_t chunk, Group group);

  int64_t chunks_ = 0;
  // Chunks that have passed each stage.
  int64_t posted_ = 0;
  int64_t packed_ = 0;
  int64_t reduced_ = 0;
  int64_t unpacked_ = 0;
  int64_t retired_ = 0;
};

/// What large allreduces and broadcasts over messages have in common: each member is responsible
/// for a shard of every chunk (ChunkPlan), receives the contributions to it, and sends the result
/// to the others.
///
/// Thread safety and lifetime: as P2pCollective.
class P2pSharded : public P2pCollective {
 protected:
  /// Where the contribution of `from` to this member's shard is received.
  virtual std::byte* ReceiveBuffer(const P2pSlot& slot, int from, Slice shard) const = 0;
  /// Leaves the result of this member's shard, in a chunk of `count` elements, in slot.result.
  virtual void ReduceShard(P2pSlot& slot, int64_t count) = 0;
  /// The shard of a chunk that goes from the tensor through the reduction and back without passing
  /// through staging as a whole; may be empty.
  virtual Slice DirectShard(int64_t count) const = 0;
  /// Where a complete chunk lies.
  virtual const std::byte* CompleteChunk(const P2pSlot& slot) const = 0;

  /// Bytes of so many elements in a message, and how they come there from the tensors and back.
  virtual int64_t BytesOf(int64_t count) const { return count * wire_bytes_; }
  virtual void PackElements(SegmentCursor& cursor, std::byte* to, int64_t count) {
    PackRuns(kernels(), *batch_, cursor, to, count);
  }
  virtual void UnpackElements(SegmentCursor& cursor, const std::byte* from, int64_t count) {
    UnpackRuns(kernels(), *batch_, cursor, from, count);
  }

  Slice MyShard(int64_t count) const { return plan_.ShardOf(my_index(), count); }

  ChunkPlan plan_;
  SegmentCursor reduce_cursor_;

 private:
  int64_t Prepare() final;
  Status PostReceives(int64_t chunk) final;
  Status SendContributions(int64_t chunk) final;
  Status Reduce(int64_t chunk) final;
  void Unpack(int64_t chunk) final;

  Status SendResults(P2pSlot& slot, int64_t count);

  SegmentCursor pack_cursor_;
  SegmentCursor unpack_cursor_;
};

/// What allgather, reducescatter and alltoall over messages have in common: one round of messages.
///
/// A chunk is one slice from each member to each other (Partition), packed, sent, and copied or
/// reduced from the receiver's inbox straight into its tensor; there are no results to send.
///
/// Thread safety and lifetime: as P2pCollective.
class P2pVariableSize : public P2pCollective {
 protected:
  /// Before slices of a chunk are sent: what is done once for all receivers.
  virtual void BeforeSends(int64_t chunk) = 0;
  /// The packed slice for `to`.
  virtual const std::byte* Packed(int to, int64_t chunk) { return PackSlice(to, chunk); }
  /// Whether there is a message with the chunk; alike on both ends.
  virtual bool SendsTo(int to, int64_t chunk) const { return slices_.Sent(to, chunk).count > 0; }
  virtual bool ReceivesFrom(int from, int64_t chunk) const {
    return slices_.Received(from, chunk).count > 0;
  }

  /// Packs the slice for `to` to where it belongs in staging.
  const std::byte* PackSlice(int to, int64_t chunk);
  std::byte* PackedSlice(int to, int64_t chunk) const {
    return set().SlotOf(chunk).packed + to * slice_bytes_;
  }
  /// Copies what this rank sends itself from tensor to tensor.
  void CopyOwnSlice(int64_t chunk) { CountCopied(slices_.CopyOwn(kernels(), chunk)); }
  /// Copies what others sent with the chunk to the output.
  void CopyReceived(int64_t chunk);

  SliceCopier slices_;
  int64_t slice_bytes_ = 0;  // room for a slice in staging

 private:
  int64_t Prepare() final;
  Status PostReceives(int64_t chunk) final;
  Status SendContributions(int64_t chunk) final;
  void Unpack(int64_t) final {}
};

std::unique_ptr<P2pCollective> MakeP2pAllreduce();      // allreduce.cc
std::unique_ptr<P2pCollective> MakeP2pBroadcast();      // broadcast.cc
std::unique_ptr<P2pCollective> MakeP2pAllgather();      // allgather.cc
std::unique_ptr<P2pCollective> MakeP2pReducescatter();  // reducescatter.cc
std::unique_ptr<P2pCollective> MakeP2pAlltoall();       // alltoall.cc
std::unique_ptr<P2pCollective> MakeP2pSmallGather();    // small_gather.cc
std::unique_ptr<P2pCollective> MakeP2pQuantized();      // allreduce.cc

}  // namespace farandole
