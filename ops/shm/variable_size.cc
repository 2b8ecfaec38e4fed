#include "ops/shm/variable_size.h"

namespace farandole {
namespace {

/// Slices start at multiples of this, so that two of them never share a cache line.
constexpr int64_t kSliceAlign = 64;

}  // namespace

int64_t SharedMemoryVariableSize::Prepare() {
  // A slot holds one slice per member, so slices become shorter as the set grows. Rounded before
  // the division by the element size, because the alignment is in bytes.
  chunk_elements_ =
      slots_.layout().slot_bytes / members() / kSliceAlign * kSliceAlign / wire_bytes_;
  partition_.Reset(*batch_, chunk_elements_);
  const int64_t result_bytes = OutputCount(*batch_, batch_->segments[0]) * wire_bytes_;
  streams_out_ = result_bytes >= kLargeResultBytes;
  step_bytes_ = partition_.longest_slice() * wire_bytes_ * members();
  return partition_.chunks();
}

/// Consuming goes before packing, since peers wait for free slots. Only full chunks are timed: a
/// member's splits may be shorter than the longest, and its later chunks empty.
bool SharedMemoryVariableSize::Advance() {
  if (consumed_ < packed_ && slots_.AllReached(Stage::kPacked, consumed_ + 1, present_)) {
    if (consumed_ == first_) failure_ = CheckSizes();
    if (!failure_.ok()) return true;
    Consume();
    // Nobody waits for it here. It keeps the three flags at one number between batches.
    slots_.Publish(Stage::kReduced, ++reduced_);
    slots_.Publish(Stage::kConsumed, ++consumed_);
    const bool full = consumed_ - first_ <= static_cast<uint64_t>(partition_.full_chunks());
    if (full && my_index() == 0) TimeChunk();
  } else if (packed_ < end_ && SlotIsFree()) {
    if (contributes_) Pack();
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_.RingPeers();
  return true;
}

void SharedMemoryVariableSize::WriteSlice(int to) {
  const Slice slice = Sent(to, packed_);
  std::byte* const slot = slots_.Slot(my_index(), packed_);
  if (slice.count == 0) return;
  WriteSlot(slot + to * chunk_elements_ * wire_bytes_, {In(slice.begin), nullptr, slice.count},
            StreamsSlots());
}

void SharedMemoryVariableSize::CopyOwnSlice() {
  CopySlice(Received(my_index(), packed_), In(Sent(my_index(), packed_).begin));
}

/// Unpack from a type to itself is a copy through the cache; Stream is one past it, for results
/// that no cache holds.
void SharedMemoryVariableSize::CopySlice(Slice slice, const std::byte* from) {
  if (batch_->segments[0].out == nullptr || slice.count == 0) return;
  if (streams_out_) return kernels_.Stream(Out(slice.begin), from, slice.count * wire_bytes_);
  kernels_.Unpack(Out(slice.begin), wire_, from, wire_, slice.count);
}

Slice SharedMemoryVariableSize::Sent(int to, uint64_t chunk) const {
  return partition_.Sent(to, static_cast<int64_t>(chunk - first_));
}

Slice SharedMemoryVariableSize::Received(int from, uint64_t chunk) const {
  return partition_.Received(from, static_cast<int64_t>(chunk - first_));
}

const std::byte* SharedMemoryVariableSize::SliceInSlot(int member, uint64_t chunk,
                                                       int index) const {
  return slots_.Slot(member, chunk) + index * chunk_elements_ * wire_bytes_;
}

const std::byte* SharedMemoryVariableSize::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* SharedMemoryVariableSize::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

}  // namespace farandole
