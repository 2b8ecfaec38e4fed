// Allreduce through shared slots: reduce-scatter and allgather of each chunk, in place.
#include <algorithm>
#include <optional>
#include <utility>

#include "ops/shm/collective.h"

namespace farandole {
namespace {

constexpr int64_t kOneShotBytes = 64 * 1024;
// Three times in each chunk a member waits for its peers, and each time reads their flags, or is
// woken: a medium batch is divided only where few members leave each a shard that takes longer.
constexpr int64_t kLeastShardBytes = 32 * 1024;
constexpr int64_t kMediumChunks = 2;

/// Of every chunk each member owns a shard of about 1/P. It packs its contribution into its slot,
/// reduces its shard from all present members' slots in rank order, leaves the result in its own
/// slot, over its contribution to its own shard, which nobody else reads, and copies all shards'
/// results out. A batch of which nobody reads more than kOneShotBytes of its peers is one-shot:
/// every member reduces everything, in the same order, to the same bits, which saves a round trip.
///
/// Where the tensors of all members lie in buffers (SharedMemory), they are not copied: each member
/// reads its shard of the whole batch from all tensors and writes the result to all of them, in two
/// steps: all have announced their tensors, all have reduced their shard. Only a member itself
/// knows where its tensors lie, so with its first chunk it says so: the slot then holds their
/// offsets. Where only some do, that chunk is void, and the values follow from the next one on.
class SharedMemoryAllreduce final : public SharedMemoryCollective {
 protected:
  int64_t Prepare() override;
  bool AdvanceStage() override;

 private:
  bool Announce();
  bool Agree();
  bool AdvanceSharded();
  bool AdvanceOneShot();
  bool AdvanceInBuffers();
  bool WriteOffsets();
  std::span<int64_t> Offsets(int member) const;
  void SkipFirstChunk();
  void BeginInBuffers();
  void ReduceBlock();
  void ReduceTensors(int64_t count);
  void PackChunk();
  void PackSlice(std::byte* slot, Slice slice);
  void ReduceShard();
  void ReduceRun(std::byte* to, int64_t at, const Run& own);
  void CopyResultOut();
  void CopyShardsOut(SegmentCursor& cursor, int from, int end);
  void ReduceWholeBatch();
  /// Two members never write one cache line.
  Slice ShardOf(int member, int64_t chunk_count) const {
    return farandole::ShardOf(chunk_count, members(), member, kAnyElementAlign);
  }

  bool one_shot_ = false;
  bool is_agreed_ = false;  // on whether tensors are reduced in place
  SegmentCursor reduce_cursor_;

  // In place.
  bool in_place_ = false;
  int64_t block_ = 0;                // most elements that are reduced at once
  int64_t at_ = 0;                   // element of the batch: the next of the own shard
  size_t segment_ = 0;               // where that is
  int64_t segment_begin_ = 0;        // first element of the segment
  std::vector<std::byte*> tensors_;  // by member: where element at_ is
};

int64_t SharedMemoryAllreduce::Prepare() {
  const int64_t bytes = batch_->count * wire_bytes_;
  one_shot_ = bytes * (members() - 1) <= kOneShotBytes && bytes <= slots_->layout().slot_bytes;
  is_agreed_ = in_place_ = false;
  reduce_cursor_ = pack_cursor_;
  tensors_.resize(static_cast<size_t>(members()));
  const int64_t chunks =
      PrepareChunks(kMediumChunks, members() * kLeastShardBytes, slots_->layout().slot_bytes);
  if (!one_shot_) return chunks;
  chunk_elements_ = batch_->count;
  return std::min<int64_t>(chunks, 1);
}

bool SharedMemoryAllreduce::AdvanceStage() {
  if (one_shot_) return AdvanceOneShot();
  if (!is_agreed_) return packed_ == first_ ? Announce() : Agree();
  return in_place_ ? AdvanceInBuffers() : AdvanceSharded();
}

/// The first chunk: offsets of tensors in buffers, or values.
bool SharedMemoryAllreduce::Announce() {
  if (!SlotIsFree()) return false;
  const bool is_in_buffers = WriteOffsets();
  slots_->Sizes(my_index(), first_)[0] = is_in_buffers;
  if (!is_in_buffers) PackChunk();
  slots_->Publish(Stage::kPacked, ++packed_);
  slots_->RingPeers();
  return true;
}

/// All members read the same announcements, also those of absent ones, which receive the result.
bool SharedMemoryAllreduce::Agree() {
  if (!slots_->AllReached(Stage::kPacked, first_ + 1)) return false;
  is_agreed_ = true;
  int in_buffers = 0;
  for (int member = 0; member < members(); ++member) {
    in_buffers += static_cast<int>(slots_->Sizes(member, first_)[0]);
  }
  if (in_buffers == members()) {
    BeginInBuffers();
  } else if (in_buffers > 0) {
    SkipFirstChunk();
  }
  return true;
}

/// A factor may be each rank's own, while a shard is reduced by one for all: such batches are not
/// reduced in place.
bool SharedMemoryAllreduce::WriteOffsets() {
  const std::span<const Segment> segments = batch_->segments;
  const size_t room = static_cast<size_t>(slots_->layout().slot_bytes) / sizeof(int64_t);
  if (segments.size() > room || prescale_ != 1.0) return false;
  const std::span<int64_t> offsets = Offsets(my_index());
  for (size_t k = 0; k < segments.size(); ++k) {
    const Segment& segment = segments[k];
    if (segment.count == 0) continue;
    if (segment.out == nullptr || (contributes_ && segment.in != segment.out)) return false;
    const auto bytes = static_cast<size_t>(segment.count * SizeOf(batch_->dtype));
    const std::optional<int64_t> offset = set().memory.OffsetOf(segment.out, bytes);
    if (!offset) return false;
    offsets[k] = *offset;
  }
  return true;
}

/// In the slot of the first chunk, which stays as it is until all members have consumed it.
std::span<int64_t> SharedMemoryAllreduce::Offsets(int member) const {
  return {reinterpret_cast<int64_t*>(slots_->Slot(member, first_)), batch_->segments.size()};
}

/// Some members' first chunk has no values: all begin again with the second one.
void SharedMemoryAllreduce::SkipFirstChunk() {
  pack_cursor_ = SegmentCursor(batch_->segments, batch_->dtype);
  set().chunks = ++end_;
  reduced_ = consumed_ = ++first_;
  slots_->Publish(Stage::kReduced, reduced_);
  slots_->Publish(Stage::kConsumed, consumed_);
  slots_->RingPeers();
}

/// The batch is one chunk. A block of every source, or of every source rounded to the wire type,
/// stays in the cache until the result has been written.
void SharedMemoryAllreduce::BeginInBuffers() {
  in_place_ = true;
  end_ = set().chunks = first_ + 1;
  const bool rounds = wire_ != batch_->dtype;
  const auto scratch_bytes = static_cast<int64_t>(set().scratch.size());
  const int64_t bytes =
      rounds ? scratch_bytes / static_cast<int64_t>(present_.size()) : kInCacheBytes;
  block_ = std::max<int64_t>(bytes / wire_bytes_, 1);
  step_bytes_ = block_ * SizeOf(batch_->dtype) * members();
  at_ = ShardOf(my_index(), batch_->count).begin;
  segment_ = 0;
  segment_begin_ = 0;
}

/// Shards are disjoint: nobody else accesses this member's one in any tensor. Once all are reduced,
/// nobody accesses this member's tensors any more.
bool SharedMemoryAllreduce::AdvanceInBuffers() {
  const Slice shard = ShardOf(my_index(), batch_->count);
  if (at_ < shard.begin + shard.count) {
    ReduceBlock();
  } else if (reduced_ < end_) {
    slots_->Publish(Stage::kReduced, ++reduced_);
    slots_->RingPeers();
  } else if (slots_->AllReached(Stage::kReduced, end_)) {
    slots_->Publish(Stage::kConsumed, ++consumed_);
    slots_->RingPeers();
    set().Count(Counter::kInPlaceBytes, batch_->count * SizeOf(batch_->dtype));
  } else {
    return false;
  }
  return true;
}

void SharedMemoryAllreduce::ReduceBlock() {
  const std::span<const Segment> segments = batch_->segments;
  while (at_ >= segment_begin_ + segments[segment_].count) {
    segment_begin_ += segments[segment_++].count;
  }
  const Slice shard = ShardOf(my_index(), batch_->count);
  const int64_t offset = at_ - segment_begin_;
  const int64_t count =
      std::min({block_, shard.begin + shard.count - at_, segments[segment_].count - offset});
  for (int member = 0; member < members(); ++member) {
    tensors_[static_cast<size_t>(member)] =
        set().memory.At(Offsets(member)[segment_]) + offset * SizeOf(batch_->dtype);
  }
  ReduceTensors(count);
  at_ += count;
}

/// Into the own tensor, which may be one of the sources, and from there to all others; of another
/// wire type, by way of scratch memory, where all contributions have been rounded to it.
void SharedMemoryAllreduce::ReduceTensors(int64_t count) {
  const bool rounds = wire_ != batch_->dtype;
  std::byte* free = set().scratch.data();
  const auto where = [&](int member) {
    std::byte* const tensor = tensors_[static_cast<size_t>(member)];
    if (!rounds) return tensor;
    kernels().Pack(free, wire_, tensor, batch_->dtype, count, prescale_);
    return std::exchange(free, free + block_ * wire_bytes_);
  };
  std::byte* const result = rounds ? free : tensors_[static_cast<size_t>(my_index())];
  kernels().Reduce(result, CpuCollective::Sources(where), count, spec_);
  for (std::byte* const tensor : tensors_) {
    if (tensor != result) kernels().Unpack(tensor, batch_->dtype, result, wire_, count);
  }
}

/// The latest stage that is possible goes first: what was just written is still in the cache.
bool SharedMemoryAllreduce::AdvanceSharded() {
  if (consumed_ < reduced_ && slots_->AllReached(Stage::kReduced, consumed_ + 1)) {
    CopyResultOut();
    slots_->Publish(Stage::kConsumed, ++consumed_);
    if (has_longest_chunks_ && my_index() == 0) TimeChunk();
  } else if (reduced_ < packed_ && slots_->AllReached(Stage::kPacked, reduced_ + 1, present_)) {
    ReduceShard();
    slots_->Publish(Stage::kReduced, ++reduced_);
  } else if (packed_ < end_ && SlotIsFree()) {
    PackChunk();
    slots_->Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_->RingPeers();
  return true;
}

bool SharedMemoryAllreduce::AdvanceOneShot() {
  if (packed_ < end_) {
    if (!SlotIsFree()) return false;
    if (contributes_) PackSlice(slots_->Slot(my_index(), packed_), {0, batch_->count});
    slots_->Publish(Stage::kPacked, ++packed_);
  } else {
    if (!slots_->AllReached(Stage::kPacked, packed_, present_)) return false;
    ReduceWholeBatch();
    slots_->Publish(Stage::kReduced, ++reduced_);
    slots_->Publish(Stage::kConsumed, ++consumed_);
  }
  slots_->RingPeers();
  return true;
}

/// Packs what peers will read of this member's contribution: all of it but the own shard, unless
/// that has to be cast or scaled first.
void SharedMemoryAllreduce::PackChunk() {
  if (!contributes_) return;
  std::byte* slot = slots_->Slot(my_index(), packed_);
  const int64_t count = ChunkCount(packed_);
  if (!ReadsInput()) return PackSlice(slot, {0, count});
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
  std::byte* slot = slots_->Slot(my_index(), reduced_);
  const int64_t block = kInCacheBytes / wire_bytes_;
  reduce_cursor_.Skip(shard.begin);
  for (int64_t at = shard.begin; at < end;) {
    Run run;
    run.count = std::min(block, end - at);
    if (ReadsInput()) run = reduce_cursor_.Next(run.count);
    ReduceRun(slot + at * wire_bytes_, at, run);
    at += run.count;
  }
  reduce_cursor_.Skip(count - end);
}

/// Reduces elements from `at` on into the own slot; and into the tensor, if `own` says where.
void SharedMemoryAllreduce::ReduceRun(std::byte* to, int64_t at, const Run& own) {
  const bool streams = StreamsSlots();
  std::byte* result = streams ? set().scratch.data() : to;
  // Without streaming `result` may be this member's own source in its slot, which Reduce allows
  // where both begin at the same element.
  kernels().Reduce(result, Sources(reduced_, at, own.in), own.count, spec_);
  if (own.out != nullptr) kernels().Unpack(own.out, wire_, result, wire_, own.count);
  if (streams) kernels().Stream(to, result, own.count * wire_bytes_);
}

/// Copies (P-1)/P of the chunk from peers' slots; the own shard only where the reduction could not
/// write it to the tensor. Each member begins with its own shard and goes round: so they do not all
/// fetch the same lines from the same core at the same time.
void SharedMemoryAllreduce::CopyResultOut() {
  SegmentCursor begin = out_cursor_;
  out_cursor_.Skip(ShardOf(my_index(), ChunkCount(consumed_)).begin);
  CopyShardsOut(out_cursor_, my_index(), members());
  CopyShardsOut(begin, 0, my_index());
}

void SharedMemoryAllreduce::CopyShardsOut(SegmentCursor& cursor, int from, int end) {
  const int64_t count = ChunkCount(consumed_);
  for (int member = from; member < end; ++member) {
    const Slice shard = ShardOf(member, count);
    if (member == my_index() && ReadsInput()) {
      cursor.Skip(shard.count);  // ReduceRun did it
    } else {
      UnpackRuns(kernels(), *batch_, cursor,
                 slots_->Slot(member, consumed_) + shard.begin * wire_bytes_, shard.count);
    }
  }
}

void SharedMemoryAllreduce::ReduceWholeBatch() {
  for (int64_t at = 0; at < batch_->count;) {
    const int64_t block = kInCacheBytes / wire_bytes_;
    const Run run = out_cursor_.Next(std::min(block, batch_->count - at));
    if (run.out != nullptr) {
      const std::byte* const own = ReadsInput() ? run.in : nullptr;
      ReduceInto(run.out, set().scratch.data(), Sources(reduced_, at, own), run.count);
    }
    at += run.count;
  }
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryAllreduce() {
  return std::make_unique<SharedMemoryAllreduce>();
}

}  // namespace farandole
