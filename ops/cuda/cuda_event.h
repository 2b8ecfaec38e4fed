// DeviceEvent over cudaEvent_t.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "ops/cuda/cuda_context.h"
#include "ops/device.h"

namespace farandole {

/// Without timing, which would make recording dearer.
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

}  // namespace farandole
