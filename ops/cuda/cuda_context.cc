#include "ops/cuda/cuda_context.h"

#include <string>

#include "ops/cuda/cuda_status.h"

namespace farandole {
namespace {

Status DriverStatus(CUresult result, const char* call, int device) {
  if (result == CUDA_SUCCESS) return {};
  return Internal(std::string(call) + " on device " + std::to_string(device) +
                  " failed: driver error " + std::to_string(static_cast<int>(result)));
}

/// The context of `device`, made current.
Result<CUcontext> EnterDevice(const CudaDriver& driver, int device) {
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device), "cudaSetDevice", device));
  // Before CUDA 12 the context came with the first call that needs it.
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaFree(nullptr), "making a context", device));
  CUcontext context = nullptr;
  FARANDOLE_RETURN_IF_ERROR(DriverStatus(driver.get_current(&context), "cuCtxGetCurrent", device));
  return context;
}

}  // namespace

Result<CudaContext> CudaContext::Create(int device) {
  const Result<CudaDriver> driver = FindCudaDriver();
  if (!driver.ok()) return driver.status();
  // The runtime starts the driver, which answers nothing before.
  int count = 0;
  FARANDOLE_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount"));
  CUcontext before = nullptr;
  FARANDOLE_RETURN_IF_ERROR(
      DriverStatus(driver.value().get_current(&before), "cuCtxGetCurrent", device));
  const Result<CUcontext> context = EnterDevice(driver.value(), device);
  FARANDOLE_RETURN_IF_ERROR(
      DriverStatus(driver.value().set_current(before), "cuCtxSetCurrent", device));
  if (!context.ok()) return context.status();
  return CudaContext{driver.value(), context.value(), device};
}

CudaScope::CudaScope(const CudaContext& context) : context_(context) {
  (void)cudaThreadExchangeStreamCaptureMode(&mode_);  // fails for a null pointer only
  status_ = DriverStatus(context.driver.get_current(&before_), "cuCtxGetCurrent", context.device);
  if (!status_.ok() || before_ == context.handle) return;
  status_ =
      DriverStatus(context.driver.set_current(context.handle), "cuCtxSetCurrent", context.device);
}

CudaScope::~CudaScope() {
  // Can fail only if the context was destroyed meanwhile; then there is nothing to go back to.
  if (before_ != context_.handle) (void)context_.driver.set_current(before_);
  (void)cudaThreadExchangeStreamCaptureMode(&mode_);
}

}  // namespace farandole
