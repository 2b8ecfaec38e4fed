// Reducescatter through shared slots.
#include <algorithm>

#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// Each member writes one slice for every other member to its slot and reduces its own slices from
/// all slots, in rank order. Its own contribution is read from the tensor, unless it has to be
/// rounded to the wire type or scaled: then it is in the slot as well.
class SharedMemoryReducescatter final : public SharedMemoryVariableSize {
 public:
  using SharedMemoryVariableSize::SharedMemoryVariableSize;

 protected:
  void Pack() override {
    for (int to = 0; to < members(); ++to) {
      if (to != my_index() || !reads_input_) WriteSlice(to);
    }
  }
  void Consume() override;
};

/// Reduces straight into the tensor, in blocks that stay in the L1 cache; where the wire type
/// differs, by way of scratch memory.
void SharedMemoryReducescatter::Consume() {
  if (batch_->segments[0].out == nullptr) return;
  const int me = my_index();
  const Slice own = Sent(me, consumed_);
  const Slice slice = Received(me, consumed_);
  const bool casts = wire_ != batch_->dtype;
  for (int64_t at = 0; at < slice.count;) {
    const int64_t count = std::min(kInCacheBytes / wire_bytes_, slice.count - at);
    const std::byte* const input = reads_input_ ? In(own.begin + at) : nullptr;
    std::byte* const out = Out(slice.begin + at);
    std::byte* const result = casts ? member_.scratch.data() : out;
    kernels_.Reduce(result, Sources(consumed_, me * chunk_elements_ + at, input), count, spec_);
    if (casts) kernels_.Unpack(out, batch_->dtype, result, wire_, count);
    at += count;
  }
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryReducescatter(SharedMemoryMember& member,
                                                                      StorePolicyChooser chooser) {
  return std::make_unique<SharedMemoryReducescatter>(member, chooser);
}

}  // namespace farandole
