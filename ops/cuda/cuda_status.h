// CUDA's errors as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/status.h"

namespace farandole {

/// OK, or "<call> on device <n> failed: <name> (<text>)"; after an error that CUDA answers every
/// later call with, it says that too. Takes the error off the record of the calling thread. That
/// record is this plug-in's own, since its CUDA runtime is: nobody else's error is lost.
/// @param call    What was called, with what a reader needs to know: "cudaMalloc of 512 bytes".
/// @param device  Its number, or -1 for a call that concerns none.
/// @return ResourceExhausted for want of memory, Unavailable where driver or device are missing,
/// else Internal.
Status CudaStatus(cudaError_t error, const std::string& call, int device = -1);
/// The same; the text is put together only on failure.
inline Status CudaStatus(cudaError_t error, const char* call, int device = -1) {
  return error == cudaSuccess ? Status() : CudaStatus(error, std::string(call), device);
}

}  // namespace farandole
