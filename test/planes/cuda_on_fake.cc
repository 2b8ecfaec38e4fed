#include "test/planes/cuda_on_fake.h"

#include <utility>
#include <vector>

#include "ops/gpu/nccl/backend.h"

namespace farandole {
namespace {

std::shared_ptr<FakeDeviceRuntime> MakeRuntime(const std::string& bus_id) {
  std::vector<DeviceInfo> infos = {{0, "fake GPU", bus_id, int64_t{1} << 34}};
  return std::make_shared<FakeDeviceRuntime>(std::move(infos));
}

}  // namespace

CudaOnFake::CudaOnFake(std::unique_ptr<DataPlane> host, Options options)
    : runtime_(MakeRuntime(options.bus_id)),
      gpu_([this] { return Load(); }, 0),
      host_(std::move(host)) {
  GpuPlaneOptions plane;
  plane.device = &gpu_;
  plane.host = host_.get();
  plane.nccl = options.nccl != nullptr ? options.nccl
                                       : MakeNcclProvider(options.nccl_library, options.share_gpu);
  plane.staging_slot_bytes = options.staging_slot_bytes;
  plane.counters = &counters_;
  plane.log = options.log;
  plane.host_name = "here";
  plane.share_gpu = options.share_gpu;
  plane.wake = options.wake;
  plane_ = MakeGpuPlane(std::move(plane));
}

Result<std::shared_ptr<DeviceRuntime>> CudaOnFake::Load() {
  ++loads_;
  if (!failure_.ok()) return failure_;
  return std::shared_ptr<DeviceRuntime>(runtime_);
}

}  // namespace farandole
