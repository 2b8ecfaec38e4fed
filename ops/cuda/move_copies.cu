// Copies and identities: bytes as they are.
#include "ops/cuda/move_kernels.cuh"
#include "ops/cuda/move_kernels.h"

namespace farandole {

MoveKernels KernelsForCopies() {
  return {reinterpret_cast<const void*>(&CopyKernel<kFewMoves>),
          reinterpret_cast<const void*>(&CopyKernel<Device::kMovesPerLaunch>)};
}

}  // namespace farandole
