// Reducescatter over messages.
#include <algorithm>

#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// Each rank sends every other one its slice of the input, and reduces its own slices from the
/// inboxes and its own tensor.
class P2pReducescatter final : public P2pVariableSize {
 protected:
  void BeforeSends(int64_t) override {}
  Status Reduce(int64_t chunk) override;
};

/// From the inboxes and the own tensor straight into the result, kInCacheBytes at a time, so that
/// the own contribution is cast and the result widened in the L1 cache.
Status P2pReducescatter::Reduce(int64_t chunk) {
  if (!slices_.TakesResult()) return Status();
  const P2pSlot& slot = set().SlotOf(chunk);
  const Slice own = slices_.Sent(my_index(), chunk);
  const Slice slice = slices_.Received(my_index(), chunk);
  for (int64_t at = 0; at < slice.count;) {
    const int64_t count = std::min(kInCacheBytes / wire_bytes_, slice.count - at);
    const void* contribution = contributes_ ? slices_.In(own.begin + at) : nullptr;
    if (contributes_ && casts_) {
      // A rank sends no slice to itself and there are no results to send, so the place of that
      // slice in staging, and slot.result below, serve as scratch memory.
      std::byte* const packed = PackedSlice(my_index(), chunk);
      kernels().Pack(packed, wire_, contribution, batch_->dtype, count, prescale_);
      contribution = packed;
    }
    ReduceInto(slices_.Out(slice.begin + at), slot.result, Sources(slot, at, contribution), count);
    at += count;
  }
  CountCopied(slice.count * wire_bytes_);
  return Status();
}

}  // namespace

std::unique_ptr<P2pCollective> MakeP2pReducescatter() {
  return std::make_unique<P2pReducescatter>();
}

}  // namespace farandole
