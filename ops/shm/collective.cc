#include "ops/shm/collective.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr int64_t kStepBytes = 256 * 1024;  // after so many the engine relays messages
// Slices start at multiples of this, so that two of them never share a cache line.
constexpr int64_t kSliceAlign = 64;

}  // namespace

Status SharedMemorySet::Join() {
  if (members() == 1) return {};
  Result<std::shared_ptr<std::byte>> found = memory.Join(uid, ranks, my_index);
  if (!found.ok()) return found.status();
  joined = found.value();
  std::vector<Doorbell*> bells;
  for (const int rank : ranks) bells.push_back(memory.bell(rank));
  slots.emplace(joined.get(), memory.LayoutOf(ranks.size()), my_index, std::move(bells));
  agreement.emplace(slots->agreement(), members());
  scratch.resize(static_cast<size_t>(kScratchBytes));
  choosers.fill(StorePolicyChooser(memory.options().store_policy));
  // Peers may read the hint at once; fresh memory holds kCached.
  if (my_index == 0) slots->RecommendStorePolicy(choosers[0].policy());
  return {};
}

/// Peers go on reading this rank's slots, which is harmless; of its tensors they touch only those
/// in buffers.
void SharedMemoryCollective::Abandon() {
  const size_t bytes = set().memory.QuarantineBuffers();
  set().Count(Counter::kQuarantinedBytes, static_cast<int64_t>(bytes));
  CpuCollective::Abandon();
}

void SharedMemoryCollective::Begin() {
  static_assert(kInCacheBytes <= SharedMemorySet::kScratchBytes);
  slots_ = &*set().slots;
  chunk_ended_ns_ = 0;
  // Each kind has a chooser of its own, and the kind of the last batch may have recommended another
  // policy.
  if (my_index() == 0) RecommendStorePolicy();
  pack_cursor_ = out_cursor_ = SegmentCursor(batch_->segments, batch_->dtype);
  // Absent members and those that drop the result count every chunk, too, so that flags mean the
  // same chunk on all members in every later batch.
  first_ = packed_ = reduced_ = consumed_ = set().chunks;
  end_ = set().chunks = first_ + static_cast<uint64_t>(Prepare());
}

/// Works until about one chunk is moved, so that the engine can relay the control tree in between.
/// While it waits a peer's ring says when to go on.
Progress SharedMemoryCollective::Advance() {
  int64_t budget = kStepBytes;
  bool moved = false;
  while (consumed_ < end_) {
    if (budget <= 0) return Progress::Moved();
    if (!AdvanceStage()) return moved ? Progress::Moved() : Progress::Waiting();
    if (!failure_.ok()) break;
    moved = true;
    budget -= step_bytes_;
  }
  return Progress::Done();
}

int64_t SharedMemoryCollective::PrepareChunks(int64_t parts, int64_t least_bytes,
                                              int64_t most_bytes) {
  const int64_t row = parts * kSliceAlign;
  const int64_t spread = (batch_->count * wire_bytes_ + row - 1) / row * kSliceAlign;
  most_bytes = std::min(most_bytes, slots_->layout().slot_bytes);
  chunk_elements_ = std::min(std::max(spread, least_bytes), most_bytes) / wire_bytes_;
  has_longest_chunks_ = chunk_elements_ * wire_bytes_ >= most_bytes;
  step_bytes_ = std::min(batch_->count, chunk_elements_) * wire_bytes_;
  return (batch_->count + chunk_elements_ - 1) / chunk_elements_;
}

int64_t SharedMemoryCollective::ChunkCount(uint64_t chunk) const {
  const int64_t begin = static_cast<int64_t>(chunk - first_) * chunk_elements_;
  return std::min(chunk_elements_, batch_->count - begin);
}

/// A slot is written again only when every member has consumed the chunk that it held.
bool SharedMemoryCollective::SlotIsFree() {
  const uint64_t slots = static_cast<uint64_t>(slots_->layout().slots);
  return packed_ < slots || slots_->AllReached(Stage::kConsumed, packed_ + 1 - slots);
}

/// Non-temporal stores cannot cast, so values that change go through scratch memory in the L1
/// cache, kInCacheBytes at a time.
void SharedMemoryCollective::WriteSlot(std::byte* to, const Run& run, bool streamed) {
  if (!streamed) {
    return kernels().Pack(to, wire_, run.in, batch_->dtype, run.count, prescale_);
  }
  if (ReadsInput()) return kernels().Stream(to, run.in, run.count * wire_bytes_);
  const int64_t block = kInCacheBytes / wire_bytes_;
  std::byte* const scratch = set().scratch.data();
  for (int64_t at = 0; at < run.count; at += block) {
    const int64_t count = std::min(block, run.count - at);
    const std::byte* from = run.in + at * SizeOf(batch_->dtype);
    kernels().Pack(scratch, wire_, from, batch_->dtype, count, prescale_);
    kernels().Stream(to + at * wire_bytes_, scratch, count * wire_bytes_);
  }
}

std::span<const void* const> SharedMemoryCollective::Sources(uint64_t chunk, int64_t offset,
                                                             const std::byte* own) {
  return CpuCollective::Sources([&](int member) {
    const bool is_own = own != nullptr && member == my_index();
    return is_own ? own : slots_->Slot(member, chunk) + offset * wire_bytes_;
  });
}

/// Only chunks that follow one another in a batch are comparable: the first of a batch includes the
/// wait for peers, the last one may be short.
void SharedMemoryCollective::TimeChunk() {
  const int64_t now_ns = set().clock.NowNs();
  if (chunk_ended_ns_ != 0 && consumed_ < end_) chooser().OnChunk(now_ns - chunk_ended_ns_);
  chunk_ended_ns_ = now_ns;
  RecommendStorePolicy();
}

void SharedMemoryCollective::RecommendStorePolicy() {
  if (slots_->store_policy() != chooser().policy())
    slots_->RecommendStorePolicy(chooser().policy());
}

int64_t SharedMemoryVariableSize::Prepare() {
  // A slot holds one slice per member, so slices become shorter as the set grows. Rounded before
  // the division by the element size, because the alignment is in bytes.
  chunk_elements_ =
      slots_->layout().slot_bytes / members() / kSliceAlign * kSliceAlign / wire_bytes_;
  slices_.Begin(*batch_, chunk_elements_);
  step_bytes_ = slices_.longest_slice() * wire_bytes_ * members();
  return slices_.chunks();
}

/// Consuming goes before packing, since peers wait for free slots. Only full chunks are timed: a
/// member's splits may be shorter than the longest, and its later chunks empty.
bool SharedMemoryVariableSize::AdvanceStage() {
  if (consumed_ < packed_ && slots_->AllReached(Stage::kPacked, consumed_ + 1, present_)) {
    if (consumed_ == first_) failure_ = CheckSizes();
    if (!failure_.ok()) return true;
    Consume();
    // Nobody waits for it here. It keeps the three flags at one number between batches.
    slots_->Publish(Stage::kReduced, ++reduced_);
    slots_->Publish(Stage::kConsumed, ++consumed_);
    const bool full = consumed_ - first_ <= static_cast<uint64_t>(slices_.full_chunks());
    if (full && my_index() == 0) TimeChunk();
  } else if (packed_ < end_ && SlotIsFree()) {
    if (contributes_) Pack();
    slots_->Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_->RingPeers();
  return true;
}

void SharedMemoryVariableSize::WriteSlice(int to) {
  const Slice slice = slices_.Sent(to, Number(packed_));
  if (slice.count == 0) return;
  std::byte* const slot = slots_->Slot(my_index(), packed_);
  WriteSlot(slot + to * chunk_elements_ * wire_bytes_,
            {slices_.In(slice.begin), nullptr, slice.count}, StreamsSlots());
}

void SharedMemoryVariableSize::CopyReceived(int index) {
  for (const int from : present_) {
    if (from == my_index()) continue;
    slices_.Copy(kernels(), slices_.Received(from, Number(consumed_)),
                 slots_->Slot(from, consumed_) + index * chunk_elements_ * wire_bytes_);
  }
}

}  // namespace farandole
