// Reducescatter over MPI.
#include <algorithm>

#include "ops/mpi/collective.h"

namespace farandole {
namespace {

/// Each rank sends every other one its slice of the input, and reduces its own slices from the
/// inboxes and its own tensor.
class MpiReducescatter final : public MpiVariableSize {
 protected:
  void BeforeSends(int64_t) override {}
  Status Reduce(int64_t chunk) override;
};

/// From the inboxes and the own tensor straight into the result, kInCacheBytes at a time, so that
/// the own contribution is cast and the result widened in the L1 cache.
Status MpiReducescatter::Reduce(int64_t chunk) {
  if (batch_->segments[0].out == nullptr) return Status();
  const MpiSlot& slot = set_->SlotOf(chunk);
  const Slice own = partition_.Sent(my_index(), chunk);
  const Slice slice = partition_.Received(my_index(), chunk);
  const bool widens = travel_ != batch_->dtype;
  for (int64_t at = 0; at < slice.count;) {
    const int64_t count = std::min(kInCacheBytes / element_bytes_, slice.count - at);
    const void* contribution = contributes_ ? In(own.begin + at) : nullptr;
    if (contributes_ && casts_) {
      // A rank sends no slice to itself and there are no results to send, so the position of that
      // slice in staging, and slot.result below, serve as scratch memory.
      std::byte* const packed = PackedSlice(my_index(), chunk);
      kernels().Pack(packed, travel_, contribution, batch_->dtype, count, prescale_);
      contribution = packed;
    }
    std::byte* const out = Out(slice.begin + at);
    std::byte* const result = widens ? slot.result : out;
    kernels().Reduce(result, Sources(slot, at, contribution), count, Reduction());
    if (widens) kernels().Unpack(out, batch_->dtype, result, travel_, count);
    at += count;
  }
  CountCopied(slice.count * element_bytes_);
  return Status();
}

}  // namespace

std::unique_ptr<MpiCollective> MakeMpiReducescatter() {
  return std::make_unique<MpiReducescatter>();
}

}  // namespace farandole
