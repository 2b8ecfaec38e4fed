// Broadcast through shared slots.
#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// The root copies each chunk into its slot; every other member copies it out of there. Members
/// other than the root write nothing; their flags only keep the chunk numbers of the set in step.
class SharedMemoryBroadcast final : public SharedMemoryCollective {
 protected:
  /// While one is read the root writes the next. Shorter ones would be read from the root's L1.
  int64_t Prepare() override { return PrepareChunks(1, kChunkBytes, kChunkBytes); }
  bool AdvanceStage() override;

 private:
  static constexpr int64_t kChunkBytes = 64 * 1024;

  void PackFromRoot();
};

/// Only packing waits: the root for a free slot, the others for the root's chunk. Nothing is
/// reduced, so all three flags are published at once.
bool SharedMemoryBroadcast::AdvanceStage() {
  const int root = batch_->root_index;
  const bool is_root = batch_->my_index == root;
  if (is_root ? !SlotIsFree() : !slots_->Reached(root, Stage::kPacked, packed_ + 1)) return false;
  if (is_root) {
    PackFromRoot();
  } else {
    UnpackRuns(kernels(), *batch_, out_cursor_, slots_->Slot(root, packed_), ChunkCount(packed_));
  }
  slots_->Publish(Stage::kPacked, ++packed_);
  slots_->Publish(Stage::kReduced, ++reduced_);
  slots_->Publish(Stage::kConsumed, ++consumed_);
  // The first ones wait for nobody: the slots are free, or the root has filled them.
  const bool keeps_pace = consumed_ - first_ > static_cast<uint64_t>(slots_->layout().slots);
  if (keeps_pace && has_longest_chunks_ && my_index() == 0) TimeChunk();
  slots_->RingPeers();
  return true;
}

/// From the root's inputs to its slot, and to its own outputs where these are other tensors.
void SharedMemoryBroadcast::PackFromRoot() {
  std::byte* slot = slots_->Slot(my_index(), packed_);
  const int64_t count = ChunkCount(packed_);
  for (int64_t at = 0; at < count;) {
    const Run run = pack_cursor_.Next(count - at);
    WriteSlot(slot + at * wire_bytes_, run, StreamsSlots());
    if (run.out != nullptr) kernels().Scale(run.out, run.in, batch_->dtype, run.count, 1.0, 1.0);
    at += run.count;
  }
}

}  // namespace

std::unique_ptr<SharedMemoryCollective> MakeSharedMemoryBroadcast() {
  return std::make_unique<SharedMemoryBroadcast>();
}

}  // namespace farandole
