// Element-wise work on host memory: cast, scale and reduce, for every CPU plane.
//
// A pure interface, so that a plug-in can be handed one and needs no symbol of the core library.
#pragma once

#include <cstdint>
#include <span>

#include "core/slots.h"
#include "core/types.h"

namespace farandole {

/// Elements that share a scale, and the bytes of `count` elements so quantized: each block is a
/// float, its scale, and an int8 for each of its elements; the last may be shorter.
inline constexpr int64_t kQuantizedBlock = 256;
constexpr int64_t QuantizedBytes(int64_t count) {
  return count + (count + kQuantizedBlock - 1) / kQuantizedBlock * int64_t{sizeof(float)};
}

/// How the contributions of one batch are combined.
struct ReduceSpec {
  DType wire = DType::kFloat32;  ///< Element type of sources and result.
  ReduceOp op = ReduceOp::kSum;
  int64_t divisor = 1;  ///< kAverage: the set's full size, absent ranks included. Others: unused.
  double postscale = 1.0;  ///< Multiplies the reduced value before its one rounding.
  /// Sums and averages of floats: for each source how often, once it lies on a stack, the two upper
  /// values there are replaced by their sum; one is left at the end, and at most kMostSlotLevels +
  /// 1 lie there at a time (FindMerges). Empty: from the first source to the last. Others: unused.
  std::span<const uint8_t> merges = {};
};

/// Scalar products of two vectors a and b.
struct ScalarProducts {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};

/// What the numbers mean (the result contract above `class DataPlane` rests on this):
/// - Casts round to nearest even; NaN stays NaN (quiet). float64 to a 16-bit type rounds once.
/// - Factors multiply 16- and 32-bit floats in float (the factor rounded to float), float64 in
///   double. Integers are multiplied in double, truncated toward zero and clamped to the dtype's
///   range. A factor of exactly 1 changes nothing. Bool ignores factors.
/// - Reduce takes sources from first to last, or merges their sums as ReduceSpec says, and
///   accumulates in float (float64: double). Integer sums and products wrap; an integer average is
///   exact, then truncates toward zero. Min and max propagate NaN. Bool: min, product and bit_and
///   are `and`, max and bit_or are `or`, bit_xor is `xor` of 0 and 1. Bitwise ops ignore factors;
///   those that are not defined (IsDefined) must not be asked for (CheckBatch refuses them).
/// - MultiplyAndSum and Combine calculate in double. The order of a sum depends on `count` alone.
/// - Every implementation gives the same bits, however a range is divided into calls; which NaN
///   comes out of several is left open.
///
/// - Quantize and Dequantize: blocks of 8-bit integers (QuantizedBytes), which begin with `dst` and
///   `src`. Products and the difference are rounded to float one by one.
///
/// Pointers are aligned to their element, not more. Nothing blocks, allocates or fails.
/// Thread safety: stateless; any thread. Lifetime: that of the library that handed it out.
class CpuKernels {
 public:
  /// dst[i] = wire(prescale * src[i]), 0 <= i < count. `wire` is WireDType of `dtype` for some
  /// format. No overlap.
  virtual void Pack(void* dst, DType wire, const void* src, DType dtype, int64_t count,
                    double prescale) const = 0;
  /// dst[i] = wire(postscale * op_k(sources[k][i]) [/ divisor]). At least one source; `dst` may
  /// equal any of them exactly, and must not overlap one otherwise.
  virtual void Reduce(void* dst, std::span<const void* const> sources, int64_t count,
                      const ReduceSpec& spec) const = 0;
  /// dst[i] = dtype(src[i]); exact, since a wire type is never wider than its dtype. No overlap.
  virtual void Unpack(void* dst, DType dtype, const void* src, DType wire, int64_t count) const = 0;
  /// dst[i] = dtype(postscale * (prescale * src[i])): a set of one member. `dst` may equal `src`.
  virtual void Scale(void* dst, const void* src, DType dtype, int64_t count, double prescale,
                     double postscale) const = 0;
  /// The scalar products of `count` elements of float32 or float64.
  virtual ScalarProducts MultiplyAndSum(const void* a, const void* b, DType dtype,
                                        int64_t count) const = 0;
  /// a[i] = p * a[i] + q * b[i], of float32 or float64, rounded once. No overlap.
  virtual void Combine(void* a, const void* b, DType dtype, int64_t count, double p,
                       double q) const = 0;
  /// The first of `count` elements that is nan or infinite, or `count`: one pass of integer
  /// compares. Types that are no floats have none.
  virtual int64_t FindNonFinite(const void* src, DType dtype, int64_t count) const = 0;
  /// Quantizes v[i] = float(prescale * src[i]) + residual[i] by blocks of kQuantizedBlock. With m
  /// the largest magnitude of a block, its scale is m / 127, q[i] the nearest integer to v[i] *
  /// (127 / m), and residual[i] becomes v[i] - q[i] * scale. A block that is all but zero (m <
  /// 2^-100) gets zeros and keeps v as its residual. One with a NaN, an infinity or a magnitude
  /// from 2^127 on gets a scale of NaN, and a residual of zeros. No overlap.
  virtual void Quantize(void* dst, const float* src, float* residual, int64_t count,
                        double prescale) const = 0;
  /// dst[i] = q[i] * (scale * factor), added to dst[i] where `adds`. No overlap.
  virtual void Dequantize(float* dst, const void* src, int64_t count, float factor,
                          bool adds) const = 0;
  /// Copies bytes past the cache where the processor can (non-temporal stores), for a reader that
  /// shares no cache with this core. Ordered before every later store of this thread.
  virtual void Stream(void* dst, const void* src, int64_t size_bytes) const = 0;
  /// The instruction set by Highway's name: "AVX3" is AVX-512, "SCALAR" what every processor has.
  virtual const char* name() const = 0;

 protected:
  ~CpuKernels() = default;
};

/// The fastest kernels this processor runs, chosen once.
const CpuKernels& BestCpuKernels();
/// Those of every instruction set that this processor has and the build was made for: the fastest
/// first, last the one that every processor has.
std::span<const CpuKernels* const> SupportedCpuKernels();

}  // namespace farandole
