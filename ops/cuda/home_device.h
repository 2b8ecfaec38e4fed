// The one GPU that a rank works on: chosen by its first CUDA tensor, loaded no earlier.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Thread safety: any thread. Invariant: once chosen, the device stays. Lifetime: outlives the
/// plane and the engine that use it.
class HomeDevice {
 public:
  using Loader = std::function<Result<std::shared_ptr<DeviceRuntime>>()>;

  /// @param load           Brings the process's GPU runtime; called once, when a device is wanted.
  /// @param default_index  For a rank that takes part before it had a tensor of its own: its local
  ///                       rank, taken modulo the number of devices.
  HomeDevice(Loader load, int default_index);

  /// The device with this number, which becomes the rank's own.
  /// @return InvalidArgument if the rank already works on another one, naming both; Unavailable if
  /// GPUs cannot be used here, saying why.
  Result<Device*> Use(int index);
  /// The rank's own device; the default if none has been used yet.
  Result<Device*> Get();
  /// Versions of runtime and driver, for messages; empty before a device is used.
  std::string RuntimeVersion();

 private:
  Result<Device*> Open(int index);

  std::mutex mutex_;
  const Loader load_;
  const int default_index_;
  std::shared_ptr<DeviceRuntime> runtime_;
  Device* device_ = nullptr;
};

}  // namespace farandole
