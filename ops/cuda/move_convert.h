// How one element becomes another: the arithmetic above MoveSpec, for host and device alike.
//
// `Machine` brings what a processor does in its own way: 16-bit floats to and from others.
#pragma once

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

/// value / divisor * scale, truncated toward zero and clamped to [low, high]; NaN gives 0. A call
/// of its own: rare, and as long as all else together where it is repeated for each element.
[[gnu::noinline]] FARANDOLE_ON_DEVICE inline int64_t DivideAndScale(int64_t value,
                                                                    const MoveFactors& factors,
                                                                    int64_t low, int64_t high) {
  if (factors.divisor != 1) value /= factors.divisor;
  if (factors.scale == 1.0) return value;
  const double scaled = static_cast<double>(value) * factors.scale;
  if (scaled != scaled) return 0;
  if (scaled <= static_cast<double>(low)) return low;
  if (scaled >= static_cast<double>(high)) return high;
  return static_cast<int64_t>(scaled);
}

template <class To>
FARANDOLE_ON_DEVICE inline To ConvertInteger(int64_t value, const MoveFactors& factors) {
  constexpr To kLow = std::numeric_limits<To>::min();
  constexpr To kHigh = std::numeric_limits<To>::max();
  const bool changes = factors.divisor != 1 || factors.scale != 1.0;
  return static_cast<To>(changes ? DivideAndScale(value, factors, kLow, kHigh) : value);
}

template <class Machine, class To, class From>
FARANDOLE_ON_DEVICE inline To Convert(From value, const MoveFactors& factors) {
  if constexpr (std::is_integral_v<From>) {
    return ConvertInteger<To>(value, factors);
  } else if constexpr (std::is_same_v<From, double>) {
    return RoundTo<Machine, To>(value * factors.scale);
  } else if constexpr (std::is_same_v<From, float>) {
    return RoundTo<Machine, To>(value * factors.scale_float);
  } else {
    return RoundTo<Machine, To>(Machine::Widen(value) * factors.scale_float);
  }
}

}  // namespace farandole
