// What allreduce and broadcast over MPI have in common: each member is responsible for a shard of
// every chunk (ChunkPlan), receives the contributions to it, and sends the result to the others.
#pragma once

#include <cstdint>

#include "ops/mpi/chunk_plan.h"
#include "ops/mpi/collective.h"

namespace farandole {

/// Thread safety and lifetime: as MpiCollective.
class MpiSharded : public MpiCollective {
 protected:
  /// Where the contribution of `from` to this member's shard is received.
  virtual std::byte* ReceiveBuffer(const MpiSlot& slot, int from, Slice shard) const = 0;
  /// Leaves the result of this member's shard, in a chunk of `count` elements, in slot.result.
  virtual void ReduceShard(MpiSlot& slot, int64_t count) = 0;
  /// The shard of a chunk that goes from the tensor through the reduction and back without passing
  /// through staging as a whole; may be empty.
  virtual Slice DirectShard(int64_t count) const = 0;
  /// Where a complete chunk lies.
  virtual const std::byte* CompleteChunk(const MpiSlot& slot) const = 0;
  /// Whether elements of the result have to be written to `run.out`.
  virtual bool NeedsCopy(const Run& run) const = 0;

  Slice MyShard(int64_t count) const { return plan_.ShardOf(my_index(), count); }

  ChunkPlan plan_;
  SegmentCursor reduce_cursor_;

 private:
  int64_t Prepare() final;
  Status PostReceives(int64_t chunk) final;
  Status SendContributions(int64_t chunk) final;
  Status Reduce(int64_t chunk) final;
  void Unpack(int64_t chunk) final;

  void PackElements(std::byte* to, int64_t count);
  Status SendResults(MpiSlot& slot, int64_t count);
  void UnpackElements(const std::byte* from, int64_t count);

  SegmentCursor pack_cursor_;
  SegmentCursor unpack_cursor_;
};

}  // namespace farandole
