#include "test/conformance/data_plane_backends.h"

#include "ops/cpu/kernels.h"
#include "ops/shm/host_memory.h"
#include "ops/shm/plane.h"

namespace farandole {
namespace {

PlaneGroup MakeSharedMemory(int ranks, SharedMemoryHub::Options options) {
  PlaneGroup group;
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  const auto hub = std::make_shared<SharedMemoryHub>(bells, options);
  for (int rank = 0; rank < ranks; ++rank) {
    group.planes.push_back(std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()));
  }
  return group;
}

/// As processes have it: each rank maps the file for itself, and nobody rings. No file: the tests
/// of the group fail.
PlaneGroup MakeHostMemory(int ranks) {
  PlaneGroup group;
  std::string address;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    const HostMemory::User user{rank, group.bells.back().get(), ranks};
    Result<std::shared_ptr<HostMemory>> memory =
        rank == 0 ? HostMemory::Create(user) : HostMemory::Open(address, user);
    if (!memory.ok()) return {};
    if (rank == 0) address = memory.value()->address();
    group.planes.push_back(
        std::make_unique<SharedMemoryPlane>(memory.value(), rank, BestCpuKernels()));
  }
  return group;
}

PlaneBackend SharedMemory() {
  return {"SharedMemory",
          [](int ranks) { return MakeSharedMemory(ranks, SharedMemoryHub::Options()); }};
}

/// Two small slots: every tensor takes many chunks, and every chunk waits for a slot.
PlaneBackend SharedMemoryWithSmallSlots(const char* name, StorePolicy store_policy) {
  return {name, [store_policy](int ranks) {
            SharedMemoryHub::Options options;
            options.slots = 2;
            options.slot_bytes = 2048;
            options.store_policy = store_policy;
            return MakeSharedMemory(ranks, options);
          }};
}

}  // namespace

std::vector<PlaneParam> BackendsInOneProcess() {
  std::vector<PlaneParam> params;
  for (const int ranks : {1, 2, 3, 4, 7}) params.push_back({SharedMemory(), ranks});
  for (const int ranks : {1, 2, 3, 4, 7}) params.push_back({{"HostMemory", MakeHostMemory}, ranks});
  params.push_back({SharedMemoryWithSmallSlots("SharedMemoryCached", StorePolicy::kCached), 5});
  for (const int ranks : {2, 5}) {
    params.push_back(
        {SharedMemoryWithSmallSlots("SharedMemoryStreamed", StorePolicy::kStreamed), ranks});
  }
  return params;
}

}  // namespace farandole
