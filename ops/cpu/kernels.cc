// Compiles the CPU kernels for every instruction set, and chooses among them at run time.
//
// Highway's foreach_target.h includes this file once per instruction set, each time with another
// HWY_NAMESPACE, and its macros around the namespaces in *_inl.h switch the compiler. What is
// compiled for one lives in its namespace, so that no shared inline function can hold instructions
// another processor lacks. Nothing is contracted or reassociated, hence equal bits everywhere.
#include "ops/cpu/kernels.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/half.h"
#include "core/types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifndef FARANDOLE_OMITTED_TARGETS
#define FARANDOLE_OMITTED_TARGETS 0
#endif
// SSSE3, and all that came after AVX3: these loops gain nothing from them over their neighbours.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | (HWY_AVX3 - 1) | FARANDOLE_OMITTED_TARGETS)
#else
#define HWY_COMPILE_ONLY_STATIC
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/kernels.cc"
#include "hwy/foreach_target.h"  // must come first
#include "hwy/highway.h"
#include "ops/cpu/cast_inl.h"
#include "ops/cpu/elements_inl.h"
#include "ops/cpu/quantize_inl.h"
#include "ops/cpu/reduce_inl.h"

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {

template <class T>
struct Tag {
  using Type = T;
};

/// By the number of the DType; what has a higher one is refused by CheckBatch.
using Elements =
    std::tuple<Bool8, uint8_t, int8_t, int16_t, int32_t, int64_t, Float16, Bfloat16, float, double>;
static_assert(std::tuple_size_v<Elements> == kReducibleDTypeCount);

/// Calls fn(Tag<T>) with the element type of `dtype`.
template <class Fn, size_t... kDType>
void Visit(DType dtype, const Fn& fn, std::index_sequence<kDType...>) {
  (void)((dtype == static_cast<DType>(kDType) &&
          (fn(Tag<std::tuple_element_t<kDType, Elements>>()), true)) ||
         ...);
}
template <class Fn>
void Visit(DType dtype, const Fn& fn) {
  Visit(dtype, fn, std::make_index_sequence<kReducibleDTypeCount>());
}

/// Calls fn(Tag<T>, Tag<Half>) for a float32 or float64 whose wire type is a 16-bit float.
template <class Fn>
void VisitWire(DType dtype, DType wire, const Fn& fn) {
  const auto with = [&](auto half) {
    dtype == DType::kFloat64 ? fn(Tag<double>(), half) : fn(Tag<float>(), half);
  };
  wire == DType::kFloat16 ? with(Tag<Float16>()) : with(Tag<Bfloat16>());
}

class Kernels final : public CpuKernels {
 public:
  void Pack(void* dst, DType wire, const void* src, DType dtype, int64_t count,
            double prescale) const override {
    if (wire == dtype) return Scale(dst, src, dtype, count, prescale, 1.0);
    VisitWire(dtype, wire, [&](auto element, auto half) {
      using T = typename decltype(element)::Type;
      using Half = typename decltype(half)::Type;
      PackHalf(static_cast<Half*>(dst), static_cast<const T*>(src), count, prescale);
    });
  }

  void Reduce(void* dst, std::span<const void* const> sources, int64_t count,
              const ReduceSpec& spec) const override {
    Visit(spec.wire,
          [&](auto tag) { ReduceAs<typename decltype(tag)::Type>(dst, sources, count, spec); });
  }

  void Unpack(void* dst, DType dtype, const void* src, DType wire, int64_t count) const override {
    if (wire == dtype) return Scale(dst, src, dtype, count, 1.0, 1.0);
    VisitWire(dtype, wire, [&](auto element, auto half) {
      using T = typename decltype(element)::Type;
      using Half = typename decltype(half)::Type;
      UnpackHalf(static_cast<T*>(dst), static_cast<const Half*>(src), count);
    });
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
      if constexpr (!kIsBool<T>) {
        ScaleAs(static_cast<T*>(dst), static_cast<const T*>(src), count, prescale, postscale);
      }
    });
  }

  ScalarProducts MultiplyAndSum(const void* a, const void* b, DType dtype,
                                int64_t count) const override {
    if (dtype == DType::kFloat64) {
      return SumProducts(static_cast<const double*>(a), static_cast<const double*>(b), count);
    }
    return SumProducts(static_cast<const float*>(a), static_cast<const float*>(b), count);
  }

  void Combine(void* a, const void* b, DType dtype, int64_t count, double p,
               double q) const override {
    if (dtype == DType::kFloat64) {
      return CombineInto(static_cast<double*>(a), static_cast<const double*>(b), count, p, q);
    }
    CombineInto(static_cast<float*>(a), static_cast<const float*>(b), count, p, q);
  }

  int64_t FindNonFinite(const void* src, DType dtype, int64_t count) const override {
    switch (dtype) {
      case DType::kFloat16:
        return FindExponent<uint16_t, 0x7c00>(src, count);
      case DType::kBfloat16:
        return FindExponent<uint16_t, 0x7f80>(src, count);
      case DType::kFloat32:
        return FindExponent<uint32_t, 0x7f800000>(src, count);
      case DType::kFloat64:
        return FindExponent<uint64_t, 0x7ff0000000000000>(src, count);
      default:
        return count;
    }
  }

  void Quantize(void* dst, const float* src, float* residual, int64_t count,
                double prescale) const override {
    QuantizeBlocks(static_cast<std::byte*>(dst), src, residual, count,
                   static_cast<float>(prescale));
  }

  void Dequantize(float* dst, const void* src, int64_t count, float factor,
                  bool adds) const override {
    DequantizeBlocks(dst, static_cast<const std::byte*>(src), count, factor, adds);
  }

  void Stream(void* dst, const void* src, int64_t size_bytes) const override {
    StreamBytes(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), size_bytes);
  }

  const char* name() const override { return hwy::TargetName(HWY_TARGET); }
};

/// Initialised by the compiler: no code of this instruction set runs before it was chosen.
inline constexpr Kernels kKernels;

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace farandole {
namespace {

// Highway's own run-time choice is not header-only; its library would be a dependency at run time
// for these lines. They test every feature that HWY_TARGET_STR lets the compiler use.
#if defined(__x86_64__)
bool HasSse4() {
  return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul") &&
         __builtin_cpu_supports("aes");
}

/// By cpuid: Clang's __builtin_cpu_supports accepts "f16c" later than GCC's.
bool HasF16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool HasAvx2() {
  return HasSse4() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") && HasF16c();
}

[[maybe_unused]] bool HasAvx3() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

struct KernelList {
  std::array<const CpuKernels*, 4> kernels{};
  size_t count = 0;

  void Add(bool runs_here, const CpuKernels& more) {
    if (runs_here) kernels[count++] = &more;
  }
};

/// Fastest first. The static target, compiled for every processor of the architecture, is last.
KernelList FindSupported() {
  KernelList list;
#if HWY_TARGETS & ~HWY_STATIC_TARGET & HWY_AVX3
  list.Add(HasAvx3(), N_AVX3::kKernels);
#endif
#if HWY_TARGETS & ~HWY_STATIC_TARGET & HWY_AVX2
  list.Add(HasAvx2(), N_AVX2::kKernels);
#endif
#if HWY_TARGETS & ~HWY_STATIC_TARGET & HWY_SSE4
  list.Add(HasSse4(), N_SSE4::kKernels);
#endif
  list.Add(true, HWY_STATIC_DISPATCH(kKernels));
  return list;
}

}  // namespace

std::span<const CpuKernels* const> SupportedCpuKernels() {
  static const KernelList list = FindSupported();
  return std::span(list.kernels).first(list.count);
}

const CpuKernels& BestCpuKernels() { return *SupportedCpuKernels().front(); }

}  // namespace farandole

#endif  // HWY_ONCE
