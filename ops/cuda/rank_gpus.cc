#include "ops/cuda/rank_gpus.h"

#include <cstdlib>
#include <string>
#include <utility>

namespace farandole {

RankGpus::RankGpus(Loader load, int default_index)
    : load_(std::move(load)), default_index_(default_index) {}

Result<RankGpu> RankGpus::Use(int index) {
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(Load());
  const int home = home_ < 0 ? index : home_;
  if (std::abs(index - home) > kMaxGpuOffset) {
    return InvalidArgument("a tensor is on CUDA device " + std::to_string(index) +
                           ", but this rank began on device " + std::to_string(home) +
                           "; expected numbers that differ by at most " +
                           std::to_string(kMaxGpuOffset));
  }
  Result<Device*> opened = runtime_->Open(index);
  if (!opened.ok()) return opened.status();
  home_ = home;
  return RankGpu{opened.value(), index - home};
}

Result<Device*> RankGpus::At(int distance) {
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(Load());
  Result<int> count = runtime_->Count();
  if (!count.ok()) return count.status();
  if (count.value() == 0) return Unavailable("this process sees no CUDA device");
  const int home = home_ < 0 ? default_index_ % count.value() : home_;
  const int index = (home + distance) % count.value();
  Result<Device*> opened = runtime_->Open(index < 0 ? index + count.value() : index);
  if (opened.ok()) home_ = home;
  return opened;
}

std::string RankGpus::RuntimeVersion() {
  std::lock_guard lock(mutex_);
  return runtime_ == nullptr ? std::string() : runtime_->version();
}

// Under mutex_.
Status RankGpus::Load() {
  if (runtime_ != nullptr) return {};
  Result<std::shared_ptr<DeviceRuntime>> loaded = load_();
  if (loaded.ok()) runtime_ = std::move(loaded).value();
  return loaded.status();
}

}  // namespace farandole
