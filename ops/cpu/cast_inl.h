// Casting and scaling in one pass, where each vector is loaded, changed and stored once; and copies
// past the cache.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_CAST_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_CAST_INL_H
#undef FARANDOLE_OPS_CPU_CAST_INL_H
#else
#define FARANDOLE_OPS_CPU_CAST_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/half.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "ops/cpu/elements_inl.h"
#include "ops/cpu/halves_inl.h"

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {

/// Elements per block where one vector will not do; its floats stay in the L1 cache.
inline constexpr int64_t kCastBlock = 1024;

/// v * first * second, rounded to float after each.
struct TimesTwice {
  float first = 1.0f;
  float second = 1.0f;
  HWY_INLINE FloatVec operator()(FloatVec v) const {
    return hn::Mul(hn::Mul(v, hn::Set(Floats(), first)), hn::Set(Floats(), second));
  }
};
struct Times {
  float factor = 1.0f;
  HWY_INLINE FloatVec operator()(FloatVec v) const { return hn::Mul(v, hn::Set(Floats(), factor)); }
};
struct Unchanged {
  HWY_INLINE FloatVec operator()(FloatVec v) const { return v; }
};
struct Quieted {
  HWY_INLINE FloatVec operator()(FloatVec v) const { return QuietNan(v); }
};

/// to[i] = To(change(float(from[i]))); `to` may be `from`. To and From are float or a half.
template <class To, class From, class Change>
void Cast(To* to, const From* from, int64_t count, const Change& change) {
  ForEachVector(count, [=](int64_t at, auto vector)
                           HWY_ATTR { vector.Store(change(vector.Load(from + at)), to + at); });
}

/// to[i] = Half(prescale * from[i]), rounded to Half once.
template <class Half>
void PackHalf(Half* to, const float* from, int64_t count, double prescale) {
  Cast(to, from, count, Times{static_cast<float>(prescale)});
}
template <class Half>
void PackHalf(Half* to, const double* from, int64_t count, double prescale) {
  float block[kCastBlock];
  for (int64_t begin = 0; begin < count; begin += kCastBlock) {
    const int64_t n = HWY_MIN(kCastBlock, count - begin);
    for (int64_t i = 0; i < n; ++i) block[i] = RoundToOdd(Scaled(from[begin + i], prescale));
    Cast(to + begin, block, n, Unchanged());
  }
}

inline void UnpackHalf(float* to, const Float16* from, int64_t count) {
  Cast(to, from, count, Unchanged());
}
inline void UnpackHalf(float* to, const Bfloat16* from, int64_t count) {
  Cast(to, from, count, Quieted());
}
template <class Half>
void UnpackHalf(double* to, const Half* from, int64_t count) {
  float block[kCastBlock];
  for (int64_t begin = 0; begin < count; begin += kCastBlock) {
    const int64_t n = HWY_MIN(kCastBlock, count - begin);
    Cast(block, from + begin, n, Unchanged());
    for (int64_t i = 0; i < n; ++i) to[begin + i] = static_cast<double>(block[i]);
  }
}

/// to[i] = postscale * (prescale * from[i]) in T's precision; `to` may be `from`.
template <class T>
void ScaleAs(T* to, const T* from, int64_t count, double prescale, double postscale) {
  if constexpr (kIsHalf<T>) {
    Cast(to, from, count, TimesTwice{static_cast<float>(prescale), static_cast<float>(postscale)});
  } else {
    FARANDOLE_INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < count; ++i) to[i] = Scaled(Scaled(from[i], prescale), postscale);
  }
}

/// CpuKernels::Stream. An instruction set without such stores copies.
inline void StreamBytes(std::byte* to, const std::byte* from, int64_t size) {
  const hn::ScalableTag<uint8_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) % lanes;
  int64_t at = misaligned == 0 ? 0 : HWY_MIN(lanes - misaligned, size);
  if (at > 0) std::memcpy(to, from, static_cast<size_t>(at));
  for (; at + lanes <= size; at += lanes) {
    const auto* in = reinterpret_cast<const uint8_t*>(from + at);
    const auto value = hn::LoadU(d, in);
    hn::Stream(value, d, reinterpret_cast<uint8_t*>(to + at));
  }
  if (at < size) std::memcpy(to + at, from + at, static_cast<size_t>(size - at));
  hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#endif  // per target
