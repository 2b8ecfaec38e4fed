// 16-bit floats as bits: conversions that every kernel must agree with, bit for bit.
//
// Rounding is to nearest, ties to even (IEEE 754-2019, 4.3.1). NaN stays NaN, is made quiet, and
// keeps its sign and the upper bits of its payload, as the F16C instructions do. Subnormals are
// exact in both directions and are never flushed to zero.
//
// Thread safety: pure functions, which assume the default rounding mode.
#pragma once

#include <bit>
#include <cstdint>

namespace farandole {

/// IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits.
struct Float16 {
  uint16_t bits = 0;
};

/// The upper half of a binary32: 1 sign, 8 exponent, 7 fraction bits.
struct Bfloat16 {
  uint16_t bits = 0;
};

[[gnu::always_inline]] inline Float16 ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 2^-14 and up: move the exponent's bias from 127 to 15; a carry out of the fraction is right,
  // up to infinity.
  const uint32_t rebased = magnitude - 0x38000000u;
  const uint32_t normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  // Below 2^-14: at 0.5 a float's last place is 2^-24, the spacing of subnormals; the add rounds.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? nan : result;
  return {static_cast<uint16_t>(sign | result)};
}

[[gnu::always_inline]] inline float ToFloat(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + 0x38000000u;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
  const uint32_t special = 0x7f800000u | (magnitude << 13) | quiet;
  uint32_t result = magnitude < 0x400u ? subnormal : normal;
  result = magnitude >= 0x7c00u ? special : result;
  return std::bit_cast<float>(sign | result);
}

[[gnu::always_inline]] inline Bfloat16 ToBfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

[[gnu::always_inline]] inline float ToFloat(Bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  const uint32_t quiet = (bits & 0x7fffffffu) > 0x7f800000u ? 0x400000u : 0u;
  return std::bit_cast<float>(bits | quiet);
}

/// `value` rounded to float by "round to odd": toward zero, with the last bit set when inexact.
/// Rounding the result again to a 16-bit type then equals rounding `value` once.
/// Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Trans.
/// Computers 57(4), 2008, doi:10.1109/TC.2007.70819.
[[gnu::always_inline]] inline float RoundToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const double back = static_cast<double>(nearest);
  const double magnitude = value < 0 ? -value : value;
  const double back_magnitude = back < 0 ? -back : back;
  const uint32_t toward_zero = bits - (back_magnitude > magnitude ? 1u : 0u);
  const uint32_t inexact = ((back < value) | (back > value)) ? 1u : 0u;  // false for NaN
  return std::bit_cast<float>(toward_zero | inexact);
}

}  // namespace farandole
