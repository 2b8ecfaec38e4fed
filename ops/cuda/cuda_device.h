// One GPU over the CUDA runtime API.
#pragma once

#include <memory>
#include <span>
#include <utility>

#include "ops/cuda/cuda_context.h"
#include "ops/device.h"

namespace farandole {

/// See Device.
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

}  // namespace farandole
