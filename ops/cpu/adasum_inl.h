// Scalar products and linear combinations of two vectors.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_ADASUM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_ADASUM_INL_H
#undef FARANDOLE_OPS_CPU_ADASUM_INL_H
#else
#define FARANDOLE_OPS_CPU_ADASUM_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/loops.h"

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {

/// Partial sums, which the compiler spreads over as many vectors as the instruction set needs. How
/// many there are says in which order elements are added, and is therefore part of the result.
struct PartialSums {
  static constexpr int kLanes = 8;
  using Doubles __attribute__((vector_size(kLanes * sizeof(double)))) = double;

  /// `bytes` of each: kLanes elements, or fewer at the end.
  template <class T>
  HWY_INLINE void Add(const T* a, const T* b, size_t bytes) {
    using Elements __attribute__((vector_size(kLanes * sizeof(T)))) = T;
    Elements x{}, y{};
    std::memcpy(&x, a, bytes);
    std::memcpy(&y, b, bytes);
    const Doubles u = __builtin_convertvector(x, Doubles);
    const Doubles v = __builtin_convertvector(y, Doubles);
    ab += u * v;
    aa += u * u;
    bb += v * v;
  }

  Doubles ab{};
  Doubles aa{};
  Doubles bb{};
};

template <class T>
ScalarProducts SumProducts(const T* a, const T* b, int64_t count) {
  constexpr int64_t kLanes = PartialSums::kLanes;
  PartialSums partial;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) partial.Add(a + i, b + i, kLanes * sizeof(T));
  if (i < count) partial.Add(a + i, b + i, static_cast<size_t>(count - i) * sizeof(T));
  ScalarProducts sums;
  for (int lane = 0; lane < kLanes; ++lane) {
    sums.ab += partial.ab[lane];
    sums.aa += partial.aa[lane];
    sums.bb += partial.bb[lane];
  }
  return sums;
}

template <class T>
void CombineInto(T* a, const T* b, int64_t count, double p, double q) {
  FARANDOLE_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    a[i] = static_cast<T>(p * static_cast<double>(a[i]) + q * static_cast<double>(b[i]));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#endif  // per target
