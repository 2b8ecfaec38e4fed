/// @file
/// Memory of tensors as the C++ API takes it: pointer and count, from any container, typed by
/// element.
#pragma once

#include <farandole/farandole.h>

#include <complex>
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

/// An 8-bit float with 4 bits of exponent and 3 of fraction, without infinities, as bits. Moved,
/// not reduced.
struct Float8E4m3fn {
  std::uint8_t bits;  ///< Sign, exponent, fraction.
};

/// An 8-bit float with 5 bits of exponent and 2 of fraction, as bits. Moved, not reduced.
struct Float8E5m2 {
  std::uint8_t bits;  ///< Sign, exponent, fraction.
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
  float64 = FARANDOLE_FLOAT64,
  uint16 = FARANDOLE_UINT16,  ///< From here on: broadcast, allgather and alltoall only.
  uint32 = FARANDOLE_UINT32,
  uint64 = FARANDOLE_UINT64,
  complex64 = FARANDOLE_COMPLEX64,    ///< Two float32.
  complex128 = FARANDOLE_COMPLEX128,  ///< Two float64.
  float8_e4m3fn = FARANDOLE_FLOAT8_E4M3FN,
  float8_e5m2 = FARANDOLE_FLOAT8_E5M2
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
  else if constexpr (std::is_integral_v<E> && sizeof(E) == 2)
    return std::is_signed_v<E> ? DataType::int16 : DataType::uint16;
  else if constexpr (std::is_integral_v<E> && sizeof(E) == 4)
    return std::is_signed_v<E> ? DataType::int32 : DataType::uint32;
  else if constexpr (std::is_integral_v<E> && sizeof(E) == 8)
    return std::is_signed_v<E> ? DataType::int64 : DataType::uint64;
  else if constexpr (std::is_same_v<E, std::complex<float>>)
    return DataType::complex64;
  else if constexpr (std::is_same_v<E, std::complex<double>>)
    return DataType::complex128;
  else if constexpr (std::is_same_v<E, Float8E4m3fn>)
    return DataType::float8_e4m3fn;
  else if constexpr (std::is_same_v<E, Float8E5m2>)
    return DataType::float8_e5m2;
  else
    static_assert(!sizeof(E),
                  "Farandole moves bool, (u)int8 to (u)int64, Float16, Bfloat16, float, double, "
                  "std::complex of these two, Float8E4m3fn and Float8E5m2");
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
