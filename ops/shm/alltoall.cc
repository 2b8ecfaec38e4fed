// Alltoall through shared slots.
#include <algorithm>
#include <string>

#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// Each member writes one slice for every other member to its slot and copies its own from theirs.
/// Splits are known to a pair of members alone, so with its first chunk each member also publishes
/// what it sends to whom, and every receiver compares that with what it expects.
class SharedMemoryAlltoall final : public SharedMemoryVariableSize {
 public:
  using SharedMemoryVariableSize::SharedMemoryVariableSize;

 protected:
  void Pack() override;
  Status CheckSizes() const override;
  void Consume() override;
};

void SharedMemoryAlltoall::Pack() {
  CopyOwnSlice();
  if (packed_ == first_) {
    // Before kPacked of this chunk is published, which hands the table over together with the slot.
    std::ranges::copy(batch_->sends, slots_.Sizes(my_index(), first_).begin());
  }
  for (int to = 0; to < members(); ++to) {
    if (to != my_index()) WriteSlice(to);
  }
}

Status SharedMemoryAlltoall::CheckSizes() const {
  const auto me = static_cast<size_t>(my_index());
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

void SharedMemoryAlltoall::Consume() {
  const int me = my_index();
  for (const int from : present_) {
    if (from != me) CopySlice(Received(from, consumed_), SliceInSlot(from, consumed_, me));
  }
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryAlltoall(SharedMemoryMember& member,
                                                                 StorePolicyChooser chooser) {
  return std::make_unique<SharedMemoryAlltoall>(member, chooser);
}

}  // namespace farandole
