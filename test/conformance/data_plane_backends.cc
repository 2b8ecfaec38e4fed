#include "test/conformance/data_plane_backends.h"

#include "ops/cpu/kernels.h"
#include "ops/local/local_plane.h"

namespace farandole {
namespace {

PlaneGroup MakeLocal(int ranks, LocalHub::Sizes sizes) {
  PlaneGroup group;
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  const auto hub = std::make_shared<LocalHub>(bells, sizes);
  for (int rank = 0; rank < ranks; ++rank) {
    group.planes.push_back(std::make_unique<LocalPlane>(hub, rank, BestCpuKernels()));
  }
  return group;
}

PlaneBackend Local() {
  return {"Local", [](int ranks) { return MakeLocal(ranks, LocalHub::Sizes()); }};
}

/// Two small slots: every tensor takes many chunks, and every chunk waits for a slot.
PlaneBackend LocalWithSmallSlots() {
  return {"LocalSmallSlots", [](int ranks) {
            LocalHub::Sizes sizes;
            sizes.slots = 2;
            sizes.slot_bytes = 2048;
            return MakeLocal(ranks, sizes);
          }};
}

}  // namespace

std::vector<PlaneParam> BackendsInOneProcess() {
  std::vector<PlaneParam> params;
  for (const int ranks : {1, 2, 3, 4, 7}) params.push_back({Local(), ranks});
  for (const int ranks : {2, 5}) params.push_back({LocalWithSmallSlots(), ranks});
  return params;
}

}  // namespace farandole
