// The one stream on which a rank's batches run on its GPU, and the events that mark their ends.
#pragma once

#include <memory>
#include <vector>

#include "core/counters.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Thread safety: the engine's baton holder. Lifetime: outlives the ways that use it; events handed
/// out outlive it.
class CudaLane {
 public:
  static Result<std::unique_ptr<CudaLane>> Create(Device& device, Counters* counters);
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  Device& device() const { return device_; }
  StreamHandle stream() const { return stream_; }
  /// What comes next in the stream waits for all of these.
  Status WaitFor(std::span<DeviceEvent* const> events);
  /// Records the end of what the stream holds now. Events nobody holds any more are used again.
  Result<std::shared_ptr<DeviceEvent>> MarkEnd();
  /// Enqueues the moves and counts launches and bytes.
  Status Move(std::span<const DeviceMove> moves, const MoveSpec& spec);

 private:
  CudaLane(Device& device, StreamHandle stream, Counters* counters);

  Device& device_;
  const StreamHandle stream_;
  Counters* const counters_;  // may be nullptr
  std::vector<std::shared_ptr<DeviceEvent>> ends_;
};

}  // namespace farandole
