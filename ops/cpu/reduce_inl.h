// Reductions of every type, in the order of the sources or of a tree over them; scalar products and
// linear combinations of two vectors.
//
// Loops over integers and doubles are plain and left to the vectoriser. What is added up in float
// is loaded from all sources, combined, finished and stored once, in registers.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_REDUCE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_REDUCE_INL_H
#undef FARANDOLE_OPS_CPU_REDUCE_INL_H
#else
#define FARANDOLE_OPS_CPU_REDUCE_INL_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "hwy/highway.h"
#include "ops/cpu/cast_inl.h"
#include "ops/cpu/elements_inl.h"
#include "ops/cpu/kernels.h"

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

/// As ReduceFloats, but in the order of ReduceSpec::merges: the top of the stack is in a register.
template <class T, class Finish>
void MergeFloats(T* dst, std::span<const void* const> sources, int64_t count,
                 std::span<const uint8_t> merges, const Finish& finish) {
  const void* const* const from = sources.data();
  const size_t source_count = sources.size();
  const uint8_t* const merge = merges.data();
  ForEachVector(count, [=](int64_t at, auto vector) HWY_ATTR {
    HWY_ALIGN float below[kMostSlotLevels * hn::MaxLanes(Floats())];
    float* end = below;
    FloatVec top = vector.Load(static_cast<const T*>(from[0]) + at);
    for (size_t k = 1; k < source_count; ++k) {
      const FloatVec next = vector.Load(static_cast<const T*>(from[k]) + at);
      if (merge[k] == 0) {
        hn::Store(top, Floats(), end);
        end += hn::MaxLanes(Floats());
        top = next;
        continue;
      }
      top = hn::Add(top, next);
      for (uint8_t m = 1; m < merge[k]; ++m) {
        end -= hn::MaxLanes(Floats());
        top = hn::Add(hn::Load(Floats(), end), top);
      }
    }
    vector.Store(Finished(finish, top), dst + at);
  });
}

/// Elements per block: a block of accumulators (8 KiB) stays in the L1 cache with room for the
/// sources.
inline constexpr int64_t kReduceBlock = 1024;

/// An element as it is added up, and back.
template <class Acc, class T>
HWY_INLINE Acc Widened(T value) {
  if constexpr (kIsBool<T>) {
    return value.byte != 0;
  } else {
    return static_cast<Acc>(value);
  }
}
template <class T, class Acc>
HWY_INLINE T Narrowed(Acc value) {
  if constexpr (kIsBool<T>) {
    return {value};
  } else {
    return static_cast<T>(value);
  }
}

template <class Op, class Acc, class T, class Finish>
void ReduceBlocks(T* dst, std::span<const void* const> sources, int64_t count,
                  const Finish& finish) {
  Acc acc[kReduceBlock];
  for (int64_t begin = 0; begin < count; begin += kReduceBlock) {
    const int64_t n = HWY_MIN(kReduceBlock, count - begin);
    const T* const first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) acc[i] = Widened<Acc>(first[i]);
    for (size_t k = 1; k < sources.size(); ++k) {
      const T* const next = static_cast<const T*>(sources[k]) + begin;
      for (int64_t i = 0; i < n; ++i) acc[i] = Op()(acc[i], Widened<Acc>(next[i]));
    }
    T* const to = dst + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = Narrowed<T>(finish.template Apply<T>(acc[i]));
  }
}

/// As MergeFloats; the stack is one of blocks.
template <class Finish>
void MergeDoubles(double* dst, std::span<const void* const> sources, int64_t count,
                  std::span<const uint8_t> merges, const Finish& finish) {
  constexpr int64_t kBlock = 128;
  double stack[kMostSlotLevels + 1][kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = HWY_MIN(kBlock, count - begin);
    double(*end)[kBlock] = stack;
    for (size_t k = 0; k < sources.size(); ++k) {
      const double* const next = static_cast<const double*>(sources[k]) + begin;
      if (merges[k] == 0) {
        std::memcpy(end++, next, static_cast<size_t>(n) * sizeof(double));
        continue;
      }
      for (int64_t i = 0; i < n; ++i) end[-1][i] += next[i];
      for (uint8_t m = 1; m < merges[k]; ++m, --end) {
        for (int64_t i = 0; i < n; ++i) end[-2][i] += end[-1][i];
      }
    }
    for (int64_t i = 0; i < n; ++i) dst[begin + i] = finish.template Apply<double>(stack[0][i]);
  }
}

/// The commonest case, two ranks, without a pass through the accumulator block.
template <class Op, class T, class Finish>
void ReducePair(T* dst, const T* a, const T* b, int64_t count, const Finish& finish) {
  FARANDOLE_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) {
    dst[i] = static_cast<T>(finish.template Apply<T>(Op()(a[i], b[i])));
  }
}

template <class Op, class Acc, class T, class Finish>
void ReduceWith(T* dst, std::span<const void* const> sources, int64_t count, const Finish& finish) {
  if constexpr (std::is_same_v<Acc, T>) {
    if (sources.size() == 2) {
      return ReducePair<Op>(dst, static_cast<const T*>(sources[0]),
                            static_cast<const T*>(sources[1]), count, finish);
    }
  }
  ReduceBlocks<Op, Acc>(dst, sources, count, finish);
}

template <class T, class Finish>
void Merge(T* dst, std::span<const void* const> sources, int64_t count,
           std::span<const uint8_t> merges, const Finish& finish) {
  if constexpr (std::is_same_v<T, double>) {
    MergeDoubles(dst, sources, count, merges, finish);
  } else {
    MergeFloats(dst, sources, count, merges, finish);
  }
}

/// Integers without divisor and factor wrap alike in their own width, where vectors are longest.
template <class Op, class T>
void ReduceFinished(T* dst, std::span<const void* const> sources, int64_t count,
                    const ReduceSpec& spec) {
  const DivideAndScale finish{spec.op == ReduceOp::kAverage ? spec.divisor : 1, spec.postscale};
  const bool keeps = finish.divisor == 1 && finish.factor == 1.0;
  if constexpr (std::is_same_v<Op, Sum> && std::is_floating_point_v<Accumulator<T>>) {
    if (!spec.merges.empty()) {
      return keeps ? Merge(dst, sources, count, spec.merges, Keep())
                   : Merge(dst, sources, count, spec.merges, finish);
    }
  }
  if constexpr (std::is_same_v<Accumulator<T>, float>) {
    if (keeps) return ReduceFloats<Op>(dst, sources, count, Keep());
    ReduceFloats<Op>(dst, sources, count, finish);
  } else {
    if (keeps) return ReduceWith<Op, T>(dst, sources, count, Keep());
    if constexpr (std::is_same_v<T, int64_t> && std::is_same_v<Op, Sum>) {
      if (spec.op == ReduceOp::kAverage) {
        return ReduceWith<Op, Int128>(dst, sources, count, finish);
      }
    }
    ReduceWith<Op, Accumulator<T>>(dst, sources, count, finish);
  }
}

/// The first element all of whose bits `kExponent` are set, or `count`. An exponent of ones plus
/// its lowest bit carries into the sign's place, and nothing else does: two operations and one to
/// collect them, for integers of every width.
template <class Bits, Bits kExponent>
int64_t FindExponent(const void* src, int64_t count) {
  constexpr auto kLowest = static_cast<Bits>(kExponent & (~kExponent + 1));
  const auto* const from = static_cast<const Bits*>(src);
  const auto carry = [](Bits bits) { return static_cast<Bits>((bits & kExponent) + kLowest); };
  constexpr auto kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  for (int64_t begin = 0; begin < count; begin += kReduceBlock) {
    const int64_t end = HWY_MIN(begin + kReduceBlock, count);
    Bits carried = 0;
    for (int64_t i = begin; i < end; ++i) carried |= carry(from[i]);
    if ((carried & kSign) == 0) continue;
    for (int64_t i = begin; i < end; ++i)
      if ((carry(from[i]) & kSign) != 0) return i;
  }
  return count;
}

/// CheckBatch has refused floats.
template <class Op, class T>
void ReduceBits(T* dst, std::span<const void* const> sources, int64_t count) {
  if constexpr (std::is_integral_v<T>) ReduceWith<Op, T>(dst, sources, count, Keep());
}

inline void ReduceBool(Bool8* dst, std::span<const void* const> sources, int64_t count,
                       ReduceOp op) {
  const bool any = op == ReduceOp::kMax || op == ReduceOp::kBitOr;
  if (any) return ReduceWith<Max, uint8_t>(dst, sources, count, Keep());
  if (op == ReduceOp::kBitXor) return ReduceWith<BitXor, uint8_t>(dst, sources, count, Keep());
  ReduceWith<Min, uint8_t>(dst, sources, count, Keep());
}

template <class T>
void ReduceAs(void* dst, std::span<const void* const> sources, int64_t count,
              const ReduceSpec& spec) {
  T* out = static_cast<T*>(dst);
  if constexpr (kIsBool<T>) {
    ReduceBool(out, sources, count, spec.op);
  } else {
    switch (spec.op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
      case ReduceOp::kPreMulSum:
        return ReduceFinished<Sum>(out, sources, count, spec);
      case ReduceOp::kMin:
        return ReduceFinished<Min>(out, sources, count, spec);
      case ReduceOp::kMax:
        return ReduceFinished<Max>(out, sources, count, spec);
      case ReduceOp::kProduct:
        return ReduceFinished<Product>(out, sources, count, spec);
      case ReduceOp::kBitAnd:
        return ReduceBits<BitAnd>(out, sources, count);
      case ReduceOp::kBitOr:
        return ReduceBits<BitOr>(out, sources, count);
      case ReduceOp::kBitXor:
        return ReduceBits<BitXor>(out, sources, count);
      case ReduceOp::kAdasum:
        return;  // refused by CheckBatch
    }
  }
}

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
