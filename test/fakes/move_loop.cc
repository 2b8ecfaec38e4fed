#include "test/fakes/move_loop.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "core/half.h"

namespace farandole {
namespace {

template <class T>
T Load(const void* from, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

/// Calls `use` with a value of the C++ type of `dtype`.
template <class Use>
void WithType(DType dtype, Use use) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUint8:
      return use(uint8_t{});
    case DType::kInt8:
      return use(int8_t{});
    case DType::kInt16:
      return use(int16_t{});
    case DType::kInt32:
      return use(int32_t{});
    case DType::kInt64:
      return use(int64_t{});
    case DType::kFloat16:
      return use(Float16{});
    case DType::kBfloat16:
      return use(Bfloat16{});
    case DType::kFloat32:
      return use(float{});
    case DType::kFloat64:
      return use(double{});
  }
}

template <class To, class Middle>
To Round(Middle value) {
  if constexpr (std::is_same_v<To, Float16> || std::is_same_v<To, Bfloat16>) {
    float narrow;
    if constexpr (std::is_same_v<Middle, double>)
      narrow = RoundToOdd(value);
    else
      narrow = value;
    if constexpr (std::is_same_v<To, Float16>)
      return ToFloat16(narrow);
    else
      return ToBfloat16(narrow);
  } else {
    return static_cast<To>(value);
  }
}

template <class To>
To Clamp(double value) {
  const double whole = std::trunc(value);
  if (std::isnan(whole)) return 0;
  if (whole <= static_cast<double>(std::numeric_limits<To>::min())) {
    return std::numeric_limits<To>::min();
  }
  if (whole >= static_cast<double>(std::numeric_limits<To>::max())) {
    return std::numeric_limits<To>::max();
  }
  return static_cast<To>(whole);
}

template <class From, class To>
To MoveOne(From in, const MoveSpec& spec) {
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    const int64_t whole = static_cast<int64_t>(in) / spec.divisor;
    if (spec.scale == 1.0 || spec.from == DType::kBool) return static_cast<To>(whole);
    return Clamp<To>(static_cast<double>(whole) * spec.scale);
  } else if constexpr (std::is_integral_v<From> || std::is_integral_v<To>) {
    return {};  // refused before
  } else if constexpr (std::is_same_v<From, double>) {
    return Round<To>(spec.scale == 1.0 ? in : in * spec.scale);
  } else {
    float value;
    if constexpr (std::is_same_v<From, float>)
      value = in;
    else
      value = ToFloat(in);
    return Round<To>(spec.scale == 1.0 ? value : value * static_cast<float>(spec.scale));
  }
}

template <class To>
To Identity(const MoveSpec& spec) {
  if constexpr (std::is_integral_v<To>) {
    const bool is_bool = spec.to == DType::kBool;
    switch (spec.op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        return 0;
      case ReduceOp::kProduct:
        return 1;
      case ReduceOp::kMin:
        return is_bool ? To{1} : std::numeric_limits<To>::max();
      case ReduceOp::kMax:
        return is_bool ? To{0} : std::numeric_limits<To>::min();
    }
  } else {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    switch (spec.op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        return Round<To>(0.0f);
      case ReduceOp::kProduct:
        return Round<To>(1.0f);
      case ReduceOp::kMin:
        return Round<To>(kInfinity);
      case ReduceOp::kMax:
        return Round<To>(-kInfinity);
    }
  }
  return {};
}

template <class From, class To>
void MoveAll(const DeviceMove& move, const MoveSpec& spec) {
  for (int64_t i = 0; i < move.count; ++i) {
    const To value =
        move.in == nullptr ? Identity<To>(spec) : MoveOne<From, To>(Load<From>(move.in, i), spec);
    std::memcpy(static_cast<char*>(move.out) + i * static_cast<int64_t>(sizeof(To)), &value,
                sizeof(To));
  }
}

}  // namespace

Status MoveInLoop(std::span<const DeviceMove> moves, const MoveSpec& spec) {
  if (IsFloating(spec.from) != IsFloating(spec.to) || spec.divisor == 0) {
    return InvalidArgument("cannot move " + std::string(Name(spec.from)) + " to " +
                           std::string(Name(spec.to)) + " with divisor " +
                           std::to_string(spec.divisor));
  }
  WithType(spec.from, [&](auto from) {
    WithType(spec.to, [&](auto to) {
      for (const DeviceMove& move : moves) MoveAll<decltype(from), decltype(to)>(move, spec);
    });
  });
  return {};
}

}  // namespace farandole
