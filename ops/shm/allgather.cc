// Allgather through shared slots.
#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// Each member writes one slice of its split to its slot, where all others read it; its own slice
/// goes from tensor to tensor.
class SharedMemoryAllgather final : public SharedMemoryVariableSize {
 public:
  using SharedMemoryVariableSize::SharedMemoryVariableSize;

 protected:
  void Pack() override {
    CopyOwnSlice();
    WriteSlice(kForAll);
  }
  void Consume() override {
    for (const int from : present_) {
      if (from == my_index()) continue;
      CopySlice(Received(from, consumed_), SliceInSlot(from, consumed_, kForAll));
    }
  }

 private:
  /// Index in a slot of the slice that all members read. Partition gives the same one to each.
  static constexpr int kForAll = 0;
};

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryAllgather(SharedMemoryMember& member,
                                                                  StorePolicyChooser chooser) {
  return std::make_unique<SharedMemoryAllgather>(member, chooser);
}

}  // namespace farandole
