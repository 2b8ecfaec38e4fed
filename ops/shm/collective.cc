#include "ops/shm/collective.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr int64_t kStepBytes = 256 * 1024;  // after so many the engine relays messages
// Slices start at multiples of this, so that two of them never share a cache line.
constexpr int64_t kSliceAlign = 64;

}  // namespace

SharedMemoryMember::SharedMemoryMember(SharedSlots shared_slots, const SlotMemory& slot_memory,
                                       const CpuKernels& cpu_kernels, const Clock& steady,
                                       Counters* counts)
    : slots(std::move(shared_slots)),
      memory(slot_memory),
      kernels(cpu_kernels),
      clock(steady),
      counters(counts),
      scratch(static_cast<size_t>(kOneShotBytes)) {}

SharedMemoryCollective::SharedMemoryCollective(SharedMemoryMember& member,
                                               StorePolicyChooser chooser)
    : member_(member), slots_(member.slots), kernels_(member.kernels), chooser_(chooser) {
  static_assert(kInCacheBytes <= SharedMemoryMember::kOneShotBytes);
  present_.reserve(static_cast<size_t>(members()));
  sources_.resize(static_cast<size_t>(members()));
}

void SharedMemoryCollective::Begin(const Batch& batch) {
  batch_ = &batch;
  wire_ = TravelDType(batch);
  wire_bytes_ = SizeOf(wire_);
  spec_ = {wire_, batch.op, static_cast<int64_t>(batch.ranks.size()), batch.postscale};
  contributes_ = !IsAbsent(batch, batch.my_index);
  present_.clear();
  for (int i = 0; i < members(); ++i) {
    if (!IsAbsent(batch, i)) present_.push_back(i);
  }
  prescale_ = Reduces(batch.kind) ? batch.prescale : 1.0;
  // Reduce takes sources of the wire type only, so a value that is cast or scaled has to be stored
  // first.
  reads_input_ = contributes_ && wire_ == batch.dtype && prescale_ == 1.0;
  const auto own = std::lower_bound(present_.begin(), present_.end(), batch.my_index);
  own_source_ = static_cast<size_t>(own - present_.begin());
  chunk_ended_ns_ = 0;
  // Each kind has a chooser of its own, and the kind of the last batch may have recommended another
  // policy.
  if (my_index() == 0) RecommendStorePolicy();
  pack_cursor_ = out_cursor_ = SegmentCursor(batch.segments, batch.dtype);
  // Absent members and those that drop the result count every chunk, too, so that flags mean the
  // same chunk on all members in every later batch.
  first_ = packed_ = reduced_ = consumed_ = member_.chunks;
  end_ = member_.chunks = first_ + static_cast<uint64_t>(Prepare());
}

/// Works until about one chunk is moved, so that the engine can relay the control tree in between.
SharedMemoryCollective::State SharedMemoryCollective::Step() {
  int64_t budget = kStepBytes;
  bool moved = false;
  while (consumed_ < end_) {
    if (budget <= 0) return State::kMoved;
    if (!Advance()) return moved ? State::kMoved : State::kWaiting;
    if (!failure_.ok()) return State::kFailed;
    moved = true;
    budget -= step_bytes_;
  }
  return State::kDone;
}

int64_t SharedMemoryCollective::PrepareWholeSlots() {
  chunk_elements_ = slots_.layout().slot_bytes / wire_bytes_;
  step_bytes_ = std::min(batch_->count, chunk_elements_) * wire_bytes_;
  return (batch_->count + chunk_elements_ - 1) / chunk_elements_;
}

int64_t SharedMemoryCollective::ChunkCount(uint64_t chunk) const {
  const int64_t begin = static_cast<int64_t>(chunk - first_) * chunk_elements_;
  return std::min(chunk_elements_, batch_->count - begin);
}

/// A slot is written again only when every member has consumed the chunk that it held.
bool SharedMemoryCollective::SlotIsFree() {
  const uint64_t slots = static_cast<uint64_t>(slots_.layout().slots);
  return packed_ < slots || slots_.AllReached(Stage::kConsumed, packed_ + 1 - slots);
}

/// Non-temporal stores cannot cast, so values that change go through scratch memory in the L1
/// cache, kInCacheBytes at a time.
void SharedMemoryCollective::WriteSlot(std::byte* to, const Run& run, bool streamed) {
  if (!streamed) {
    return kernels_.Pack(to, wire_, run.in, batch_->dtype, run.count, prescale_);
  }
  if (reads_input_) return kernels_.Stream(to, run.in, run.count * wire_bytes_);
  const int64_t block = kInCacheBytes / wire_bytes_;
  std::byte* const scratch = member_.scratch.data();
  for (int64_t at = 0; at < run.count; at += block) {
    const int64_t count = std::min(block, run.count - at);
    const std::byte* from = run.in + at * SizeOf(batch_->dtype);
    kernels_.Pack(scratch, wire_, from, batch_->dtype, count, prescale_);
    kernels_.Stream(to + at * wire_bytes_, scratch, count * wire_bytes_);
  }
}

void SharedMemoryCollective::UnpackSlice(const std::byte* slot, Slice slice) {
  const int64_t end = slice.begin + slice.count;
  for (int64_t at = slice.begin; at < end;) {
    const Run run = out_cursor_.Next(end - at);
    if (run.out != nullptr) {
      kernels_.Unpack(run.out, batch_->dtype, slot + at * wire_bytes_, wire_, run.count);
    }
    at += run.count;
  }
}

std::span<const void* const> SharedMemoryCollective::Sources(uint64_t chunk, int64_t offset,
                                                             const std::byte* own) {
  for (size_t k = 0; k < present_.size(); ++k) {
    sources_[k] = slots_.Slot(present_[k], chunk) + offset * wire_bytes_;
  }
  // By member and not by arrival: the order of the sum decides its bits.
  if (own != nullptr) sources_[own_source_] = own;
  return std::span(sources_).first(present_.size());
}

/// Only chunks that follow one another in a batch are comparable: the first of a batch includes the
/// wait for peers, the last one may be short.
void SharedMemoryCollective::TimeChunk() {
  const int64_t now_ns = member_.clock.NowNs();
  if (chunk_ended_ns_ != 0 && consumed_ < end_) chooser_.OnChunk(now_ns - chunk_ended_ns_);
  chunk_ended_ns_ = now_ns;
  RecommendStorePolicy();
}

void SharedMemoryCollective::RecommendStorePolicy() {
  if (slots_.store_policy() != chooser_.policy()) slots_.RecommendStorePolicy(chooser_.policy());
}
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
