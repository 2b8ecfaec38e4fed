// The CUDA runtime behind ops/device.h: thin wrappers, and the scopes that keep out of users'
// state.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "ops/device.h"

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

/// The two functions of the CUDA driver that the runtime API has no equal for: found in the
/// libcuda.so.1 that the runtime itself opens. The plug-in is not linked to it and loads where
/// there is none.
struct CudaDriver {
  decltype(&cuCtxGetCurrent) get_current = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
};

/// @return Unavailable if there is no driver, with the loader's text. Thread safety: any thread.
Result<CudaDriver> FindCudaDriver();

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

/// A cudaEvent_t without timing, which would make recording dearer.
class CudaEvent final : public DeviceEvent {
 public:
  /// @param context  Of the device whose streams it is recorded in.
  static Result<std::shared_ptr<DeviceEvent>> Create(const CudaContext& context);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  int device() const override { return context_.device; }
  Status Record(StreamHandle stream) override;
  Status MakeWait(StreamHandle stream) override;
  Result<bool> IsComplete() override;

 private:
  explicit CudaEvent(const CudaContext& context) : context_(context) {}

  const CudaContext context_;
  cudaEvent_t event_ = nullptr;
};

/// One GPU: see Device.
class CudaDevice final : public Device {
 public:
  /// Makes the device's context and loads the kernels. @return Internal or Unavailable with CUDA's
  /// text.
  static Result<std::unique_ptr<CudaDevice>> Create(int index);

  const DeviceInfo& info() const override { return info_; }
  Status MakeCurrent() override;
  Result<StreamHandle> CreateStream() override;
  void DestroyStream(StreamHandle stream) override;
  Result<std::shared_ptr<DeviceEvent>> CreateEvent() override;
  Result<bool> IsCapturing(StreamHandle stream) override;
  Result<void*> Allocate(int64_t size_bytes) override;
  void Free(void* memory) override;
  Result<void*> AllocatePinned(int64_t size_bytes) override;
  void FreePinned(void* memory) override;
  Status Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) override;
  Status Move(std::span<const DeviceMove> moves, const MoveSpec& spec, StreamHandle stream,
              int* launches) override;

 private:
  CudaDevice(const CudaContext& context, DeviceInfo info, int multiprocessors)
      : context_(context), info_(std::move(info)), multiprocessors_(multiprocessors) {}

  const CudaContext context_;
  const DeviceInfo info_;
  const int multiprocessors_;
};

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
