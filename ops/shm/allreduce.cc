// Allreduce through shared slots: reduce-scatter and allgather of each chunk, in place.
#include <algorithm>

#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// Shards start at multiples of this, in elements of any size, so that two members never write one
/// cache line.
constexpr int64_t kShardAlign = 64;

/// Of every chunk each member owns a shard of about 1/P. It packs its contribution into its slot,
/// reduces its shard from all present members' slots in rank order, leaves the result in its own
/// slot, over its contribution to its own shard, which nobody else reads, and copies all shards'
/// results out. A batch of at most kOneShotBytes is one-shot: every member reduces everything, in
/// the same order, to the same bits, which saves one round trip.
class SharedMemoryAllreduce final : public SharedMemoryCollective {
 public:
  using SharedMemoryCollective::SharedMemoryCollective;

 protected:
  int64_t Prepare() override;
  bool Advance() override { return one_shot_ ? AdvanceOneShot() : AdvanceSharded(); }

 private:
  bool AdvanceSharded();
  bool AdvanceOneShot();
  void PackChunk();
  void PackSlice(std::byte* slot, Slice slice);
  void ReduceShard();
  void ReduceRun(std::byte* to, int64_t at, const Run& own);
  void CopyResultOut();
  void ReduceWholeBatch();
  Slice ShardOf(int member, int64_t chunk_count) const;

  bool one_shot_ = false;
  SegmentCursor reduce_cursor_;
};

int64_t SharedMemoryAllreduce::Prepare() {
  const int64_t one_shot_bytes =
      std::min(SharedMemoryMember::kOneShotBytes, slots_.layout().slot_bytes);
  one_shot_ = batch_->count * wire_bytes_ <= one_shot_bytes;
  reduce_cursor_ = pack_cursor_;
  return PrepareWholeSlots();
}

/// The latest stage that is possible goes first: what was just written is still in the cache.
bool SharedMemoryAllreduce::AdvanceSharded() {
  if (consumed_ < reduced_ && slots_.AllReached(Stage::kReduced, consumed_ + 1)) {
    CopyResultOut();
    slots_.Publish(Stage::kConsumed, ++consumed_);
    if (my_index() == 0) TimeChunk();
  } else if (reduced_ < packed_ && slots_.AllReached(Stage::kPacked, reduced_ + 1, present_)) {
    ReduceShard();
    slots_.Publish(Stage::kReduced, ++reduced_);
  } else if (packed_ < end_ && SlotIsFree()) {
    PackChunk();
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_.RingPeers();
  return true;
}

bool SharedMemoryAllreduce::AdvanceOneShot() {
  if (packed_ < end_) {
    if (!SlotIsFree()) return false;
    // The own contribution as well: ReduceWholeBatch reads all of them from slots.
    if (contributes_) PackSlice(slots_.Slot(my_index(), packed_), {0, batch_->count});
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    if (!slots_.AllReached(Stage::kPacked, packed_, present_)) return false;
    ReduceWholeBatch();
    slots_.Publish(Stage::kReduced, ++reduced_);
    slots_.Publish(Stage::kConsumed, ++consumed_);
  }
  slots_.RingPeers();
  return true;
}

/// Packs what peers will read of this member's contribution: all of it but the own shard, unless
/// that has to be cast or scaled first.
void SharedMemoryAllreduce::PackChunk() {
  if (!contributes_) return;
  std::byte* slot = slots_.Slot(my_index(), packed_);
  const int64_t count = ChunkCount(packed_);
  if (!reads_input_) return PackSlice(slot, {0, count});
  const Slice own = ShardOf(my_index(), count);
  const int64_t after = own.begin + own.count;
  PackSlice(slot, {0, own.begin});
  pack_cursor_.Skip(own.count);
  PackSlice(slot, {after, count - after});
}

void SharedMemoryAllreduce::PackSlice(std::byte* slot, Slice slice) {
  const int64_t end = slice.begin + slice.count;
  for (int64_t at = slice.begin; at < end;) {
    const Run run = pack_cursor_.Next(end - at);
    WriteSlot(slot + at * wire_bytes_, run, !one_shot_ && StreamsSlots());
    at += run.count;
  }
}

/// In place this overwrites inputs, which is safe: peers read slots only, and of this chunk all but
/// the own shard, which is read here, has been packed.
void SharedMemoryAllreduce::ReduceShard() {
  const int64_t count = ChunkCount(reduced_);
  const Slice shard = ShardOf(my_index(), count);
  const int64_t end = shard.begin + shard.count;
  std::byte* slot = slots_.Slot(my_index(), reduced_);
  const int64_t block = kInCacheBytes / wire_bytes_;
  reduce_cursor_.Skip(shard.begin);
  for (int64_t at = shard.begin; at < end;) {
    Run run;
    run.count = std::min(block, end - at);
    if (reads_input_) run = reduce_cursor_.Next(run.count);
    ReduceRun(slot + at * wire_bytes_, at, run);
    at += run.count;
  }
  reduce_cursor_.Skip(count - end);
}

/// Reduces elements from `at` on into the own slot; and into the tensor, if `own` says where.
void SharedMemoryAllreduce::ReduceRun(std::byte* to, int64_t at, const Run& own) {
  const bool streams = StreamsSlots();
  std::byte* result = streams ? member_.scratch.data() : to;
  // Without streaming `result` may be this member's own source in its slot, which Reduce allows
  // where both begin at the same element.
  kernels_.Reduce(result, Sources(reduced_, at, own.in), own.count, spec_);
  if (own.out != nullptr) kernels_.Unpack(own.out, wire_, result, wire_, own.count);
  if (streams) kernels_.Stream(to, result, own.count * wire_bytes_);
}

/// Copies (P-1)/P of the chunk from peers' slots; the own shard only where the reduction could not
/// write it to the tensor.
void SharedMemoryAllreduce::CopyResultOut() {
  const int64_t count = ChunkCount(consumed_);
  for (int member = 0; member < members(); ++member) {
    const Slice shard = ShardOf(member, count);
    if (member == my_index() && reads_input_) {
      out_cursor_.Skip(shard.count);  // ReduceRun did it
    } else {
      UnpackSlice(slots_.Slot(member, consumed_), shard);
    }
  }
}

void SharedMemoryAllreduce::ReduceWholeBatch() {
  for (int64_t at = 0; at < batch_->count;) {
    const Run run = out_cursor_.Next(batch_->count - at);
    const bool casts = wire_ != batch_->dtype;
    void* result = casts ? member_.scratch.data() : run.out;
    if (run.out != nullptr) {
      kernels_.Reduce(result, Sources(reduced_, at, nullptr), run.count, spec_);
      if (casts) kernels_.Unpack(run.out, batch_->dtype, result, wire_, run.count);
    }
    at += run.count;
  }
}

Slice SharedMemoryAllreduce::ShardOf(int member, int64_t chunk_count) const {
  const int64_t each = (chunk_count + members() - 1) / members();
  const int64_t aligned = (each + kShardAlign - 1) / kShardAlign * kShardAlign;
  const int64_t begin = std::min(chunk_count, member * aligned);
  return {begin, std::min(chunk_count, (member + 1) * aligned) - begin};
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryAllreduce(SharedMemoryMember& member,
                                                                  StorePolicyChooser chooser) {
  return std::make_unique<SharedMemoryAllreduce>(member, chooser);
}

}  // namespace farandole
