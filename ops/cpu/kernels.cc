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
#include <type_traits>

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
#include "ops/cpu/kernels_inl.h"

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
