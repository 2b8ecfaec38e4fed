// What a CUDA plane is made of besides its options: tests put their own in.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/cuda/cuda_plane.h"
#include "ops/cuda/nccl_source.h"
#include "ops/staged/staging.h"

namespace farandole {

struct CudaPlaneParts {
  CudaPlaneOptions options;
  std::shared_ptr<NcclSource> nccl;
  int64_t staging_slot_bytes = Staging::kSlotBytes;  ///< Equal on all ranks.
};

std::unique_ptr<DataPlane> MakeCudaPlane(CudaPlaneParts parts);

}  // namespace farandole
