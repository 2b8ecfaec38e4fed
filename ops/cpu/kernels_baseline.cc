// CPU kernels for the instruction set every build targets, and the choice between sets.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/half.h"
#include "core/types.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/targets.h"

#define FARANDOLE_KERNEL_TARGET baseline

namespace farandole::baseline {
namespace {

template <class Half>
void Widen(float* __restrict dst, const Half* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToFloat(src[i]);
}

void Narrow(Float16* __restrict dst, const float* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToFloat16(src[i]);
}

void Narrow(Bfloat16* __restrict dst, const float* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToBfloat16(src[i]);
}

void StreamBytes(std::byte* dst, const std::byte* src, size_t size) {
  if (size > 0) std::memcpy(dst, src, size);
}

}  // namespace
}  // namespace farandole::baseline

#include "ops/cpu/kernels_body.h"

namespace farandole {

const CpuKernels& BaselineCpuKernels() {
  static const baseline::Kernels kernels("baseline");
  return kernels;
}

const CpuKernels& BestCpuKernels() {
  static const CpuKernels* const best = [] {
    const CpuKernels* avx2 = Avx2CpuKernels();
    return avx2 != nullptr ? avx2 : &BaselineCpuKernels();
  }();
  return *best;
}

}  // namespace farandole
