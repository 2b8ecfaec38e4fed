// Finds the kernel for a move. Implemented by the .cu files; the rest of the plug-in is plain C++.
#pragma once

#include "core/types.h"

namespace farandole {

/// Functions for cudaLaunchKernel; the one parameter is a SmallMoveTable or a LargeMoveTable. The
/// small one may be missing.
struct MoveKernels {
  const void* small = nullptr;
  const void* large = nullptr;
};

MoveKernels KernelsForCopies();
/// Both types floating.
MoveKernels KernelsForFloats(DType from, DType to);
/// Both types integers.
MoveKernels KernelsForIntegers(DType from, DType to);

}  // namespace farandole
