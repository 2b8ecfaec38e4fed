// All batches of one of a rank's GPUs, in one line.
#pragma once

#include <memory>

#include "ops/cuda/cuda_plane_parts.h"

namespace farandole {

/// The part of a CUDA plane that one GPU is: `distance` says which (RankGpu). Its sets, lane,
/// staging memory and failures are its own.
std::unique_ptr<DataPlane> MakeCudaLine(CudaPlaneParts parts, int distance);

}  // namespace farandole
