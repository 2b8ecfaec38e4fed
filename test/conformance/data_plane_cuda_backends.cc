#include "test/conformance/data_plane_cuda_backends.h"

#include <utility>

#include "ops/cuda/cuda_plane_parts.h"
#include "ops/local/local_plane.h"
#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

class NoNccl final : public NcclSource {
 public:
  Result<NcclFound> Find() override { return Unavailable("a test takes it away"); }
  void AllowSharedGpus() override {}
  Result<std::string> MakeUniqueId() override { return Internal("not asked for"); }
  std::unique_ptr<CudaWay> MakeWay(NcclWayOptions) override { return nullptr; }
};

/// A CUDA plane with all that it stands on; host memory poses as that of a GPU of its own.
class OneRank final : public DataPlane {
 public:
  OneRank(int rank, std::unique_ptr<DataPlane> host, std::unique_ptr<NcclSource> nccl,
          int64_t staging_slot_bytes)
      : runtime_(std::make_shared<FakeDeviceRuntime>(
            std::vector<DeviceInfo>{{0, "fake", std::to_string(rank), int64_t{1} << 30}})),
        home_([this] { return std::shared_ptr<DeviceRuntime>(runtime_); }, 0),
        host_(std::move(host)) {
    CudaPlaneParts parts;
    parts.options.device = &home_;
    parts.options.host = host_.get();
    parts.options.host_name = "here";
    parts.nccl = std::move(nccl);
    parts.staging_slot_bytes = staging_slot_bytes;
    plane_ = MakeCudaPlane(std::move(parts));
  }

  const char* name() const override { return plane_->name(); }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return plane_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { plane_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override { return plane_->Start(batch); }

 private:
  const std::shared_ptr<FakeDeviceRuntime> runtime_;
  HomeDevice home_;
  const std::unique_ptr<DataPlane> host_;
  std::unique_ptr<DataPlane> plane_;
};

PlaneGroup MakeStaged(int ranks, int64_t staging_slot_bytes) {
  PlaneGroup group;
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  const auto hub = std::make_shared<LocalHub>(bells);
  for (int rank = 0; rank < ranks; ++rank) {
    group.planes.push_back(
        std::make_unique<OneRank>(rank, std::make_unique<LocalPlane>(hub, rank, BestCpuKernels()),
                                  std::make_unique<NoNccl>(), staging_slot_bytes));
  }
  return group;
}

}  // namespace

std::vector<PlaneParam> CudaBackendsOnFakes() {
  const PlaneBackend staged{"CudaStaged",
                            [](int ranks) { return MakeStaged(ranks, Staging::kSlotBytes); }};
  // Every tensor takes many pieces, and every piece waits for a slot.
  const PlaneBackend small{"CudaStagedSmallSlots",
                           [](int ranks) { return MakeStaged(ranks, 16 * 1024); }};
  std::vector<PlaneParam> params;
  for (const int ranks : {1, 2, 3, 4}) params.push_back({staged, ranks});
  for (const int ranks : {1, 3}) params.push_back({small, ranks});
  return params;
}

}  // namespace farandole
