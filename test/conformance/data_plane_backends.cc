#include "test/conformance/data_plane_backends.h"

#include "ops/cpu/kernels.h"
#include "ops/local/local_plane.h"

namespace farandole {
namespace {

PlaneGroup MakeLocal(int ranks, LocalHub::Options options) {
  PlaneGroup group;
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  const auto hub = std::make_shared<LocalHub>(bells, options);
  for (int rank = 0; rank < ranks; ++rank) {
    group.planes.push_back(std::make_unique<LocalPlane>(hub, rank, BestCpuKernels()));
  }
  return group;
}

PlaneBackend Local() {
  return {"Local", [](int ranks) { return MakeLocal(ranks, LocalHub::Options()); }};
}

/// Two small slots: every tensor takes many chunks, and every chunk waits for a slot.
PlaneBackend LocalWithSmallSlots(const char* name, StorePolicy store_policy) {
  return {name, [store_policy](int ranks) {
            LocalHub::Options options;
            options.slots = 2;
            options.slot_bytes = 2048;
            options.store_policy = store_policy;
            return MakeLocal(ranks, options);
          }};
}

}  // namespace

std::vector<PlaneParam> BackendsInOneProcess() {
  std::vector<PlaneParam> params;
  for (const int ranks : {1, 2, 3, 4, 7}) params.push_back({Local(), ranks});
  params.push_back({LocalWithSmallSlots("LocalCached", StorePolicy::kCached), 5});
  for (const int ranks : {2, 5}) {
    params.push_back({LocalWithSmallSlots("LocalStreamed", StorePolicy::kStreamed), ranks});
  }
  return params;
}

}  // namespace farandole
