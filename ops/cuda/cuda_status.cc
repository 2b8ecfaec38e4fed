#include "ops/cuda/cuda_status.h"

namespace farandole {
namespace {

/// CUDA's documentation says of these that the process must be started again.
bool IsFinal(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

Code CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return Code::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return Code::kUnavailable;
    default:
      return Code::kInternal;
  }
}

}  // namespace

Status CudaStatus(cudaError_t error, const std::string& call, int device) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // the same error again, or an older one of ours already reported
  std::string text = call;
  if (device >= 0) text += " on device " + std::to_string(device);
  text +=
      " failed: " + std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
  if (IsFinal(error)) {
    text +=
        "; it may stem from any kernel run before, and this process cannot use the device again";
  }
  return {CodeOf(error), text};
}

}  // namespace farandole
