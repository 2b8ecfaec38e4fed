// CPU kernels for x86-64 with AVX2 and F16C. Fused multiply-add stays off: it would change bits.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

#include "core/half.h"
#include "core/types.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/targets.h"

// From here on, and only here: the headers above stay fit for every processor.
#pragma GCC target("avx2,f16c")

#define FARANDOLE_KERNEL_TARGET avx2

namespace farandole::avx2 {
namespace {

void Widen(float* __restrict dst, const Float16* __restrict src, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(half));
  }
  for (; i < n; ++i) dst[i] = ToFloat(src[i]);
}

void Narrow(Float16* __restrict dst, const float* __restrict src, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  for (; i < n; ++i) dst[i] = ToFloat16(src[i]);
}

void Widen(float* __restrict dst, const Bfloat16* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToFloat(src[i]);
}

void Narrow(Bfloat16* __restrict dst, const float* __restrict src, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToBfloat16(src[i]);
}

void StreamBytes(std::byte* dst, const std::byte* src, size_t size) {
  constexpr size_t kVector = sizeof(__m256i);
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % kVector;
  size_t i = misaligned == 0 ? 0 : kVector - misaligned;
  if (i > size) i = size;
  if (i > 0) std::memcpy(dst, src, i);
  for (; i + kVector <= size; i += kVector) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), value);
  }
  if (i < size) std::memcpy(dst + i, src + i, size - i);
  _mm_sfence();
}

}  // namespace
}  // namespace farandole::avx2

#include "ops/cpu/kernels_body.h"

namespace farandole {

const CpuKernels* Avx2CpuKernels() {
  static const avx2::Kernels kernels("avx2");
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has ? &kernels : nullptr;
}

}  // namespace farandole
