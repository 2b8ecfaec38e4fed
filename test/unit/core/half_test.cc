// Compares every conversion with a slow one that rounds by exact arithmetic.
#include "core/half.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace farandole {
namespace {

/// A binary format with `fraction` fraction bits and smallest normal exponent `min_exponent`.
struct Format {
  int fraction;
  int min_exponent;
  int max_exponent;
};
constexpr Format kHalf{10, -14, 15};
constexpr Format kBrain{7, -126, 127};

/// |value| rounded to the format, ties to even, by scaling so that its last place is 1: exact in
/// double for every float.
double RoundMagnitude(const Format& format, double value) {
  if (value == 0) return 0;
  int exponent = 0;
  (void)std::frexp(value, &exponent);  // value = m * 2^exponent, 0.5 <= m < 1
  const int last_place = std::max(exponent - 1, format.min_exponent) - format.fraction;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -last_place)), last_place);
  const double limit = std::ldexp(1.0, format.max_exponent + 1);
  return rounded >= limit ? std::numeric_limits<double>::infinity() : rounded;
}

/// Bits of a finite or infinite magnitude that the format holds exactly.
uint32_t EncodeMagnitude(const Format& format, double value) {
  if (std::isinf(value)) {
    return static_cast<uint32_t>(format.max_exponent - format.min_exponent + 2) << format.fraction;
  }
  const double last_place = std::ldexp(1.0, format.min_exponent - format.fraction);
  if (value < std::ldexp(1.0, format.min_exponent))
    return static_cast<uint32_t>(value / last_place);
  int exponent = 0;
  const double significand = std::frexp(value, &exponent) * 2;  // 1 <= significand < 2
  const double fraction = std::ldexp(significand - 1, format.fraction);
  const int biased = exponent - 1 - format.min_exponent + 1;
  return (static_cast<uint32_t>(biased) << format.fraction) | static_cast<uint32_t>(fraction);
}

uint16_t Expected(const Format& format, uint16_t quiet_nan, int shift, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if (std::isnan(value)) {
    const uint32_t payload = (bits & 0x7fffffu) >> shift;
    return static_cast<uint16_t>(sign | quiet_nan | payload);
  }
  const double rounded = RoundMagnitude(format, std::fabs(static_cast<double>(value)));
  return static_cast<uint16_t>(sign | EncodeMagnitude(format, rounded));
}

uint16_t ExpectedFloat16(float value) { return Expected(kHalf, 0x7e00, 13, value); }
uint16_t ExpectedBfloat16(float value) { return Expected(kBrain, 0x7fc0, 16, value); }

/// First of the floats with bits first, first + step, ... that is converted wrongly, as text.
std::string FirstWrongFloat(uint64_t first, uint64_t step) {
  for (uint64_t bits = first; bits <= 0xffffffffu; bits += step) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (ToFloat16(value).bits != ExpectedFloat16(value)) {
      return "float16 of bits " + std::to_string(bits);
    }
    if (ToBfloat16(value).bits != ExpectedBfloat16(value)) {
      return "bfloat16 of bits " + std::to_string(bits);
    }
  }
  return "";
}

TEST(Half, EveryFloat16KeepsItsValueAsFloat) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const uint32_t exponent = (bits >> 10) & 31u;
    const double fraction = static_cast<double>(bits & 0x3ffu);
    const double magnitude = exponent == 0
                                 ? std::ldexp(fraction, -24)
                                 : std::ldexp(1024 + fraction, static_cast<int>(exponent) - 25);
    const float got = ToFloat(Float16{static_cast<uint16_t>(bits)});
    ASSERT_EQ(std::signbit(got), bits >= 0x8000u) << bits;
    if (exponent < 31) {
      ASSERT_EQ(std::fabs(static_cast<double>(got)), magnitude) << bits;
    } else {
      ASSERT_EQ(std::isinf(got), fraction == 0) << bits;
      ASSERT_EQ(std::isnan(got), fraction != 0) << bits;
    }
  }
}

TEST(Half, EveryFloat16SurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bool nan = (bits & 0x7fffu) > 0x7c00u;
    const uint32_t expected = nan ? bits | 0x200u : bits;  // made quiet
    ASSERT_EQ(ToFloat16(ToFloat(Float16{static_cast<uint16_t>(bits)})).bits, expected);
  }
}

TEST(Half, EveryBfloat16SurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const bool nan = (bits & 0x7fffu) > 0x7f80u;
    const uint32_t expected = nan ? bits | 0x40u : bits;
    const float value = ToFloat(Bfloat16{static_cast<uint16_t>(bits)});
    ASSERT_EQ(ToBfloat16(value).bits, expected);
    ASSERT_EQ(std::isnan(value), nan);
  }
}

TEST(Half, RoundsFloatsToNearestEven) {
  constexpr uint64_t kPrimeStep = 1009;  // meets every low-order bit pattern
  EXPECT_EQ(FirstWrongFloat(0, kPrimeStep), "");
}

TEST(Half, RoundsFloatsBesideEveryTieToNearestEven) {
  // A tie has the bits below the kept fraction equal to 100...0.
  for (uint64_t upper = 0; upper < 0x10000u; ++upper) {
    for (const uint64_t lower : {0x7fffu, 0x8000u, 0x8001u}) {
      ASSERT_EQ(FirstWrongFloat((upper << 16) | lower, uint64_t{1} << 32), "");
    }
  }
  for (uint64_t upper = 0; upper < 0x80000u; ++upper) {
    for (const uint64_t lower : {0x0fffu, 0x1000u, 0x1001u}) {
      ASSERT_EQ(FirstWrongFloat((upper << 13) | lower, uint64_t{1} << 32), "");
    }
  }
}

TEST(Half, RoundsDoublesOnceThroughRoundToOdd) {
  // Just above, at and just below every tie between two halves: a double rounding would fail.
  for (uint32_t bits = 0; bits < 0x7c00u; ++bits) {
    const double low = static_cast<double>(ToFloat(Float16{static_cast<uint16_t>(bits)}));
    const double next =
        bits == 0x7bffu ? 65536.0
                        : static_cast<double>(ToFloat(Float16{static_cast<uint16_t>(bits + 1)}));
    const double tie = (low + next) / 2;
    const uint32_t even = (bits & 1u) == 0 ? bits : bits + 1;
    ASSERT_EQ(ToFloat16(RoundToOdd(tie)).bits, even) << bits;
    ASSERT_EQ(ToFloat16(RoundToOdd(std::nextafter(tie, 0.0))).bits, bits);
    ASSERT_EQ(ToFloat16(RoundToOdd(std::nextafter(tie, 1e9))).bits, bits + 1);
    ASSERT_EQ(ToFloat16(RoundToOdd(-std::nextafter(tie, 1e9))).bits, (bits + 1) | 0x8000u);
  }
}

TEST(Half, RoundToOddKeepsWhatAFloatHoldsAndWhatNoFloatHolds) {
  EXPECT_EQ(RoundToOdd(1.5), 1.5f);
  EXPECT_EQ(RoundToOdd(-0.0), -0.0f);
  EXPECT_TRUE(std::isnan(RoundToOdd(std::nan(""))));
  EXPECT_TRUE(std::isinf(RoundToOdd(std::numeric_limits<double>::infinity())));
  EXPECT_EQ(RoundToOdd(1e300), std::numeric_limits<float>::max());  // odd already
  EXPECT_EQ(ToFloat16(RoundToOdd(1e300)).bits, 0x7c00u);
}

}  // namespace
}  // namespace farandole
