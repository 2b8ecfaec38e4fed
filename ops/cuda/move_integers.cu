// Integers: widths, divisors and factors.
#include "ops/cuda/move_kernels.cuh"
#include "ops/cuda/move_kernels.h"
#include "ops/cuda/move_kinds.h"

namespace farandole {

MoveKernels KernelsForIntegers(DType from, DType to) {
  MoveKernels found;
  VisitInteger(from, [&](auto in) {
    VisitInteger(to, [&](auto out) {
      using In = typename decltype(in)::Type;
      using Out = typename decltype(out)::Type;
      // One size: rare, so that the dearer launch weighs less than the longer build.
      found = {nullptr, CastKernelOf<In, Out, Device::kMovesPerLaunch>()};
    });
  });
  return found;
}

}  // namespace farandole
