// The shared-memory collectives: how the members of a set on one host run a batch through
// SharedSlots.
//
// Allreduce and broadcast divide a batch into chunks of at most a slot; allgather, reducescatter
// and alltoall into chunks of one slice for each pair of members. Chunks are pipelined over the
// slots: each member packs, reduces and consumes them in order, and three flags per member (Stage)
// count how far it is. There is no barrier. An allreduce of tensors that lie in buffers of all
// members needs no slots (allreduce.cc).
//
// Idea: shared-memory reduce-scatter and allgather, as in Jain et al., "Framework for Scalable
// Intra-Node Collective Operations using Shared Memory", SC18, doi:10.1109/SC.2018.00032.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/clock.h"
#include "ops/cpu/collective.h"
#include "ops/shm/memory.h"
#include "ops/shm/store_policy.h"

namespace farandole {

/// What a member of a set has, beyond its queue, for the collectives of the set.
struct SharedMemorySet final : CpuSet {
  SharedMemorySet(uint32_t set, std::span<const int> members_ranks, int index,
                  const CpuKernels& cpu, Counters* counts, SharedMemory& shared,
                  const Clock& steady)
      : CpuSet(set, members_ranks, index, cpu, counts), memory(shared), clock(steady) {
    bell = shared.bell(ranks[static_cast<size_t>(index)]);
  }
  /// Gets the slots, unless the set has one member. @return What SharedMemory::Join returns.
  Status Join();

  SharedMemory& memory;  ///< Knows what lies in buffers.
  const Clock& clock;    ///< Times chunks for the choosers.
  std::shared_ptr<std::byte> joined;
  std::optional<SharedSlots> slots;
  std::optional<Agreement> agreement;
  uint64_t chunks = 0;             ///< Chunks of all batches so far: the number of the next one.
  std::vector<std::byte> scratch;  ///< kScratchBytes: values between slots and tensors.
  /// Of each kind's chunks, by OpKind; only those of member 0 are used.
  std::array<StorePolicyChooser, static_cast<size_t>(OpKind::kAlltoall) + 1> choosers;

  static constexpr int64_t kScratchBytes = 16 * 1024;
};

/// One batch through the slots. A subclass says how it is divided into chunks and what each stage
/// of a chunk does.
///
/// Thread safety and lifetime: as CpuCollective. Invariant: every member runs the same batches of a
/// set in the same order.
class SharedMemoryCollective : public CpuCollective {
 public:
  void Abandon() final;

 protected:
  /// Sets what depends on the kind: chunk_elements_, step_bytes_. @return The number of chunks.
  virtual int64_t Prepare() = 0;
  /// Runs one stage of one chunk, if peers allow, and publishes it. May set failure_.
  /// @return Whether there was one.
  virtual bool AdvanceStage() = 0;

  // Fixed-size collectives, whose batches are chunks of chunk_elements_ end to end: so many, but of
  // no less and no more than so many bytes, nor more than a slot.
  int64_t PrepareChunks(int64_t parts, int64_t least_bytes, int64_t most_bytes);
  int64_t ChunkCount(uint64_t chunk) const;

  SharedMemorySet& set() const { return static_cast<SharedMemorySet&>(*set_); }
  bool SlotIsFree();
  bool StreamsSlots() const { return slots_->store_policy() == StorePolicy::kStreamed; }
  /// Whether the own contribution is reduced straight from the tensor: Reduce takes sources of the
  /// wire type only, so a value that is cast or scaled has to be stored first.
  bool ReadsInput() const { return contributes_ && !casts_; }
  /// Casts and scales a run of the tensor into a slot, through the cache or past it.
  void WriteSlot(std::byte* to, const Run& run, bool streamed);
  /// Present members' slots of `chunk`, from element `offset` on. With `own`, this member's
  /// contribution is read from there.
  std::span<const void* const> Sources(uint64_t chunk, int64_t offset, const std::byte* own);
  /// Member 0, after each of the longest chunks that it consumed: measures it for the chooser.
  void TimeChunk();

  SharedSlots* slots_ = nullptr;
  SegmentCursor pack_cursor_;
  SegmentCursor out_cursor_;
  int64_t chunk_elements_ = 0;  // most elements of a chunk; variable-size: of a slice
  int64_t step_bytes_ = 0;      // about what a stage of a chunk moves
  // Fixed-size: as long as they ever are in this kind. Shorter ones cannot be timed, as those of
  // other batches differ.
  bool has_longest_chunks_ = false;
  // Numbers of chunks, counted from the set's first batch: where the batch begins and ends, and
  // how many this member has packed, reduced and consumed.
  uint64_t first_ = 0;
  uint64_t end_ = 0;
  uint64_t packed_ = 0;
  uint64_t reduced_ = 0;
  uint64_t consumed_ = 0;

 private:
  void Begin() final;
  Progress Advance() final;
  StorePolicyChooser& chooser() { return set().choosers[static_cast<size_t>(batch_->kind)]; }
  void RecommendStorePolicy();

  int64_t chunk_ended_ns_ = 0;  // when the last chunk of this batch was consumed; 0: none yet
};

using SharedMemoryFactory = std::unique_ptr<SharedMemoryCollective>();
SharedMemoryFactory MakeSharedMemoryAllreduce;      // allreduce.cc
SharedMemoryFactory MakeSharedMemoryBroadcast;      // broadcast.cc
SharedMemoryFactory MakeSharedMemoryAllgather;      // allgather.cc
SharedMemoryFactory MakeSharedMemoryReducescatter;  // reducescatter.cc
SharedMemoryFactory MakeSharedMemoryAlltoall;       // alltoall.cc

/// What allgather, reducescatter and alltoall through shared slots have in common: one slice for
/// each pair of members, in one round.
///
/// A slot holds one slice for each member, and each member copies or reduces its own slices from
/// all slots straight into its tensor; there is no second stage. Of n bytes that go in on a rank,
/// and m that come out, it writes n to slots (allgather: once for all readers), reads as many as
/// its peers wrote for it, and writes m.
///
/// Thread safety, invariant and lifetime: as SharedMemoryCollective.
class SharedMemoryVariableSize : public SharedMemoryCollective {
 protected:
  /// Writes what this member sends with chunk packed_ to its slot.
  virtual void Pack() = 0;
  /// Before the first chunk is consumed: whether the members agree on what they send each other.
  virtual Status CheckSizes() const { return {}; }
  /// Copies or reduces what this member receives with chunk consumed_ into its tensor.
  virtual void Consume() = 0;

  int64_t Prepare() final;
  bool AdvanceStage() final;

  /// Copies slice `to` of chunk packed_ to where it belongs in the own slot.
  void WriteSlice(int to);
  /// Copies what this member sends itself from tensor to tensor.
  void CopyOwnSlice() { slices_.CopyOwn(kernels(), Number(packed_)); }
  /// Copies what the others have written for this member: in each slot the slice number `index`.
  void CopyReceived(int index);
  /// Of a chunk within the batch.
  int64_t Number(uint64_t chunk) const { return static_cast<int64_t>(chunk - first_); }

  SliceCopier slices_;
};

}  // namespace farandole
