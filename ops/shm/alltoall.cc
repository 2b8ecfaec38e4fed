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
 protected:
  void Pack() override;
  Status CheckSizes() const override;
  void Consume() override { CopyReceived(my_index()); }
};

void SharedMemoryAlltoall::Pack() {
  CopyOwnSlice();
  if (packed_ == first_) {
    // Before kPacked of this chunk is published, which hands the table over together with the slot.
    std::ranges::copy(batch_->sends, slots_->Sizes(my_index(), first_).begin());
  }
  for (int to = 0; to < members(); ++to) {
    if (to != my_index()) WriteSlice(to);
  }
}

Status SharedMemoryAlltoall::CheckSizes() const {
  const auto me = static_cast<size_t>(my_index());
  for (size_t from = 0; from < batch_->receives.size(); ++from) {
    const int64_t sent = slots_->Sizes(static_cast<int>(from), first_)[me];
    if (sent == batch_->receives[from]) continue;
    return UnlikeSplits(*batch_, static_cast<int>(from), std::to_string(sent * wire_bytes_));
  }
  return {};
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryAlltoall() {
  return std::make_unique<SharedMemoryAlltoall>();
}

}  // namespace farandole
