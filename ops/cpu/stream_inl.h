// Copies past the cache.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_STREAM_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_STREAM_INL_H
#undef FARANDOLE_OPS_CPU_STREAM_INL_H
#else
#define FARANDOLE_OPS_CPU_STREAM_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {

/// CpuKernels::Stream. An instruction set without such stores copies.
inline void StreamBytes(std::byte* to, const std::byte* from, int64_t size) {
  const hwy::HWY_NAMESPACE::ScalableTag<uint8_t> d;
  const auto lanes = static_cast<int64_t>(hwy::HWY_NAMESPACE::Lanes(d));
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to)) % lanes;
  int64_t at = misaligned == 0 ? 0 : HWY_MIN(lanes - misaligned, size);
  if (at > 0) std::memcpy(to, from, static_cast<size_t>(at));
  for (; at + lanes <= size; at += lanes) {
    const auto* in = reinterpret_cast<const uint8_t*>(from + at);
    const auto value = hwy::HWY_NAMESPACE::LoadU(d, in);
    hwy::HWY_NAMESPACE::Stream(value, d, reinterpret_cast<uint8_t*>(to + at));
  }
  if (at < size) std::memcpy(to + at, from + at, static_cast<size_t>(size - at));
  hwy::FlushStream();
}

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#endif  // per target
