// A device's context, and the calling thread's current one as a scope.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status.h"
#include "ops/cuda/cuda_driver.h"

namespace farandole {

/// The primary context of one device: a value.
struct CudaContext {
  CudaDriver driver;
  CUcontext handle = nullptr;
  int device = -1;

  /// Makes the context if the device has none yet; what the thread's current context was, it stays.
  static Result<CudaContext> Create(int device);
};

/// Makes a context the calling thread's current one until the end of the scope. Also lets the
/// thread do what CUDA forbids while somebody else captures a graph (ask for events, allocate):
/// none of that is captured, and without leave it would break the capture.
///
/// The context is restored and not the device, because cudaSetDevice makes a context (since CUDA
/// 12) on a device that the thread may never have used.
class CudaScope {
 public:
  explicit CudaScope(const CudaContext& context);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

  const Status& status() const { return status_; }

 private:
  const CudaContext& context_;
  CUcontext before_ = nullptr;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  Status status_;
};

}  // namespace farandole
