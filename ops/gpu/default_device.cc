#include "ops/gpu/default_device.h"

#include <utility>

namespace farandole {

DefaultDevice::DefaultDevice(Loader load, int default_index)
    : load_(std::move(load)), default_index_(default_index) {}

Result<Device*> DefaultDevice::Use(int index) {
  Device* const known = device_.load(std::memory_order_acquire);
  if (known != nullptr && known->info().index == index) return known;
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(Load());
  Device* const mine = device_.load(std::memory_order_relaxed);
  if (mine == nullptr) return Open(index);
  if (mine->info().index == index) return mine;
  return InvalidArgument("a tensor is on CUDA device " + std::to_string(index) +
                         ", but this rank works on device " + std::to_string(mine->info().index) +
                         "; a rank has one GPU, so start one process per GPU, or copy the tensor "
                         "to that device");
}

Result<Device*> DefaultDevice::Get() {
  if (Device* const known = device_.load(std::memory_order_acquire)) return known;
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(Load());
  if (Device* const mine = device_.load(std::memory_order_relaxed)) return mine;
  Result<int> count = runtime_->Count();
  if (!count.ok()) return count.status();
  if (count.value() == 0) return Unavailable("this process sees no CUDA device");
  return Open(default_index_ % count.value());
}

std::string DefaultDevice::RuntimeVersion() {
  std::lock_guard lock(mutex_);
  return runtime_ == nullptr ? std::string() : runtime_->version();
}

// Under mutex_.
Status DefaultDevice::Load() {
  if (runtime_ != nullptr) return {};
  Result<std::shared_ptr<DeviceRuntime>> loaded = load_();
  if (!loaded.ok()) return loaded.status();
  runtime_ = std::move(loaded).value();
  return {};
}

// Under mutex_.
Result<Device*> DefaultDevice::Open(int index) {
  Result<Device*> opened = runtime_->Open(index);
  if (opened.ok()) device_.store(opened.value(), std::memory_order_release);
  return opened;
}

}  // namespace farandole
