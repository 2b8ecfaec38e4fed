// The CPU kernels' loops, compiled once per instruction set.
//
// A target file defines FARANDOLE_KERNEL_TARGET (its namespace), includes every standard header
// first, switches the compiler to its instruction set, and defines in that namespace the four
// block conversions Widen(float*, const Half*, n) and Narrow(Half*, const float*, n), and
// StreamBytes(dst, src, n), which is CpuKernels::Stream. All that is
// compiled for the target lives in that namespace, so no shared inline function can be emitted
// with instructions another processor lacks. Loops are plain and left to the vectoriser; they are
// compiled without contraction and without reassociation, hence equal bits everywhere.

#pragma once

#include "ops/cpu/elements.h"

namespace farandole::FARANDOLE_KERNEL_TARGET {
namespace {

/// Elements per block: two blocks of accumulators (8 KiB each) stay in a 32 KiB L1 with room for
/// the sources.
constexpr int64_t kBlock = 1024;

inline int64_t Smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/// acc[i] = src[i], widened.
template <class Acc, class T>
void Load(Acc* __restrict acc, const T* __restrict src, int64_t n) {
  if constexpr (kIsHalf<T>) {
    Widen(acc, src, n);
  } else if constexpr (kIsBool<T>) {
    for (int64_t i = 0; i < n; ++i) acc[i] = src[i].byte != 0;
  } else {
    for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<Acc>(src[i]);
  }
}

/// acc[i] = op(acc[i], src[i]).
template <class Op, class Acc, class T>
void Combine(Acc* __restrict acc, const T* __restrict src, int64_t n) {
  if constexpr (kIsHalf<T> || kIsBool<T>) {
    Acc widened[kBlock];
    Load(widened, src, n);
    for (int64_t i = 0; i < n; ++i) acc[i] = Op()(acc[i], widened[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) acc[i] = Op()(acc[i], static_cast<Acc>(src[i]));
  }
}

/// dst[i] = T(finish(acc[i])). Changes acc.
template <class T, class Acc, class Finish>
void Store(T* __restrict dst, Acc* __restrict acc, int64_t n, const Finish& finish) {
  if constexpr (kIsHalf<T>) {
    for (int64_t i = 0; i < n; ++i) acc[i] = finish.template Apply<T>(acc[i]);
    Narrow(dst, acc, n);
  } else if constexpr (kIsBool<T>) {
    for (int64_t i = 0; i < n; ++i) dst[i].byte = acc[i];
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<T>(finish.template Apply<T>(acc[i]));
  }
}

template <class Op, class Acc, class T, class Finish>
void ReduceBlocks(T* dst, std::span<const void* const> sources, int64_t count,
                  const Finish& finish) {
  Acc acc[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Smaller(kBlock, count - begin);
    Load(acc, static_cast<const T*>(sources[0]) + begin, n);
    for (size_t k = 1; k < sources.size(); ++k) {
      Combine<Op>(acc, static_cast<const T*>(sources[k]) + begin, n);
    }
    Store(dst + begin, acc, n, finish);
  }
}

/// The commonest case, two ranks, without a pass through the accumulator block.
template <class Op, class T, class Finish>
void ReducePair(T* dst, const T* a, const T* b, int64_t count, const Finish& finish) {
#pragma GCC ivdep  // dst may be a or b, at the same index only
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

/// Integers without divisor and factor wrap alike in their own width, where vectors are longest.
template <class Op, class T>
void ReduceFinished(T* dst, std::span<const void* const> sources, int64_t count,
                    const ReduceSpec& spec) {
  const DivideAndScale finish{spec.op == ReduceOp::kAverage ? spec.divisor : 1, spec.postscale};
  using Narrowest = std::conditional_t<std::is_integral_v<T>, T, Accumulator<T>>;
  if (finish.divisor == 1 && finish.factor == 1.0) {
    return ReduceWith<Op, Narrowest>(dst, sources, count, Keep());
  }
  if constexpr (std::is_same_v<T, int64_t> && std::is_same_v<Op, Sum>) {
    if (spec.op == ReduceOp::kAverage) {
      return ReduceWith<Op, Int128>(dst, sources, count, finish);
    }
  }
  ReduceWith<Op, Accumulator<T>>(dst, sources, count, finish);
}

void ReduceBool(Bool8* dst, std::span<const void* const> sources, int64_t count, ReduceOp op) {
  if (op == ReduceOp::kMax) return ReduceWith<Max, uint8_t>(dst, sources, count, Keep());
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
        return ReduceFinished<Sum>(out, sources, count, spec);
      case ReduceOp::kMin:
        return ReduceFinished<Min>(out, sources, count, spec);
      case ReduceOp::kMax:
        return ReduceFinished<Max>(out, sources, count, spec);
      case ReduceOp::kProduct:
        return ReduceFinished<Product>(out, sources, count, spec);
    }
  }
}

/// dst[i] = postscale * (prescale * src[i]) in T's precision; dst may be src.
template <class T>
void ScaleAs(void* dst, const void* src, int64_t count, double prescale, double postscale) {
  T* out = static_cast<T*>(dst);
  const T* in = static_cast<const T*>(src);
  if constexpr (kIsHalf<T>) {
    float block[kBlock];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t n = Smaller(kBlock, count - begin);
      Widen(block, in + begin, n);
      for (int64_t i = 0; i < n; ++i) block[i] = Scaled(Scaled(block[i], prescale), postscale);
      Narrow(out + begin, block, n);
    }
  } else {
#pragma GCC ivdep  // dst may be src, at the same index only
    for (int64_t i = 0; i < count; ++i) out[i] = Scaled(Scaled(in[i], prescale), postscale);
  }
}

/// dst[i] = Half(prescale * src[i]) for float and double sources, rounded to Half once.
template <class Half, class T>
void PackHalf(void* dst, const void* src, int64_t count, double prescale) {
  Half* out = static_cast<Half*>(dst);
  const T* in = static_cast<const T*>(src);
  if constexpr (std::is_same_v<T, float>) {
    if (prescale == 1.0) return Narrow(out, in, count);
  }
  float block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Smaller(kBlock, count - begin);
    for (int64_t i = 0; i < n; ++i) {
      const T scaled = Scaled(in[begin + i], prescale);
      if constexpr (std::is_same_v<T, double>) {
        block[i] = RoundToOdd(scaled);
      } else {
        block[i] = scaled;
      }
    }
    Narrow(out + begin, block, n);
  }
}

template <class Half>
void UnpackHalf(void* dst, DType dtype, const void* src, int64_t count) {
  const Half* in = static_cast<const Half*>(src);
  if (dtype == DType::kFloat32) return Widen(static_cast<float*>(dst), in, count);
  double* out = static_cast<double*>(dst);
  float block[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Smaller(kBlock, count - begin);
    Widen(block, in + begin, n);
    for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<double>(block[i]);
  }
}

template <class T>
struct Tag {
  using Type = T;
};

/// Calls fn(Tag<T>) with the element type of `dtype`.
template <class Fn>
void Visit(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kBool:
      return fn(Tag<Bool8>());
    case DType::kUint8:
      return fn(Tag<uint8_t>());
    case DType::kInt8:
      return fn(Tag<int8_t>());
    case DType::kInt16:
      return fn(Tag<int16_t>());
    case DType::kInt32:
      return fn(Tag<int32_t>());
    case DType::kInt64:
      return fn(Tag<int64_t>());
    case DType::kFloat16:
      return fn(Tag<Float16>());
    case DType::kBfloat16:
      return fn(Tag<Bfloat16>());
    case DType::kFloat32:
      return fn(Tag<float>());
    case DType::kFloat64:
      return fn(Tag<double>());
  }
}

class Kernels final : public CpuKernels {
 public:
  explicit Kernels(const char* name) : name_(name) {}

  void Pack(void* dst, DType wire, const void* src, DType dtype, int64_t count,
            double prescale) const override {
    const bool from_double = dtype == DType::kFloat64;
    if (wire == dtype) return Scale(dst, src, dtype, count, prescale, 1.0);
    if (wire == DType::kFloat16) {
      return from_double ? PackHalf<Float16, double>(dst, src, count, prescale)
                         : PackHalf<Float16, float>(dst, src, count, prescale);
    }
    return from_double ? PackHalf<Bfloat16, double>(dst, src, count, prescale)
                       : PackHalf<Bfloat16, float>(dst, src, count, prescale);
  }

  void Reduce(void* dst, std::span<const void* const> sources, int64_t count,
              const ReduceSpec& spec) const override {
    Visit(spec.wire,
          [&](auto tag) { ReduceAs<typename decltype(tag)::Type>(dst, sources, count, spec); });
  }

  void Unpack(void* dst, DType dtype, const void* src, DType wire, int64_t count) const override {
    if (wire == dtype) return Scale(dst, src, dtype, count, 1.0, 1.0);
    if (wire == DType::kFloat16) return UnpackHalf<Float16>(dst, dtype, src, count);
    UnpackHalf<Bfloat16>(dst, dtype, src, count);
  }

  void Scale(void* dst, const void* src, DType dtype, int64_t count, double prescale,
             double postscale) const override {
    if ((prescale == 1.0 && postscale == 1.0) || dtype == DType::kBool) {
      if (dst != src && count > 0)
        std::memcpy(dst, src, static_cast<size_t>(count * SizeOf(dtype)));
      return;
    }
    Visit(dtype, [&](auto tag) {
      using T = typename decltype(tag)::Type;
      if constexpr (!kIsBool<T>) ScaleAs<T>(dst, src, count, prescale, postscale);
    });
  }

  void Stream(void* dst, const void* src, int64_t size_bytes) const override {
    StreamBytes(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src),
                static_cast<size_t>(size_bytes));
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
};

}  // namespace
}  // namespace farandole::FARANDOLE_KERNEL_TARGET
