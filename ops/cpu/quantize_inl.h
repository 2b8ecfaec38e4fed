// Blocks of 8-bit integers that share a scale: CpuKernels::Quantize and Dequantize.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_QUANTIZE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_QUANTIZE_INL_H
#undef FARANDOLE_OPS_CPU_QUANTIZE_INL_H
#else
#define FARANDOLE_OPS_CPU_QUANTIZE_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"
#include "ops/cpu/cast_inl.h"
#include "ops/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Bytes8 = hn::Rebind<int8_t, Floats>;  // as many as there are floats

/// Stores and loads a vector's worth of int8, or the first `count` of it.
HWY_INLINE void StoreBytes(WholeVector, hn::Vec<Bytes8> v, int8_t* to) {
  hn::StoreU(v, Bytes8(), to);
}
HWY_INLINE void StoreBytes(PartOfVector part, hn::Vec<Bytes8> v, int8_t* to) {
  int8_t whole[hn::MaxLanes(Floats())];
  hn::StoreU(v, Bytes8(), whole);
  std::memcpy(to, whole, part.count);
}
HWY_INLINE hn::Vec<Bytes8> LoadBytes(WholeVector, const int8_t* from) {
  return hn::LoadU(Bytes8(), from);
}
HWY_INLINE hn::Vec<Bytes8> LoadBytes(PartOfVector part, const int8_t* from) {
  int8_t whole[hn::MaxLanes(Floats())] = {};
  std::memcpy(whole, from, part.count);
  return hn::LoadU(Bytes8(), whole);
}

/// residual[i] = from[i] * factor + residual[i]. @return The largest magnitude of these, by its
/// bits: those of a NaN are larger than infinity's.
inline float AddToResidual(float* residual, const float* from, int64_t count, float factor) {
  WordVec most = Word(0);
  ForEachVector(count, [&, factor](int64_t at, auto vector) HWY_ATTR {
    const FloatVec scaled = hn::Mul(vector.Load(from + at), hn::Set(Floats(), factor));
    const FloatVec v = hn::Add(scaled, vector.Load(residual + at));
    vector.Store(v, residual + at);
    most = hn::Max(most, hn::And(WordsOf(v), Word(0x7fffffffu)));
  });
  uint32_t lanes[hn::MaxLanes(Words())];
  hn::StoreU(most, Words(), lanes);
  uint32_t bits = 0;
  for (size_t i = 0; i < hn::Lanes(Words()); ++i) bits = HWY_MAX(bits, lanes[i]);
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  return magnitude;
}

/// Takes q * scale, which is stored, out of the residual.
inline void RoundOff(int8_t* to, float* residual, int64_t count, float inverse, float scale) {
  ForEachVector(count, [=](int64_t at, auto vector) HWY_ATTR {
    const FloatVec v = vector.Load(residual + at);
    const auto q = hn::NearestInt(hn::Mul(v, hn::Set(Floats(), inverse)));
    StoreBytes(vector, hn::DemoteTo(Bytes8(), q), to + at);
    const FloatVec sent = hn::Mul(hn::ConvertTo(Floats(), q), hn::Set(Floats(), scale));
    vector.Store(hn::Sub(v, sent), residual + at);
  });
}

inline void QuantizeBlocks(std::byte* to, const float* from, float* residual, int64_t count,
                           float prescale) {
  for (int64_t at = 0; at < count; at += kQuantizedBlock) {
    const int64_t n = HWY_MIN(kQuantizedBlock, count - at);
    float* const left = residual + at;
    const float most = AddToResidual(left, from + at, n, prescale);
    const auto bytes = static_cast<size_t>(n);
    float scale = 0.0f;
    if (!(most < 0x1p127f)) {  // also NaN
      scale = std::numeric_limits<float>::quiet_NaN();
      std::memset(left, 0, bytes * sizeof(float));
      std::memset(to + sizeof scale, 0, bytes);
    } else if (most < 0x1p-100f) {
      std::memset(to + sizeof scale, 0, bytes);
    } else {
      scale = most / 127.0f;
      RoundOff(reinterpret_cast<int8_t*>(to + sizeof scale), left, n, 127.0f / most, scale);
    }
    std::memcpy(to, &scale, sizeof scale);
    to += sizeof scale + bytes;
  }
}

template <bool kAdds>
void DequantizeBlock(float* to, const int8_t* from, int64_t count, float scale) {
  ForEachVector(count, [=](int64_t at, auto vector) HWY_ATTR {
    const auto q = hn::PromoteTo(SignedWords(), LoadBytes(vector, from + at));
    FloatVec v = hn::Mul(hn::ConvertTo(Floats(), q), hn::Set(Floats(), scale));
    if constexpr (kAdds) v = hn::Add(vector.Load(to + at), v);
    vector.Store(v, to + at);
  });
}

inline void DequantizeBlocks(float* to, const std::byte* from, int64_t count, float factor,
                             bool adds) {
  for (int64_t at = 0; at < count; at += kQuantizedBlock) {
    const int64_t n = HWY_MIN(kQuantizedBlock, count - at);
    float scale;
    std::memcpy(&scale, from, sizeof scale);
    const auto* const q = reinterpret_cast<const int8_t*>(from + sizeof scale);
    adds ? DequantizeBlock<true>(to + at, q, n, scale * factor)
         : DequantizeBlock<false>(to + at, q, n, scale * factor);
    from += sizeof scale + static_cast<size_t>(n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#endif  // per target
