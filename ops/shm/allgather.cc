// Allgather through shared slots.
#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// Each member writes one slice of its split to its slot, where all others read it; its own slice
/// goes from tensor to tensor.
class SharedMemoryAllgather final : public SharedMemoryVariableSize {
 protected:
  void Pack() override {
    CopyOwnSlice();
    WriteSlice(kForAll);
  }
  void Consume() override { CopyReceived(kForAll); }

 private:
  /// Index in a slot of the slice that all members read. Partition gives the same one to each.
  static constexpr int kForAll = 0;
};

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryAllgather() {
  return std::make_unique<SharedMemoryAllgather>();
}

}  // namespace farandole
