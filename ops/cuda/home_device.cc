#include "ops/cuda/home_device.h"

#include <string>
#include <utility>

namespace farandole {

HomeDevice::HomeDevice(Loader load, int default_index)
    : load_(std::move(load)), default_index_(default_index) {}

Result<Device*> HomeDevice::Use(int index) {
  std::lock_guard lock(mutex_);
  if (device_ == nullptr) return Open(index);
  if (device_->info().index == index) return device_;
  return InvalidArgument("a tensor is on CUDA device " + std::to_string(index) +
                         ", but this rank works on device " +
                         std::to_string(device_->info().index) +
                         " since its first CUDA tensor; use one device per rank");
}

Result<Device*> HomeDevice::Get() {
  std::lock_guard lock(mutex_);
  if (device_ != nullptr) return device_;
  return Open(-1);
}

std::string HomeDevice::RuntimeVersion() {
  std::lock_guard lock(mutex_);
  return runtime_ == nullptr ? std::string() : runtime_->version();
}

// Under mutex_. A negative index: the default.
Result<Device*> HomeDevice::Open(int index) {
  if (runtime_ == nullptr) {
    Result<std::shared_ptr<DeviceRuntime>> loaded = load_();
    if (!loaded.ok()) return loaded.status();
    runtime_ = std::move(loaded).value();
  }
  if (index < 0) {
    Result<int> count = runtime_->Count();
    if (!count.ok()) return count.status();
    if (count.value() == 0) return Unavailable("this process sees no CUDA device");
    index = default_index_ % count.value();
  }
  Result<Device*> opened = runtime_->Open(index);
  if (opened.ok()) device_ = opened.value();
  return opened;
}

}  // namespace farandole
