// Pinned and device memory through which tensors travel piece by piece.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/counters.h"
#include "ops/cuda/lane.h"

namespace farandole {

/// Room for one piece on either side.
struct StagingSlot {
  std::byte* pinned = nullptr;
  std::byte* device = nullptr;
  std::shared_ptr<DeviceEvent> used;  ///< After the last command that touches the slot.
  bool recorded = false;              ///< `used` has a moment.
  bool open = false;                  ///< Commands were enqueued that `used` does not cover yet.
};

/// A few slots for all process sets of a lane, had when first wanted and used again and again: the
/// lane runs one staged batch at a time.
///
/// Thread safety: the holder of the engine lock. Lifetime: the lane outlives it. Memory that
/// commands may still touch is given up, not freed, and counted.
class Staging {
 public:
  static constexpr int kSlots = 3;
  static constexpr int64_t kSlotBytes = int64_t{4} << 20;

  /// @param counters  May be nullptr.
  Staging(CudaLane& lane, Counters* counters, int64_t slot_bytes = kSlotBytes);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  int64_t slot_bytes() const { return slot_bytes_; }
  /// @return ResourceExhausted if the memory cannot be had.
  Result<StagingSlot*> Get(int index);
  /// Say Open before enqueueing commands on the slot, Close after the last of them.
  void Open(StagingSlot& slot) { slot.open = true; }
  Status Close(StagingSlot& slot);
  /// Nothing in the stream touches the slot any more.
  Result<bool> IsIdle(const StagingSlot& slot) const;

 private:
  Status Allocate(StagingSlot& slot);

  CudaLane& lane_;
  Counters* const counters_;
  const int64_t slot_bytes_;
  std::array<StagingSlot, kSlots> slots_;
};

}  // namespace farandole
