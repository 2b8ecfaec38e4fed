// Allgather, reducescatter and alltoall: one slice for each member, in one round.
#include <algorithm>
#include <string>

#include "ops/shm/exchange.h"

namespace farandole {
namespace {

/// Slices start at multiples of this, so that two of them never share a cache line.
constexpr int64_t kSliceAlign = 64;

}  // namespace

void Exchange::BeginVariableSize() {
  const int members = slots_.layout().members;
  chunk_elements_ = slots_.layout().slot_bytes / members / kSliceAlign * kSliceAlign / wire_bytes_;
  partition_.Reset(*batch_, chunk_elements_);
  end_ = first_ + static_cast<uint64_t>(partition_.chunks());
  const int64_t result_bytes = OutputCount(*batch_, batch_->segments[0]) * wire_bytes_;
  streams_out_ = result_bytes >= kLargeResultBytes;
  step_bytes_ = partition_.longest_slice() * wire_bytes_ * members;
}

bool Exchange::AdvanceVariableSize() {
  if (consumed_ < packed_ && slots_.AllReached(Stage::kPacked, consumed_ + 1, present_)) {
    if (consumed_ == first_ && batch_->kind == OpKind::kAlltoall) failure_ = CheckSizes();
    if (!failure_.ok()) return true;
    TakeSlices();
    slots_.Publish(Stage::kReduced, ++reduced_);
    slots_.Publish(Stage::kConsumed, ++consumed_);
    const bool full = consumed_ - first_ <= static_cast<uint64_t>(partition_.full_chunks());
    if (full && slots_.my_index() == 0) TimeChunk();
  } else if (packed_ < end_ && SlotIsFree()) {
    if (contributes_) WriteSlices();
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_.RingPeers();
  return true;
}

/// What stays on this rank goes straight from tensor to tensor, unless it has to be rounded first.
void Exchange::WriteSlices() {
  const bool reduces = batch_->kind == OpKind::kReducescatter;
  if (!reduces) CopyOwnSlice();
  if (batch_->kind == OpKind::kAllgather) return WriteSlice(kForAll);
  if (batch_->kind == OpKind::kAlltoall && packed_ == first_) {
    std::ranges::copy(batch_->sends, slots_.Sizes(slots_.my_index(), first_).begin());
  }
  for (int to = 0; to < slots_.layout().members; ++to) {
    if (to != slots_.my_index() || (reduces && !reads_input_)) WriteSlice(to);
  }
}

void Exchange::WriteSlice(int to) {
  const Slice slice = Sent(to, packed_);
  std::byte* const slot = slots_.Slot(slots_.my_index(), packed_);
  if (slice.count == 0) return;
  WriteSlot(slot + to * chunk_elements_ * wire_bytes_, {In(slice.begin), nullptr, slice.count});
}

void Exchange::CopyOwnSlice() {
  const int me = slots_.my_index();
  CopySlice(Received(me, packed_), In(Sent(me, packed_).begin));
}

Status Exchange::CheckSizes() const {
  const auto me = static_cast<size_t>(slots_.my_index());
  for (size_t from = 0; from < batch_->receives.size(); ++from) {
    const int64_t sent = slots_.Sizes(static_cast<int>(from), first_)[me];
    if (sent == batch_->receives[from]) continue;
    const std::string rank = std::to_string(batch_->ranks[me]);
    return Internal("alltoall: rank " + std::to_string(batch_->ranks[from]) + " sends rank " +
                    rank + " " + std::to_string(sent * wire_bytes_) + " bytes, rank " + rank +
                    " expects " + std::to_string(batch_->receives[from] * wire_bytes_));
  }
  return {};
}

void Exchange::TakeSlices() {
  if (batch_->kind == OpKind::kReducescatter) return ReduceOwnSlice();
  const int me = slots_.my_index();
  const int place = batch_->kind == OpKind::kAllgather ? kForAll : me;
  for (const int from : present_) {
    if (from == me) continue;
    CopySlice(Received(from, consumed_),
              slots_.Slot(from, consumed_) + place * chunk_elements_ * wire_bytes_);
  }
}

void Exchange::CopySlice(Slice slice, const std::byte* from) {
  if (batch_->segments[0].out == nullptr || slice.count == 0) return;
  if (streams_out_) return kernels_.Stream(Out(slice.begin), from, slice.count * wire_bytes_);
  kernels_.Unpack(Out(slice.begin), wire_, from, wire_, slice.count);
}

/// From the slots, and from the own tensor, straight into the result.
void Exchange::ReduceOwnSlice() {
  if (batch_->segments[0].out == nullptr) return;
  const int me = slots_.my_index();
  const Slice own = Sent(me, consumed_);
  const Slice slice = Received(me, consumed_);
  const bool casts = wire_ != batch_->dtype;
  for (int64_t at = 0; at < slice.count;) {
    const int64_t count = std::min(kInCacheBytes / wire_bytes_, slice.count - at);
    const std::span<const void*> sources = Sources(consumed_, me * chunk_elements_ + at);
    if (reads_input_) sources[own_source_] = In(own.begin + at);
    std::byte* const out = Out(slice.begin + at);
    std::byte* const result = casts ? scratch_.data() : out;
    kernels_.Reduce(result, sources, count, spec_);
    if (casts) kernels_.Unpack(out, batch_->dtype, result, wire_, count);
    at += count;
  }
}

Slice Exchange::Sent(int to, uint64_t chunk) const {
  return partition_.Sent(to, static_cast<int64_t>(chunk - first_));
}

Slice Exchange::Received(int from, uint64_t chunk) const {
  return partition_.Received(from, static_cast<int64_t>(chunk - first_));
}

const std::byte* Exchange::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* Exchange::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

}  // namespace farandole
