// Vectors of 16-bit floats: core/half.h's conversions, lane by lane and bit by bit. Casting and
// scaling in one pass, where each vector is loaded, changed and stored once; and copies past the
// cache.
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

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Words = hn::Rebind<uint32_t, Floats>;   // a float's bits
using Halves = hn::Rebind<uint16_t, Floats>;  // as many 16-bit floats' bits as there are floats
using SignedWords = hn::Rebind<int32_t, Floats>;
using FloatVec = hn::Vec<Floats>;
using WordVec = hn::Vec<Words>;
using HalfVec = hn::Vec<Halves>;

HWY_INLINE WordVec Word(uint32_t value) { return hn::Set(Words(), value); }
HWY_INLINE WordVec WordsOf(FloatVec v) { return hn::BitCast(Words(), v); }

/// Words of at most 0xffff, each in half the room.
HWY_INLINE HalfVec LowHalves(WordVec words) {
  return hn::DemoteTo(Halves(), hn::BitCast(SignedWords(), words));
}

/// Where a < b; both below 2^31.
HWY_INLINE hn::Mask<Words> Below(WordVec a, WordVec b) {
  const SignedWords d;
  return hn::RebindMask(Words(), hn::Lt(hn::BitCast(d, a), hn::BitCast(d, b)));
}
HWY_INLINE hn::Mask<Words> IsNan(WordVec magnitude) { return Below(Word(0x7f800000u), magnitude); }

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3  // both have F16C

HWY_INLINE HalfVec FromFloats(Float16, FloatVec v) {
  return hn::BitCast(Halves(), hn::DemoteTo(hn::Rebind<hwy::float16_t, Floats>(), v));
}

HWY_INLINE FloatVec ToFloats(Float16, HalfVec v) {
  return hn::PromoteTo(Floats(), hn::BitCast(hn::Rebind<hwy::float16_t, Floats>(), v));
}

#else  // step by step as in core/half.h, which says why

HWY_INLINE HalfVec FromFloats(Float16, FloatVec v) {
  const WordVec bits = WordsOf(v);
  const WordVec sign = hn::And(hn::ShiftRight<16>(bits), Word(0x8000u));
  const WordVec magnitude = hn::And(bits, Word(0x7fffffffu));
  const WordVec rebased = hn::Sub(magnitude, Word(0x38000000u));
  const WordVec odd = hn::And(hn::ShiftRight<13>(rebased), Word(1));
  const WordVec normal = hn::ShiftRight<13>(hn::Add(hn::Add(rebased, Word(0xfffu)), odd));
  const FloatVec shifted = hn::Add(hn::BitCast(Floats(), magnitude), hn::Set(Floats(), 0.5f));
  const WordVec subnormal = hn::Sub(WordsOf(shifted), Word(0x3f000000u));
  const WordVec payload = hn::And(hn::ShiftRight<13>(magnitude), Word(0x3ffu));
  WordVec result = hn::IfThenElse(Below(magnitude, Word(0x38800000u)), subnormal, normal);
  result = hn::IfThenElse(Below(magnitude, Word(0x47800000u)), result, Word(0x7c00u));
  result = hn::IfThenElse(IsNan(magnitude), hn::Or(payload, Word(0x7e00u)), result);
  return LowHalves(hn::Or(sign, result));
}

HWY_INLINE FloatVec ToFloats(Float16, HalfVec v) {
  const WordVec bits = hn::PromoteTo(Words(), v);
  const WordVec sign = hn::ShiftLeft<16>(hn::And(bits, Word(0x8000u)));
  const WordVec magnitude = hn::And(bits, Word(0x7fffu));
  const WordVec shifted = hn::ShiftLeft<13>(magnitude);
  const WordVec normal = hn::Add(shifted, Word(0x38000000u));
  const FloatVec whole = hn::ConvertTo(Floats(), hn::BitCast(SignedWords(), magnitude));
  const WordVec subnormal = WordsOf(hn::Mul(whole, hn::Set(Floats(), 0x1p-24f)));
  const WordVec quiet = hn::IfThenElseZero(Below(Word(0x7c00u), magnitude), Word(0x400000u));
  const WordVec special = hn::Or(hn::Or(shifted, Word(0x7f800000u)), quiet);
  WordVec result = hn::IfThenElse(Below(magnitude, Word(0x400u)), subnormal, normal);
  result = hn::IfThenElse(Below(magnitude, Word(0x7c00u)), result, special);
  return hn::BitCast(Floats(), hn::Or(sign, result));
}

#endif

HWY_INLINE HalfVec FromFloats(Bfloat16, FloatVec v) {
  const WordVec bits = WordsOf(v);
  const WordVec upper = hn::ShiftRight<16>(bits);
  const WordVec odd = hn::And(upper, Word(1));
  const WordVec rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, Word(0x7fffu)), odd));
  const hn::Mask<Words> is_nan = hn::RebindMask(Words(), hn::IsNaN(v));
  return LowHalves(hn::IfThenElse(is_nan, hn::Or(upper, Word(0x40u)), rounded));
}

/// The same bits, 16 places up; other than by core/half.h, a signalling NaN stays one.
HWY_INLINE FloatVec ToFloats(Bfloat16, HalfVec v) {
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::PromoteTo(Words(), v)));
}

HWY_INLINE FloatVec QuietNan(FloatVec v) {
  const WordVec quiet = hn::IfThenElseZero(hn::RebindMask(Words(), hn::IsNaN(v)), Word(0x400000u));
  return hn::BitCast(Floats(), hn::Or(WordsOf(v), quiet));
}

/// A vector's worth of floats or halves in memory.
struct WholeVector {
  template <class Half>
  HWY_INLINE FloatVec Load(const Half* from) const {
    return ToFloats(Half(), hn::LoadU(Halves(), &from->bits));
  }
  HWY_INLINE FloatVec Load(const float* from) const { return hn::LoadU(Floats(), from); }

  template <class Half>
  HWY_INLINE void Store(FloatVec v, Half* to) const {
    hn::StoreU(FromFloats(Half(), v), Halves(), &to->bits);
  }
  HWY_INLINE void Store(FloatVec v, float* to) const { hn::StoreU(v, Floats(), to); }
};

/// Fewer than that: the rest of an array. The other lanes hold zeros.
struct PartOfVector {
  size_t count;

  template <class T>
  HWY_INLINE FloatVec Load(const T* from) const {
    T whole[hn::MaxLanes(Floats())] = {};
    std::memcpy(whole, from, count * sizeof(T));
    return WholeVector().Load(whole);
  }
  template <class T>
  HWY_INLINE void Store(FloatVec v, T* to) const {
    T whole[hn::MaxLanes(Floats())];
    WholeVector().Store(v, whole);
    std::memcpy(to, whole, count * sizeof(T));
  }
};

/// Calls run(at, WholeVector or PartOfVector) until `count` elements are passed.
template <class Run>
HWY_INLINE void ForEachVector(int64_t count, const Run& run) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Floats()));
  int64_t at = 0;
  for (; at + lanes <= count; at += lanes) run(at, WholeVector());
  if (at < count) run(at, PartOfVector{static_cast<size_t>(count - at)});
}

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
