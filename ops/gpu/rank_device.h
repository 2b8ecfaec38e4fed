// The GPU that a rank works on: that of its first CUDA tensor, loaded no earlier; and what users'
// streams on it wait for.
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
class RankDevice {
 public:
  using Loader = std::function<Result<std::shared_ptr<DeviceRuntime>>()>;

  /// @param load           Brings the process's GPU runtime; called once, when a device is wanted.
  ///                       Empty: there are no GPUs for this rank.
  /// @param default_index  Of a rank that takes part before it had a tensor of its own: its local
  ///                       rank, taken modulo the number of devices.
  RankDevice(Loader load, int default_index);

  /// The device of a tensor. The first one becomes the rank's; from then on this takes no lock and
  /// asks the runtime nothing.
  /// @return InvalidArgument if there is no such device, or the rank has another one, naming both
  /// and the remedy; Unavailable if GPUs cannot be used here, saying why.
  Result<Device*> Use(int index);
  /// The rank's device. @return As Use.
  Result<Device*> Get();
  /// What is put into the stream, of device `index`, from now on comes after `end`, which may be
  /// nullptr.
  /// @return InvalidArgument if `end` is of another device, or the stream is being captured; as
  /// Use.
  Status MakeWait(const std::shared_ptr<DeviceEvent>& end, int index, StreamHandle stream);
  /// Versions of runtime and driver, for messages; empty before a device is used.
  std::string RuntimeVersion();

  /// This rank has work on a GPU. From then on only the engine thread runs the engine: a caller may
  /// itself be inside a library's call, and would keep others from steps that take longer.
  bool in_use() const { return in_use_.load(std::memory_order_relaxed); }
  void SetInUse() { in_use_.store(true, std::memory_order_relaxed); }

 private:
  Status Load();
  Result<Device*> Open(int index);

  std::mutex mutex_;
  const Loader load_;
  const int default_index_;
  std::shared_ptr<DeviceRuntime> runtime_;
  std::atomic<Device*> device_{nullptr};  // once chosen
  std::atomic<bool> in_use_{false};
};

}  // namespace farandole
