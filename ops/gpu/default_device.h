// The GPU that a rank works on: that of its first CUDA tensor, loaded no earlier.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Thread safety: any thread. Invariant: once chosen, the device stays. Lifetime: outlives the
/// plane and the engine that use it.
class DefaultDevice {
 public:
  using Loader = std::function<Result<std::shared_ptr<DeviceRuntime>>()>;

  /// @param load           Brings the process's GPU runtime; called once, when a device is wanted.
  /// @param default_index  Of a rank that takes part before it had a tensor of its own: its local
  ///                       rank, taken modulo the number of devices.
  DefaultDevice(Loader load, int default_index);

  /// The device of a tensor. The first one becomes the rank's; from then on this takes no lock and
  /// asks the runtime nothing.
  /// @return InvalidArgument if there is no such device, or the rank has another one, naming both
  /// and the remedy; Unavailable if GPUs cannot be used here, saying why.
  Result<Device*> Use(int index);
  /// The rank's device. @return As Use.
  Result<Device*> Get();
  /// Versions of runtime and driver, for messages; empty before a device is used.
  std::string RuntimeVersion();

 private:
  Status Load();
  Result<Device*> Open(int index);

  std::mutex mutex_;
  const Loader load_;
  const int default_index_;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::atomic<Device*> device_{nullptr};  // once chosen
};

}  // namespace farandole
