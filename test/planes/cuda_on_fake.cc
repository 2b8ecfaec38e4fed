#include "test/planes/cuda_on_fake.h"

#include <utility>
#include <vector>

namespace farandole {
namespace {

std::shared_ptr<FakeDeviceRuntime> MakeRuntime(const CudaOnFake::Options& options) {
  constexpr int64_t kMemory = int64_t{1} << 34;
  std::vector<DeviceInfo> infos = {{0, "fake GPU", options.bus_id, kMemory}};
  if (!options.second_bus_id.empty()) {
    infos.push_back({1, "fake GPU", options.second_bus_id, kMemory});
  }
  return std::make_shared<FakeDeviceRuntime>(std::move(infos));
}

}  // namespace

CudaOnFake::CudaOnFake(std::unique_ptr<DataPlane> host, Options options)
    : runtime_(MakeRuntime(options)), gpus_([this] { return Load(); }, 0), host_(std::move(host)) {
  CudaPlaneParts parts;
  parts.options.gpus = &gpus_;
  parts.options.host = host_.get();
  parts.options.counters = &counters_;
  parts.options.log = options.log;
  parts.options.host_name = "here";
  parts.options.share_gpu = options.share_gpu;
  parts.options.nccl_library = options.nccl_library;
  if (options.nccl == nullptr) {
    plane_ = MakeCudaPlane(parts.options);
    return;
  }
  parts.nccl = std::move(options.nccl);
  parts.staging_slot_bytes = options.staging_slot_bytes;
  plane_ = MakeCudaPlane(std::move(parts));
}

Result<std::shared_ptr<DeviceRuntime>> CudaOnFake::Load() {
  ++loads_;
  if (!failure_.ok()) return failure_;
  return std::shared_ptr<DeviceRuntime>(runtime_);
}

}  // namespace farandole
