// Reductions that add up in float: each vector is loaded from all sources, combined, finished and
// stored once, in registers.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_REDUCE_FLOATS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_REDUCE_FLOATS_INL_H
#undef FARANDOLE_OPS_CPU_REDUCE_FLOATS_INL_H
#else
#define FARANDOLE_OPS_CPU_REDUCE_FLOATS_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <span>

#include "hwy/highway.h"
#include "ops/cpu/elements_inl.h"
#include "ops/cpu/halves_inl.h"

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {

HWY_INLINE FloatVec Combined(Sum, FloatVec a, FloatVec b) { return hn::Add(a, b); }
HWY_INLINE FloatVec Combined(Product, FloatVec a, FloatVec b) { return hn::Mul(a, b); }
HWY_INLINE FloatVec Combined(Min, FloatVec a, FloatVec b) {
  return hn::IfThenElse(hn::Or(hn::Lt(b, a), hn::IsNaN(b)), b, a);
}
HWY_INLINE FloatVec Combined(Max, FloatVec a, FloatVec b) {
  return hn::IfThenElse(hn::Or(hn::Gt(b, a), hn::IsNaN(b)), b, a);
}

HWY_INLINE FloatVec Finished(Keep, FloatVec v) { return v; }
HWY_INLINE FloatVec Finished(const DivideAndScale& finish, FloatVec v) {
  const FloatVec divisor = hn::Set(Floats(), static_cast<float>(finish.divisor));
  return hn::Mul(hn::Div(v, divisor), hn::Set(Floats(), static_cast<float>(finish.factor)));
}

/// dst[i] = T(finish(op_k(sources[k][i]))), T = float or a half; dst may be one of the sources.
template <class Op, class T, class Finish>
void ReduceFloats(T* dst, std::span<const void* const> sources, int64_t count,
                  const Finish& finish) {
  const void* const* const from = sources.data();
  const size_t source_count = sources.size();
  ForEachVector(count, [=](int64_t at, auto vector) HWY_ATTR {
    FloatVec acc = vector.Load(static_cast<const T*>(from[0]) + at);
    for (size_t k = 1; k < source_count; ++k) {
      acc = Combined(Op(), acc, vector.Load(static_cast<const T*>(from[k]) + at));
    }
    vector.Store(Finished(finish, acc), dst + at);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#endif  // per target
