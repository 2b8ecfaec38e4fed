// How one element becomes another: the arithmetic above MoveSpec, for host and device alike.
//
// `Machine` brings what a processor does in its own way: 16-bit floats to and from others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/half.h"
#include "ops/cuda/move_table.h"
#include "ops/cuda/on_device.h"

namespace farandole {

template <class T>
inline constexpr bool kIsMoveHalf = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;

/// `value`, a float or double, rounded to To once.
template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To RoundTo(From value) {
  if constexpr (kIsMoveHalf<To>) {
    return Machine::Round(To(), value);
  } else {
    return static_cast<To>(value);
  }
}

/// The values that two integer types share.
template <class A, class B>
struct SharedRange {
  static constexpr int64_t kLow =
      std::max<int64_t>(std::numeric_limits<A>::min(), std::numeric_limits<B>::min());
  static constexpr int64_t kHigh =
      std::min<int64_t>(std::numeric_limits<A>::max(), std::numeric_limits<B>::max());
};

/// value * scale, truncated toward zero and clamped to [low, high]; NaN gives 0.
FARANDOLE_ON_DEVICE inline int64_t ScaleInteger(int64_t value, double scale, int64_t low,
                                                int64_t high) {
  if (scale == 1.0) return value;
  const double scaled = static_cast<double>(value) * scale;
  if (scaled != scaled) return 0;
  if (scaled <= static_cast<double>(low)) return low;
  if (scaled >= static_cast<double>(high)) return high;
  return static_cast<int64_t>(scaled);
}

/// value / divisor * scale * rescale; each product as above. A call of its own: rare, and as long
/// as all else together where it is repeated for each element.
[[gnu::noinline]] FARANDOLE_ON_DEVICE inline int64_t DivideAndScale(int64_t value,
                                                                    const MoveFactors& factors,
                                                                    int64_t low, int64_t high) {
  if (factors.divisor != 1) value /= factors.divisor;
  value = ScaleInteger(value, factors.scale, low, high);
  return ScaleInteger(value, factors.rescale, low, high);
}

template <class To, class From>
FARANDOLE_ON_DEVICE inline To ConvertInteger(From value, const MoveFactors& factors) {
  using Range = SharedRange<From, To>;
  const bool changes = factors.divisor != 1 || factors.scale != 1.0 || factors.rescale != 1.0;
  return static_cast<To>(changes ? DivideAndScale(value, factors, Range::kLow, Range::kHigh)
                                 : value);
}

/// The second factor, which only moves from a type to itself have: casts stay as short as they are.
template <class To, class From, class Wide>
FARANDOLE_ON_DEVICE inline Wide Rescale(Wide value, Wide factor) {
  if constexpr (std::is_same_v<From, To>) {
    return value * factor;
  } else {
    return value;
  }
}

template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To Convert(From value, const MoveFactors& factors) {
  if constexpr (std::is_integral_v<From>) {
    return ConvertInteger<To>(value, factors);
  } else if constexpr (std::is_same_v<From, double>) {
    return RoundTo<Machine, To>(Rescale<To, From>(value * factors.scale, factors.rescale));
  } else {
    float wide = 0.0f;
    if constexpr (kIsMoveHalf<From>) {
      wide = Machine::Widen(value);
    } else {
      wide = value;
    }
    wide *= factors.scale_float;
    return RoundTo<Machine, To>(Rescale<To, From>(wide, factors.rescale_float));
  }
}

}  // namespace farandole
