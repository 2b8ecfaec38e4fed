// Reducescatter through shared slots.
#include <algorithm>

#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// Each member writes one slice for every other member to its slot and reduces its own slices from
/// all slots, in rank order. Its own contribution is read from the tensor, unless it has to be
/// rounded to the wire type or scaled: then it is in the slot as well.
class SharedMemoryReducescatter final : public SharedMemoryVariableSize {
 protected:
  void Pack() override {
    for (int to = 0; to < members(); ++to) {
      if (to != my_index() || !ReadsInput()) WriteSlice(to);
    }
  }
  void Consume() override;
};

/// Reduces straight into the tensor, in blocks that stay in the L1 cache; where the wire type
/// differs, by way of scratch memory.
void SharedMemoryReducescatter::Consume() {
  if (!slices_.TakesResult()) return;
  const int me = my_index();
  const Slice own = slices_.Sent(me, Number(consumed_));
  const Slice slice = slices_.Received(me, Number(consumed_));
  for (int64_t at = 0; at < slice.count;) {
    const int64_t count = std::min(kInCacheBytes / wire_bytes_, slice.count - at);
    const std::byte* const input = ReadsInput() ? slices_.In(own.begin + at) : nullptr;
    ReduceInto(slices_.Out(slice.begin + at), set().scratch.data(),
               Sources(consumed_, me * chunk_elements_ + at, input), count);
    at += count;
  }
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryReducescatter() {
  return std::make_unique<SharedMemoryReducescatter>();
}

}  // namespace farandole
