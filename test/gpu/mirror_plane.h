// A GPU plane for tests that know host memory only: each batch is mirrored on the device, run
// there, and brought back, with a look at the bytes around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ops/data_plane.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

/// Makes the GPU plane under test over `gpu` and a CPU plane for it alone.
using MakePlaneOnDevice =
    std::function<std::unique_ptr<DataPlane>(RankDevice& gpu, DataPlane& host)>;

/// A batch's segments are copied to the device by a stream of its own, each at the same place
/// modulo 64 as on the host and between guard bytes, and the plane is told to wait for that stream:
/// a plane that reads too early is seen. Done means that results are on the host. A changed byte
/// that belongs to no result is Internal.
///
/// Thread safety and invariants: those of a plane; Step waits for the copy back.
class MirrorPlane final : public DataPlane {
 public:
  /// @param index  The device of this rank.
  /// @param host   What the plane under test stands on.
  MirrorPlane(std::shared_ptr<DeviceRuntime> runtime, int index, std::unique_ptr<DataPlane> host,
              const MakePlaneOnDevice& make);
  ~MirrorPlane() override;

  const char* name() const override { return plane_->name(); }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return plane_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { plane_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Operation;

  /// All memory at once and before the first batch: CUDA's allocating calls may wait for kernels,
  /// also for one of NCCL that waits for this very rank.
  Status Open();

  RankDevice gpu_;
  const int index_;
  Device* device_ = nullptr;  // once there was a batch
  StreamHandle stream_ = nullptr;
  std::byte* memory_ = nullptr;  // of the mirrors, on the device
  std::byte* images_ = nullptr;  // the same in pinned memory
  int64_t used_ = 0;
  const std::unique_ptr<DataPlane> host_;
  std::unique_ptr<DataPlane> plane_;
  std::vector<std::unique_ptr<Operation>> operations_;
};

}  // namespace farandole
