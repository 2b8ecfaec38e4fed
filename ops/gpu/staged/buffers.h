// Pinned and device memory through which tensors travel slice by slice, and the two streams of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/counters.h"
#include "ops/gpu/comm_stream.h"

namespace farandole {

/// Room for one slice on either side.
struct StagingSlot {
  std::byte* pinned = nullptr;
  std::byte* device = nullptr;
  std::shared_ptr<DeviceEvent> is_down;  ///< The last copy to the host is complete.
  std::shared_ptr<DeviceEvent> is_up;    ///< The last use of it by the other stream is complete.
  bool open = false;                     ///< Commands were enqueued that no event covers yet.
};

/// A few slots for all process sets of a GPU, made when first wanted and used again and again: one
/// staged batch runs at a time. Copies to and from the host have a stream each, since a GPU does
/// both at once.
///
/// Thread safety: the holder of the engine lock. Lifetime: the device outlives it. Memory that
/// commands may still touch is not freed, but leaked and counted.
class StagingBuffers {
 public:
  static constexpr int kSlots = 3;
  static constexpr int64_t kSlotBytes = int64_t{4} << 20;

  /// @param counters  May be nullptr.
  static Result<std::unique_ptr<StagingBuffers>> Create(Device& device, Counters* counters,
                                                        int64_t slot_bytes);
  ~StagingBuffers();
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  CommStream& down() { return *down_; }  ///< From the GPU to the host.
  CommStream& up() { return *up_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  /// @return ResourceExhausted if there is no memory.
  Result<StagingSlot*> Get(int index);
  /// No stream touches the slot any more.
  static Result<bool> IsIdle(const StagingSlot& slot);

 private:
  StagingBuffers(Device& device, Counters* counters, int64_t slot_bytes)
      : device_(device), counters_(counters), slot_bytes_(slot_bytes) {}

  Device& device_;
  Counters* const counters_;
  const int64_t slot_bytes_;
  std::unique_ptr<CommStream> down_, up_;
  std::array<StagingSlot, kSlots> slots_;
};

}  // namespace farandole
