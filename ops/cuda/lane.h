// The one stream on which a rank's batches run on its GPU, and the events that mark their ends.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/counters.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// How elements of `dtype` are moved without a look at them: every bit stays, of NaNs too.
MoveSpec BitwiseMove(DType dtype);

/// Thread safety: the holder of the engine lock. Lifetime: outlives the ways that use it; events
/// handed out outlive it.
class CudaLane {
 public:
  static Result<std::unique_ptr<CudaLane>> Create(Device& device, Counters* counters);
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  Device& device() const { return device_; }
  StreamHandle stream() const { return stream_; }
  /// What comes next in the stream waits for all of these, the inputs of a batch.
  Status WaitFor(std::span<DeviceEvent* const> events);
  /// The moment after which the inputs waited for last are there; nullptr if none were waited for
  /// since it was taken.
  std::shared_ptr<DeviceEvent> TakeInputs() { return std::move(inputs_); }
  /// Records the end of what the stream holds now. Events nobody holds any more are used again.
  Result<std::shared_ptr<DeviceEvent>> MarkEnd();
  /// Enqueues the moves and counts launches and bytes.
  Status Move(std::span<const DeviceMove> moves, const MoveSpec& spec);
  /// Enqueues a copy between device and pinned memory and counts its bytes.
  Status Copy(void* to, const void* from, int64_t size_bytes);

 private:
  CudaLane(Device& device, StreamHandle stream, Counters* counters);

  Result<std::shared_ptr<DeviceEvent>> RecordNow();

  Device& device_;
  const StreamHandle stream_;
  Counters* const counters_;                          // may be nullptr
  std::vector<std::shared_ptr<DeviceEvent>> events_;  // all there are; some in use outside
  std::shared_ptr<DeviceEvent> inputs_;
};

}  // namespace farandole
