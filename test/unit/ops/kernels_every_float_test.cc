// All floats to both 16-bit types, by core/half.h and by the kernels of every instruction set this
// processor has.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "core/half.h"
#include "ops/cpu/kernels.h"
#include "test/unit/ops/half_runs.h"

namespace farandole {
namespace {

constexpr uint64_t kBlock = 4096;
using FloatBlock = std::array<float, kBlock>;
using HalfBlock = std::array<uint16_t, kBlock>;
using Narrow = std::function<void(HalfBlock& to, const FloatBlock& from, int64_t count)>;

/// Whether all of the first `count` are `bits`. A loop for the vectoriser.
bool AllAre(uint16_t bits, const HalfBlock& block, uint64_t count) {
  uint16_t difference = 0;
  for (uint64_t i = 0; i < count; ++i) difference |= static_cast<uint16_t>(block[i] ^ bits);
  return difference == 0;
}

/// One kind of rounding, and its results.
struct Rounding {
  std::string by;
  Narrow narrow;
  uint64_t wrong_blocks = 0;
  uint32_t first_wrong = 0;  // bits of its first float
};

/// Of the 256 floats that differ in their last byte alone. Both formats drop at least 13 bits, so
/// the last byte only says whether something remains behind the bits that decide: these four show
/// all that the 256 could, at the edges of a run of equal results as well.
constexpr uint32_t kLastBytes[] = {0, 1, 0x80, 0xff};

/// Calls visit(floats, count, bits) for every float with one of kLastBytes, by blocks that become
/// one value. @return how many these are.
template <class Visit>
uint64_t VisitEveryFloat(const HalfFormat& format, const Visit& visit) {
  uint64_t visited = 0;
  FloatBlock floats{};
  for (const HalfRun& run : AllRuns(format)) {
    uint64_t count = 0;
    const auto flush = [&] {
      if (count > 0) visit(floats, count, run.bits);
      visited += std::exchange(count, 0);
    };
    for (uint64_t base = run.first & ~0xffu; base <= run.last; base += 0x100) {
      for (const uint32_t last_byte : kLastBytes) {
        const uint64_t bits = base | last_byte;
        if (bits < run.first || bits > run.last) continue;
        floats[count++] = std::bit_cast<float>(static_cast<uint32_t>(bits));
        if (count == kBlock) flush();
      }
    }
    flush();
  }
  return visited;
}

void ExpectEveryFloatIsRounded(const HalfFormat& format, std::vector<Rounding> roundings) {
  HalfBlock halves{};
  const auto check = [&](const FloatBlock& floats, uint64_t count, uint16_t bits) {
    for (Rounding& rounding : roundings) {
      rounding.narrow(halves, floats, static_cast<int64_t>(count));
      if (AllAre(bits, halves, count)) continue;
      if (rounding.wrong_blocks == 0) rounding.first_wrong = std::bit_cast<uint32_t>(floats[0]);
      ++rounding.wrong_blocks;
    }
  };
  EXPECT_EQ(VisitEveryFloat(format, check), (uint64_t{1} << 24) * std::size(kLastBytes));
  for (const Rounding& rounding : roundings) {
    EXPECT_EQ(rounding.wrong_blocks, 0u) << rounding.by << ", first among the " << kBlock
                                         << " floats from bits " << rounding.first_wrong;
  }
}

std::vector<Rounding> EveryInstructionSet(DType wire) {
  std::vector<Rounding> all;
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    all.push_back({kernels->name(), [=](HalfBlock& to, const FloatBlock& from, int64_t count) {
                     kernels->Pack(to.data(), wire, from.data(), DType::kFloat32, count, 1.0);
                   }});
  }
  return all;
}

TEST(EveryFloat, IsRoundedToFloat16) {
  std::vector<Rounding> roundings = EveryInstructionSet(DType::kFloat16);
  roundings.push_back({"core/half.h", [](HalfBlock& to, const FloatBlock& from, int64_t count) {
                         for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
                           to[i] = ToFloat16(from[i]).bits;
                         }
                       }});
  ExpectEveryFloatIsRounded(FormatOf(Float16()), std::move(roundings));
}

TEST(EveryFloat, IsRoundedToBfloat16) {
  std::vector<Rounding> roundings = EveryInstructionSet(DType::kBfloat16);
  roundings.push_back({"core/half.h", [](HalfBlock& to, const FloatBlock& from, int64_t count) {
                         for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
                           to[i] = ToBfloat16(from[i]).bits;
                         }
                       }});
  ExpectEveryFloatIsRounded(FormatOf(Bfloat16()), std::move(roundings));
}

}  // namespace
}  // namespace farandole
