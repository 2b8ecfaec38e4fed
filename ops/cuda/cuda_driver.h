// The two functions of the CUDA driver that the runtime API has no equal for.
//
// Found in the libcuda.so.1 that the runtime itself opens; the plug-in is not linked to it and
// loads where there is none.
#pragma once

#include <cuda.h>

#include "core/status.h"

namespace farandole {

struct CudaDriver {
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
};

/// @return Unavailable if there is no driver, with the loader's text. Thread safety: any thread.
Result<CudaDriver> FindCudaDriver();

}  // namespace farandole
