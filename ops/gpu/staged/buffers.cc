#include "ops/gpu/staged/buffers.h"

#include <utility>

namespace farandole {

Result<std::unique_ptr<StagingBuffers>> StagingBuffers::Create(Device& device, Counters* counters,
                                                               int64_t slot_bytes) {
  std::unique_ptr<StagingBuffers> buffers(new StagingBuffers(device, counters, slot_bytes));
  for (std::unique_ptr<CommStream> StagingBuffers::*one :
       {&StagingBuffers::down_, &StagingBuffers::up_}) {
    Result<std::unique_ptr<CommStream>> stream = CommStream::Create(device, counters);
    if (!stream.ok()) return stream.status();
    buffers.get()->*one = std::move(stream).value();
  }
  return buffers;
}

StagingBuffers::~StagingBuffers() {
  for (const StagingSlot& slot : slots_) {
    const Result<bool> idle = IsIdle(slot);
    if (idle.ok() && idle.value()) {
      if (slot.device != nullptr) device_.Free(slot.device);
      if (slot.pinned != nullptr) device_.FreePinned(slot.pinned);
    } else if (counters_ != nullptr) {
      counters_->Add(Counter::kQuarantinedBytes, 2 * slot_bytes_);
    }
  }
}

Result<StagingSlot*> StagingBuffers::Get(int index) {
  StagingSlot& slot = slots_[static_cast<size_t>(index)];
  const auto keep = [](std::byte*& memory, Result<void*> got) {
    if (got.ok()) memory = static_cast<std::byte*>(got.value());
    return got.status();
  };
  if (slot.pinned == nullptr) {
    FARANDOLE_RETURN_IF_ERROR(keep(slot.pinned, device_.AllocatePinned(slot_bytes_)));
  }
  if (slot.device == nullptr) {
    FARANDOLE_RETURN_IF_ERROR(keep(slot.device, device_.Allocate(slot_bytes_)));
  }
  return &slot;
}

Result<bool> StagingBuffers::IsIdle(const StagingSlot& slot) {
  if (slot.open) return false;
  for (const std::shared_ptr<DeviceEvent>& event : {slot.is_down, slot.is_up}) {
    if (event == nullptr) continue;
    const Result<bool> complete = event->IsComplete();
    if (!complete.ok() || !complete.value()) return complete;
  }
  return true;
}

}  // namespace farandole
