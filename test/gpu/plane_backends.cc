// GPU planes over the GPUs of this machine, ranks as threads: rows of the conformance suite.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/shm/plane.h"
#include "test/conformance/data_plane_backends.h"
#include "test/gpu/plug_in.h"

namespace farandole {
namespace {

/// Rank i sits on device i modulo `devices`.
PlaneBackend OverGpus(const char* name, int devices) {
  return {name, [devices](int ranks) {
            PlaneGroup group;
            std::vector<Doorbell*> bells;
            for (int rank = 0; rank < ranks; ++rank) {
              group.bells.push_back(std::make_unique<FutexDoorbell>());
              bells.push_back(group.bells.back().get());
            }
            const auto hub = std::make_shared<HeapMemory>(bells);
            for (int rank = 0; rank < ranks; ++rank) {
              group.planes.push_back(std::make_unique<MirrorPlane>(
                  GpuRuntime(), rank % devices,
                  std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()),
                  GpuPlaneHere(*group.bells[static_cast<size_t>(rank)])));
            }
            return group;
          }};
}

int CountDevices() {
  const Result<int> count = GpuRuntime()->Count();
  if (count.ok() && count.value() > 0) return count.value();
  std::fprintf(stderr, "no GPU is here: %s\n", count.status().ToString().c_str());
  std::exit(2);
}

}  // namespace

std::vector<PlaneParam> PlanesUnderTest() {
  const int devices = CountDevices();
  std::printf("%s, %d GPUs\n", GpuRuntime()->version().c_str(), devices);
  std::vector<PlaneParam> params = {{OverGpus("Solo", 1), 1, false}};
  // NCCL on a shared GPU takes processes: cudaFree waits for the kernels of all threads.
  for (const int ranks : {2, 3, 4}) params.push_back({OverGpus("StagedOneGpu", 1), ranks, false});
  if (const int ranks = std::min(devices, 4); ranks > 1 && NcclVersionHere() > 0) {
    params.push_back({OverGpus("NcclGpuPerRank", devices), ranks, true});
  }
  return params;
}

}  // namespace farandole
