// The instruction sets the CPU kernels may have been compiled for.
#pragma once

#include "ops/cpu/kernels.h"

namespace farandole {

/// Kernels for x86 with AVX2 and F16C; nullptr if this processor or this build has them not.
const CpuKernels* Avx2CpuKernels();

}  // namespace farandole
