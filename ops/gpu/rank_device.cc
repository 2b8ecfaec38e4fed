#include "ops/gpu/rank_device.h"

#include <utility>

namespace farandole {

RankDevice::RankDevice(Loader load, int default_index)
    : load_(std::move(load)), default_index_(default_index) {}

Result<Device*> RankDevice::Use(int index) {
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

Result<Device*> RankDevice::Get() {
  if (Device* const known = device_.load(std::memory_order_acquire)) return known;
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(Load());
  if (Device* const mine = device_.load(std::memory_order_relaxed)) return mine;
  Result<int> count = runtime_->Count();
  if (!count.ok()) return count.status();
  if (count.value() == 0) return Unavailable("this process sees no CUDA device");
  return Open(default_index_ % count.value());
}

Status RankDevice::MakeWait(const std::shared_ptr<DeviceEvent>& end, int index,
                            StreamHandle stream) {
  if (end == nullptr) return {};
  if (end->device() != index) {
    return InvalidArgument("the work is on CUDA device " + std::to_string(end->device()) +
                           "; expected a stream of it to wait, got one of device " +
                           std::to_string(index));
  }
  const Result<Device*> device = Use(index);
  if (!device.ok()) return device.status();
  const Result<bool> capturing = device.value()->IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (capturing.value()) {
    return InvalidArgument(
        "the stream that is to wait is being captured into a CUDA graph, which cannot hold what "
        "ranks negotiate; wait outside of the capture");
  }
  return end->MakeWait(stream);
}

std::string RankDevice::RuntimeVersion() {
  std::lock_guard lock(mutex_);
  return runtime_ == nullptr ? std::string() : runtime_->version();
}

// Under mutex_.
Status RankDevice::Load() {
  if (runtime_ != nullptr) return {};
  if (!load_) return Unavailable("this context has no GPUs");
  Result<std::shared_ptr<DeviceRuntime>> loaded = load_();
  if (!loaded.ok()) return loaded.status();
  runtime_ = std::move(loaded).value();
  return {};
}

// Under mutex_.
Result<Device*> RankDevice::Open(int index) {
  Result<Device*> opened = runtime_->Open(index);
  if (opened.ok()) device_.store(opened.value(), std::memory_order_release);
  return opened;
}

}  // namespace farandole
