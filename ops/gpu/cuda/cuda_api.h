// The CUDA runtime behind ops/device.h.
#pragma once

#include <cuda.h>

#include <memory>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// The two functions of the CUDA driver that the runtime API has no equal for: found in the
/// libcuda.so.1 that the runtime itself opens. The plug-in is not linked to it and loads where
/// there is none.
struct CudaDriver {
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
};

/// @return Unavailable if there is no driver, with the loader's text. Thread safety: any thread.
Result<CudaDriver> FindCudaDriver();

/// The GPUs that CUDA shows this process. Without a driver or a GPU, Count says Unavailable and
/// why. Every failure is "<call> on device <n> failed: <name> (<text>)"; after an error that CUDA
/// answers every later call with, it says that too.
///
/// Thread safety: any thread. No context is made on a device that nobody opened.
std::shared_ptr<DeviceRuntime> MakeCudaRuntime();

}  // namespace farandole
