// Floating types: casts and factors.
#include "ops/cuda/move_kernels.cuh"
#include "ops/cuda/move_kernels.h"
#include "ops/cuda/move_kinds.h"

namespace farandole {

MoveKernels KernelsForFloats(DType from, DType to) {
  MoveKernels found;
  VisitFloating(from, [&](auto in) {
    VisitFloating(to, [&](auto out) {
      using In = typename decltype(in)::Type;
      using Out = typename decltype(out)::Type;
      found = {CastKernelOf<In, Out, kFewMoves>(),
               CastKernelOf<In, Out, Device::kMovesPerLaunch>()};
    });
  });
  return found;
}

}  // namespace farandole
