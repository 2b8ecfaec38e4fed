#include "test/conformance/data_plane_cuda_backends.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ops/shm/plane.h"
#include "test/planes/cuda_on_fake.h"

namespace farandole {
namespace {

/// Of one rank; its number does not matter.
using MakeOptions = std::function<CudaOnFake::Options()>;

PlaneGroup MakeGroup(int ranks, const MakeOptions& make_options) {
  PlaneGroup group;
  std::vector<Doorbell*> bells;
  for (int rank = 0; rank < ranks; ++rank) {
    group.bells.push_back(std::make_unique<FutexDoorbell>());
    bells.push_back(group.bells.back().get());
  }
  const auto hub = std::make_shared<HeapMemory>(bells);
  for (int rank = 0; rank < ranks; ++rank) {
    CudaOnFake::Options options = make_options();
    options.bus_id = std::to_string(rank);
    options.wake = [bell = bells[static_cast<size_t>(rank)]] { bell->Ring(); };
    group.planes.push_back(std::make_unique<CudaOnFake>(
        std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()), std::move(options)));
  }
  return group;
}

CudaOnFake::Options Staged(int64_t slot_bytes) {
  CudaOnFake::Options options;
  options.staging_slot_bytes = slot_bytes;
  return options;
}

CudaOnFake::Options OverNccl() {
  CudaOnFake::Options options;
  options.nccl = nullptr;
  options.nccl_library = FARANDOLE_FAKE_NCCL;
  return options;
}

PlaneBackend Backend(const char* name, const MakeOptions& options) {
  return {name, [options](int ranks) { return MakeGroup(ranks, options); }};
}

}  // namespace

std::vector<PlaneParam> CudaBackendsOnFakes() {
  const PlaneBackend staged = Backend("CudaStaged", [] { return Staged(kStagingSlotBytes); });
  // Every tensor takes many slices, and every slice waits for a slot.
  const PlaneBackend small = Backend("CudaStagedSmallSlots", [] { return Staged(16 * 1024); });
  const PlaneBackend nccl = Backend("CudaFakeNccl", OverNccl);
  std::vector<PlaneParam> params;
  for (const int ranks : {1, 2, 3, 4}) params.push_back({staged, ranks});
  for (const int ranks : {1, 3}) params.push_back({small, ranks});
  for (const int ranks : {2, 3, 4}) params.push_back({nccl, ranks, /*any_order=*/true});
  return params;
}

}  // namespace farandole
