#include "test/fakes/nccl/reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/half.h"

namespace farandole {
namespace {

enum : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

template <class T>
T Load(const void* from, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

/// What a type is calculated in: itself, float for the halves, unsigned (which wraps) for integers.
template <class T>
auto Widen(T value) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>)
    return ToFloat(value);
  else
    return value;
}

template <class T, class Wide>
T Narrow(Wide value) {
  if constexpr (std::is_same_v<T, Float16>)
    return ToFloat16(value);
  else if constexpr (std::is_same_v<T, Bfloat16>)
    return ToBfloat16(value);
  else
    return static_cast<T>(value);
}

template <class T>
T Combine(T a, T b, int op) {
  const auto x = Widen(a), y = Widen(b);
  if (op == kMax) return x < y ? b : a;
  if (op == kMin) return y < x ? b : a;
  if constexpr (std::is_integral_v<T>) {
    const auto u = static_cast<uint64_t>(x), v = static_cast<uint64_t>(y);
    return static_cast<T>(op == kProd ? u * v : u + v);
  } else {
    return Narrow<T>(op == kProd ? x * y : x + y);
  }
}

template <class T>
void Reduce(void* out, std::span<const void* const> sources, int64_t count,
            const FakeNcclReduction& reduction) {
  const size_t n = sources.size();
  const bool averages = reduction.op == kAvg;
  const bool scales = averages && !std::is_integral_v<T>;
  T scalar{};
  if constexpr (!std::is_integral_v<T>) {
    scalar = Narrow<T>(decltype(Widen(T{})){1} / static_cast<decltype(Widen(T{}))>(n));
  }
  for (int64_t i = 0; i < count; ++i) {
    T result{};
    for (size_t k = 0; k < n; ++k) {
      T value = Load<T>(sources[(reduction.first + k) % n], i);
      if (scales) value = Combine(value, scalar, kProd);
      result = k == 0 ? value : Combine(result, value, reduction.op);
    }
    if constexpr (std::is_integral_v<T>) {
      if (averages) result = static_cast<T>(result / static_cast<T>(n));
    }
    std::memcpy(static_cast<char*>(out) + i * static_cast<int64_t>(sizeof(T)), &result, sizeof(T));
  }
}

}  // namespace

int64_t FakeNcclSizeOf(int datatype) {
  constexpr int64_t kSizes[] = {1, 1, 4, 0, 8, 0, 2, 4, 8, 2};
  return datatype >= 0 && datatype < 10 ? kSizes[datatype] : 0;
}

void FakeNcclReduce(void* out, std::span<const void* const> sources, int64_t count,
                    const FakeNcclReduction& reduction) {
  switch (reduction.datatype) {
    case 0:
      return Reduce<int8_t>(out, sources, count, reduction);
    case 1:
      return Reduce<uint8_t>(out, sources, count, reduction);
    case 2:
      return Reduce<int32_t>(out, sources, count, reduction);
    case 4:
      return Reduce<int64_t>(out, sources, count, reduction);
    case 6:
      return Reduce<Float16>(out, sources, count, reduction);
    case 7:
      return Reduce<float>(out, sources, count, reduction);
    case 8:
      return Reduce<double>(out, sources, count, reduction);
    case 9:
      return Reduce<Bfloat16>(out, sources, count, reduction);
    default:
      return;
  }
}

}  // namespace farandole
