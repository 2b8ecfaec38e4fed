#include "test/conformance/data_plane_cuda_backends.h"

#include <memory>
#include <string>
#include <utility>

#include "ops/local/local_plane.h"
#include "test/planes/cuda_on_fake.h"

namespace farandole {
namespace {

PlaneGroup MakeStaged(int ranks, int64_t staging_slot_bytes) {
  PlaneGroup group;
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  const auto hub = std::make_shared<LocalHub>(bells);
  for (int rank = 0; rank < ranks; ++rank) {
    CudaOnFake::Options options;
    options.bus_id = std::to_string(rank);
    options.staging_slot_bytes = staging_slot_bytes;
    group.planes.push_back(std::make_unique<CudaOnFake>(
        std::make_unique<LocalPlane>(hub, rank, BestCpuKernels()), std::move(options)));
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
