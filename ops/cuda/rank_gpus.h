// The GPUs that a rank works on: one, as a rule, chosen by its first CUDA tensor and loaded no
// earlier.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// A GPU and its distance from the rank's home, the one it used first: 0 is home, 1 the device with
/// the next number. Ranks that work on several GPUs each mean those of one distance when they talk
/// of one tensor.
struct RankGpu {
  Device* device = nullptr;
  int distance = 0;
};

/// Thread safety: any thread. Invariant: once chosen, home stays. Lifetime: outlives the plane and
/// the engine that use it.
class RankGpus {
 public:
  using Loader = std::function<Result<std::shared_ptr<DeviceRuntime>>()>;

  /// @param load           Brings the process's GPU runtime; called once, when a device is wanted.
  /// @param default_index  Home of a rank that takes part before it had a tensor of its own: its
  ///                       local rank, taken modulo the number of devices.
  RankGpus(Loader load, int default_index);

  /// The device with this number. The first one used is home.
  /// @return InvalidArgument if there is no such device, or it is too far from home, naming both;
  /// Unavailable if GPUs cannot be used here, saying why.
  Result<RankGpu> Use(int index);
  /// The device at this distance from home, counted round where the numbers end. What a rank that
  /// never used it contributes to others' batches is on the same device as theirs, or any.
  /// @return As Use.
  Result<Device*> At(int distance);
  /// Versions of runtime and driver, for messages; empty before a device is used.
  std::string RuntimeVersion();

 private:
  Status Load();

  std::mutex mutex_;
  const Loader load_;
  const int default_index_;
  std::shared_ptr<DeviceRuntime> runtime_;
  int home_ = -1;  // not chosen yet
};

}  // namespace farandole
