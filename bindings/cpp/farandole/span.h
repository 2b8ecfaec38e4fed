/// @file
/// Memory of tensors as the C++ API takes it: pointer and count, from any container, typed by
/// element.
#pragma once

#include <farandole/farandole.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace farandole {

/// IEEE 754 binary16 as bits, for data that is in that format already.
struct Float16 {
  std::uint16_t bits;  ///< Sign, exponent, fraction.
};

/// bfloat16 as bits: the upper half of a float.
struct Bfloat16 {
  std::uint16_t bits;  ///< Sign, exponent, fraction.
};

/// Element types on the wire. The numbers are the C ABI's (`farandole_dtype`).
enum class DataType : std::int32_t {
  boolean = FARANDOLE_BOOL,
  uint8 = FARANDOLE_UINT8,
  int8 = FARANDOLE_INT8,
  int16 = FARANDOLE_INT16,
  int32 = FARANDOLE_INT32,
  int64 = FARANDOLE_INT64,
  float16 = FARANDOLE_FLOAT16,
  bfloat16 = FARANDOLE_BFLOAT16,
  float32 = FARANDOLE_FLOAT32,
  float64 = FARANDOLE_FLOAT64
};

/// The `DataType` of a C++ element type; a compile error for types that cannot travel.
template <class T>
constexpr DataType data_type_of() {
  using E = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<E, bool>)
    return DataType::boolean;
  else if constexpr (std::is_same_v<E, float>)
    return DataType::float32;
  else if constexpr (std::is_same_v<E, double>)
    return DataType::float64;
  else if constexpr (std::is_same_v<E, Float16>)
    return DataType::float16;
  else if constexpr (std::is_same_v<E, Bfloat16>)
    return DataType::bfloat16;
  else if constexpr (std::is_integral_v<E> && sizeof(E) == 1)
    return std::is_signed_v<E> ? DataType::int8 : DataType::uint8;
  else if constexpr (std::is_integral_v<E> && std::is_signed_v<E> && sizeof(E) == 2)
    return DataType::int16;
  else if constexpr (std::is_integral_v<E> && std::is_signed_v<E> && sizeof(E) == 4)
    return DataType::int32;
  else if constexpr (std::is_integral_v<E> && std::is_signed_v<E> && sizeof(E) == 8)
    return DataType::int64;
  else
    static_assert(
        !sizeof(E),
        "Farandole reduces bool, (u)int8, int16, int32, int64, Float16, Bfloat16, float, double");
}

/// `size()` consecutive elements at `data()`. Borrows; as std::span of C++20.
///
/// Thread safety: as a plain value.
template <class T>
class Span {
 public:
  using element_type = T;  ///< As std::span's.

  constexpr Span() = default;
  /// `count` elements at `data`.
  constexpr Span(T* data, std::size_t count) : data_(data), size_(count) {}
  /// A plain array.
  template <std::size_t N>
  constexpr Span(T (&array)[N]) : data_(array), size_(N) {}
  /// Anything with `data()` and `size()`: std::vector, std::array, std::span, another Span.
  template <class Container, class Pointer = decltype(std::declval<Container&>().data()),
            class = std::enable_if_t<std::is_convertible_v<Pointer, T*>>,
            class = decltype(std::declval<Container&>().size())>
  constexpr Span(Container&& container)
      : data_(container.data()), size_(static_cast<std::size_t>(container.size())) {}

  constexpr T* data() const { return data_; }                        ///< The first element.
  constexpr std::size_t size() const { return size_; }               ///< Elements.
  constexpr T* begin() const { return data_; }                       ///< As data().
  constexpr T* end() const { return data_ + size_; }                 ///< One past the last.
  constexpr T& operator[](std::size_t i) const { return data_[i]; }  ///< i < size(), not checked.

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// @cond internal
template <class Container>
Span(Container&& container) -> Span<std::remove_pointer_t<decltype(container.data())>>;
template <class T, std::size_t N>
Span(T (&array)[N]) -> Span<T>;
/// @endcond

}  // namespace farandole
