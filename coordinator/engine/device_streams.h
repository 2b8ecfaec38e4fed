// The engine's dealings with streams of a GPU: what comes before an operation, and what after it.
#pragma once

#include <atomic>
#include <memory>
#include <span>

#include "coordinator/engine/operation.h"
#include "core/status.h"
#include "ops/device.h"
#include "ops/gpu/default_device.h"

namespace farandole {

/// Thread safety: any thread. Lifetime: `gpu` (nullptr: there is none) outlives it.
class DeviceStreams {
 public:
  explicit DeviceStreams(DefaultDevice* gpu) : gpu_(gpu) {}

  /// Marks in each producer how far it must have come before the operation reads. By the thread
  /// that has claimed it.
  /// @return InvalidArgument if a producer is being captured, on another device than the rank's,
  /// missing or superfluous; Unavailable if there is no GPU to be used.
  Status RecordReady(Operation& operation, const Vote& vote,
                     std::span<const ProducerStream> producers);
  /// What is put into the stream from now on comes after `end`, which may be nullptr.
  /// @return InvalidArgument if they are of different devices, or the stream is being captured.
  Status MakeWait(const std::shared_ptr<DeviceEvent>& end, const ProducerStream& stream);

  /// The GPU of a stream. @return Unavailable if there is none to be used.
  Result<Device*> GpuOf(const ProducerStream& stream);

  /// This rank has work on a GPU. From then on only the engine thread runs the engine: a caller may
  /// itself be inside a library's call, and would keep others from steps that take longer.
  bool in_use() const { return in_use_.load(std::memory_order_relaxed); }
  void SetInUse() { in_use_.store(true, std::memory_order_relaxed); }

 private:
  DefaultDevice* const gpu_;
  std::atomic<bool> in_use_{false};
};

}  // namespace farandole
