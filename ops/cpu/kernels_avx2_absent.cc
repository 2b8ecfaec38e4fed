// Stands in for kernels_avx2.cc on processors other than x86-64.
#include "ops/cpu/targets.h"

namespace farandole {

const CpuKernels* Avx2CpuKernels() { return nullptr; }

}  // namespace farandole
