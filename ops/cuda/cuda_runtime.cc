#include "ops/cuda/cuda_runtime.h"

#include <cuda_runtime_api.h>

#include "ops/cuda/cuda_driver.h"
#include "ops/cuda/cuda_status.h"

namespace farandole {
namespace {

/// 13000 -> "13.0"
std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string CudaRuntime::version() const {
  int runtime = 0;
  int driver = 0;
  // Neither needs a device; 0 is no driver.
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    (void)cudaGetLastError();
  }
  return "CUDA runtime " + VersionText(runtime) + ", " +
         (driver == 0 ? "no driver" : "driver " + VersionText(driver));
}

Result<int> CudaRuntime::Count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) {
    (void)cudaGetLastError();
    return 0;
  }
  if (error == cudaErrorInsufficientDriver) {
    (void)cudaGetLastError();
    const Status missing = FindCudaDriver().status();
    if (!missing.ok()) return missing;
    return Unavailable("the NVIDIA driver is too old for farandole's CUDA: " + version() +
                       "; update the driver, or build farandole with an older CUDA toolkit");
  }
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(error, "cudaGetDeviceCount"));
  return count;
}

Result<Device*> CudaRuntime::Open(int index) {
  const Result<int> count = Count();
  if (!count.ok()) return count.status();
  if (index < 0 || index >= count.value()) {
    return InvalidArgument("CUDA device " + std::to_string(index) +
                           " is not there; this process has " + std::to_string(count.value()) +
                           " devices, numbered from 0");
  }
  const std::lock_guard lock(mutex_);
  devices_.resize(static_cast<size_t>(count.value()));
  std::unique_ptr<CudaDevice>& device = devices_[static_cast<size_t>(index)];
  if (device == nullptr) {
    Result<std::unique_ptr<CudaDevice>> created = CudaDevice::Create(index);
    if (!created.ok()) return created.status();
    device = std::move(created).value();
  }
  return static_cast<Device*>(device.get());
}

std::shared_ptr<DeviceRuntime> MakeCudaRuntime() { return std::make_shared<CudaRuntime>(); }

}  // namespace farandole
