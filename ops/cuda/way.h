// How the batches of one process set run on the GPU: over NCCL (ops/nccl) or staged through host
// memory (ops/staged).
#pragma once

#include <memory>

#include "ops/data_plane.h"

namespace farandole {

/// One set's way, driven by the CUDA plane: Connect until kDone, then Begin and Step batch by
/// batch. At most one batch is begun and not launched; several may be launched and not over.
///
/// Thread safety: the holder of the engine lock, whose current device is the lane's. Nothing
/// blocks. Lifetime: the lane outlives it. The destructor may wait, briefly, for the device.
class CudaWay {
 public:
  virtual ~CudaWay() = default;
  /// "nccl" or "staged": for messages.
  virtual const char* name() const = 0;
  /// Brings the connection up: kMoved, kWaiting, kDone or kFailed.
  virtual Progress Connect() = 0;
  /// Takes a checked batch; it stays valid until launched.
  /// @return Unimplemented for what this way cannot run, alike on all members.
  virtual Status Begin(const Batch& batch) = 0;
  /// kMoved, kWaiting, kLaunched or kFailed. Awaits `batch.ready` in the stream just before
  /// reading.
  virtual Progress Step() = 0;
  /// Of the batch launched last.
  virtual std::shared_ptr<DeviceEvent> end() const = 0;
  /// An error that came to light after a launch, or OK. Cheap: called at every look for an end.
  virtual Status Check() = 0;
  /// Gives everything up, also what is launched, so that streams do not wait for peers any more.
  virtual void Abandon() = 0;
};

}  // namespace farandole
