// A plane whose batches end in a stream: what an engine sees of a GPU, with the CPU doing the work.
#pragma once

#include <memory>
#include <vector>

#include "ops/data_plane.h"
#include "ops/device.h"

namespace farandole {

/// Wraps a plane. A batch awaits its inputs' events, runs on the wrapped plane, is then launched
/// with an end event in `stream`, and done once that is complete.
///
/// Thread safety: as the wrapped plane. Lifetime: owns it; device and stream outlive it.
class LaunchingPlane final : public DataPlane {
 public:
  LaunchingPlane(std::unique_ptr<DataPlane> inner, Device& device, StreamHandle stream);
  ~LaunchingPlane() override;

  const char* name() const override { return "launching"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Operation;

  const std::unique_ptr<DataPlane> inner_;
  Device& device_;
  const StreamHandle stream_;
  std::vector<std::unique_ptr<Operation>> operations_;
};

}  // namespace farandole
