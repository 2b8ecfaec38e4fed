#include "ops/staged/staging.h"

namespace farandole {

Staging::Staging(CudaLane& lane, Counters* counters, int64_t slot_bytes)
    : lane_(lane), counters_(counters), slot_bytes_(slot_bytes) {}

Staging::~Staging() {
  for (const StagingSlot& slot : slots_) {
    const Result<bool> idle = IsIdle(slot);
    if (idle.ok() && idle.value()) {
      if (slot.device != nullptr) lane_.device().Free(slot.device);
      if (slot.pinned != nullptr) lane_.device().FreePinned(slot.pinned);
    } else if (counters_ != nullptr) {
      counters_->Add(Counter::kQuarantinedBytes, 2 * slot_bytes_);
    }
  }
}

Result<StagingSlot*> Staging::Get(int index) {
  StagingSlot& slot = slots_[static_cast<size_t>(index)];
  if (slot.used == nullptr) FARANDOLE_RETURN_IF_ERROR(Allocate(slot));
  return &slot;
}

Status Staging::Allocate(StagingSlot& slot) {
  const auto have = [&](std::byte*& memory, Result<void*> got) {
    if (got.ok()) memory = static_cast<std::byte*>(got.value());
    return got.status();
  };
  Device& device = lane_.device();
  if (slot.pinned == nullptr) {
    FARANDOLE_RETURN_IF_ERROR(have(slot.pinned, device.AllocatePinned(slot_bytes_)));
  }
  if (slot.device == nullptr) {
    FARANDOLE_RETURN_IF_ERROR(have(slot.device, device.Allocate(slot_bytes_)));
  }
  Result<std::shared_ptr<DeviceEvent>> event = device.CreateEvent();
  if (event.ok()) slot.used = event.value();
  return event.status();
}

Status Staging::Close(StagingSlot& slot) {
  FARANDOLE_RETURN_IF_ERROR(slot.used->Record(lane_.stream()));
  slot.recorded = true;
  slot.open = false;
  return {};
}

Result<bool> Staging::IsIdle(const StagingSlot& slot) const {
  if (slot.open) return false;
  if (!slot.recorded) return true;
  return slot.used->IsComplete();
}

}  // namespace farandole
