// Scalar rules of the CPU kernels: how one element is combined, scaled and stored.
//
// Compiled once per instruction set: see kernels.cc.
#if defined(FARANDOLE_OPS_CPU_ELEMENTS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FARANDOLE_OPS_CPU_ELEMENTS_INL_H
#undef FARANDOLE_OPS_CPU_ELEMENTS_INL_H
#else
#define FARANDOLE_OPS_CPU_ELEMENTS_INL_H
#endif

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/half.h"
#include "hwy/highway.h"

#ifndef FARANDOLE_INDEPENDENT_ITERATIONS
/// Before a loop whose iterations touch one index only, so that `to` may be `from`: it may be
/// vectorised without a check for overlap.
#if defined(__clang__)
#define FARANDOLE_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define FARANDOLE_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace farandole {
namespace HWY_NAMESPACE {

/// A byte that is 0 or not 0.
struct Bool8 {
  uint8_t byte = 0;
};

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;
template <class T>
inline constexpr bool kIsBool = std::is_same_v<T, Bool8>;

/// Type in which elements of T are added up: see CpuKernels.
template <class T>
using Accumulator = std::conditional_t<
    kIsHalf<T>, float,
    std::conditional_t<kIsBool<T>, uint8_t, std::conditional_t<std::is_integral_v<T>, int64_t, T>>>;

__extension__ typedef __int128 Int128;

/// Truncates toward zero and clamps to T's range; NaN gives 0.
template <class T>
T TruncateTo(double value) {
  constexpr double kLow = static_cast<double>(std::numeric_limits<T>::min());
  constexpr double kHigh = static_cast<double>(std::numeric_limits<T>::max());
  if (value != value) return 0;
  if (value <= kLow) return std::numeric_limits<T>::min();
  if (value >= kHigh) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

struct Sum {
  float operator()(float a, float b) const { return a + b; }
  double operator()(double a, double b) const { return a + b; }
  Int128 operator()(Int128 a, Int128 b) const { return a + b; }
  /// Integers wrap, whatever their width.
  template <class T>
  requires std::is_integral_v<T> T operator()(T a, T b) const {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  }
};

struct Product {
  float operator()(float a, float b) const { return a * b; }
  double operator()(double a, double b) const { return a * b; }
  template <class T>
  requires std::is_integral_v<T> T operator()(T a, T b) const {
    // Narrow unsigned types would be promoted to int, whose overflow is undefined.
    using U = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
};

struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<int>(b < a) | static_cast<int>(b != b) ? b : a;
  }
};

struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<int>(b > a) | static_cast<int>(b != b) ? b : a;
  }
};

struct BitAnd {
  template <class T>
  requires std::is_integral_v<T> T operator()(T a, T b) const { return static_cast<T>(a & b); }
};

struct BitOr {
  template <class T>
  requires std::is_integral_v<T> T operator()(T a, T b) const { return static_cast<T>(a | b); }
};

struct BitXor {
  template <class T>
  requires std::is_integral_v<T> T operator()(T a, T b) const { return static_cast<T>(a ^ b); }
};

/// What happens to a reduced value before it is rounded to T: nothing.
struct Keep {
  template <class T, class Acc>
  auto Apply(Acc value) const {
    return value;
  }
};

/// ... division by the size of the set, then the user's factor.
struct DivideAndScale {
  int64_t divisor = 1;
  double factor = 1.0;

  template <class T, class Acc>
  auto Apply(Acc value) const {
    if constexpr (std::is_floating_point_v<Acc>) {
      return value / static_cast<Acc>(divisor) * static_cast<Acc>(factor);
    } else {
      const auto quotient = static_cast<int64_t>(value / divisor);
      if (factor == 1.0) return quotient;
      return static_cast<int64_t>(TruncateTo<T>(static_cast<double>(quotient) * factor));
    }
  }
};

/// factor * value, for integers truncated and clamped.
template <class T>
T Scaled(T value, double factor) {
  if constexpr (std::is_integral_v<T>) {
    return factor == 1.0 ? value : TruncateTo<T>(static_cast<double>(value) * factor);
  } else {
    return value * static_cast<T>(factor);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace farandole
HWY_AFTER_NAMESPACE();

#endif  // per target
