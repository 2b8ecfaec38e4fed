// Which floats become which 16-bit float, from the definition of rounding alone: an oracle for all
// 2^32 floats that is independent of every conversion.
//
// Rounding is monotone, so the positive floats that become one value are a run of consecutive bit
// patterns. It ends at the tie between that value and the next, which a float holds exactly in both
// formats; the tie belongs to the even one.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/half.h"

namespace farandole {

/// The floats with bits first, first + 1, ... last; all become `bits`.
struct HalfRun {
  uint32_t first = 0;
  uint32_t last = 0;
  uint16_t bits = 0;
};

/// A binary format of 16 bits.
struct HalfFormat {
  int fraction_bits;
  int min_exponent;  ///< Of normal values.

  int Infinity() const { return ((1 << (15 - fraction_bits)) - 1) << fraction_bits; }
  /// The value of non-negative bits; of infinity, what comes after the largest finite value.
  double ValueOf(int bits) const {
    const int exponent = bits >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    if (exponent == 0) return std::ldexp(fraction, min_exponent - fraction_bits);
    return std::ldexp((1 << fraction_bits) + fraction, exponent - 1 + min_exponent - fraction_bits);
  }
};

inline HalfFormat FormatOf(Float16) { return {10, -14}; }
inline HalfFormat FormatOf(Bfloat16) { return {7, -126}; }

/// The runs of the floats without sign, ascending; together they are 0 to 0x7fffffff.
inline std::vector<HalfRun> PositiveRuns(const HalfFormat& format) {
  std::vector<HalfRun> runs;
  const int infinity = format.Infinity();
  const auto tie_after = [&](int bits) {
    const double tie = (format.ValueOf(bits) + format.ValueOf(bits + 1)) / 2;
    return std::bit_cast<uint32_t>(static_cast<float>(tie));
  };
  uint32_t first = 0;
  for (int bits = 0; bits < infinity; ++bits) {
    const uint32_t last = tie_after(bits) - (bits % 2 == 0 ? 0 : 1);
    runs.push_back({first, last, static_cast<uint16_t>(bits)});
    first = last + 1;
  }
  constexpr uint32_t kInfinity = 0x7f800000;
  runs.push_back({first, kInfinity, static_cast<uint16_t>(infinity)});
  // NaN stays NaN: quiet, with the payload's upper bits.
  const int shift = 23 - format.fraction_bits;
  const int quiet = infinity | (1 << (format.fraction_bits - 1));
  for (uint32_t payload = 0; payload < (1u << format.fraction_bits); ++payload) {
    const uint32_t begin = kInfinity + (payload << shift);
    runs.push_back({begin + (payload == 0 ? 1 : 0), begin + (1u << shift) - 1,
                    static_cast<uint16_t>(static_cast<uint32_t>(quiet) | payload)});
  }
  return runs;
}

/// The runs of all floats.
inline std::vector<HalfRun> AllRuns(const HalfFormat& format) {
  std::vector<HalfRun> runs = PositiveRuns(format);
  const size_t positive = runs.size();
  for (size_t i = 0; i < positive; ++i) {
    const HalfRun& run = runs[i];
    runs.push_back({run.first | 0x80000000u, run.last | 0x80000000u,
                    static_cast<uint16_t>(run.bits | 0x8000u)});
  }
  return runs;
}

}  // namespace farandole
