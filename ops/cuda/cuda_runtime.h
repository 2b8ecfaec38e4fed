// DeviceRuntime over the CUDA runtime API: the inside of libfarandole_cuda.so.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/cuda/cuda_device.h"
#include "ops/device.h"

namespace farandole {

/// The GPUs that CUDA shows this process. Without a driver or a GPU, Count says Unavailable and
/// why.
///
/// Thread safety: any thread. No context is made on a device that nobody opened.
class CudaRuntime final : public DeviceRuntime {
 public:
  std::string version() const override;
  Result<int> Count() override;
  Result<Device*> Open(int index) override;

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;  // by index; nullptr until opened
};

std::shared_ptr<DeviceRuntime> MakeCudaRuntime();

}  // namespace farandole
