// The conversions inside the kernels, for every instruction set this processor has.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "core/half.h"
#include "ops/cpu/kernels.h"
#include "test/unit/ops/half_runs.h"

namespace farandole {
namespace {

constexpr DType TypeOf(Float16) { return DType::kFloat16; }
constexpr DType TypeOf(Bfloat16) { return DType::kBfloat16; }

template <class Half>
class HalfKernels : public ::testing::Test {};

class HalfNames {
 public:
  template <class Half>
  static std::string GetName(int) {
    return std::string(Name(TypeOf(Half())));
  }
};
using HalfTypes = ::testing::Types<Float16, Bfloat16>;
TYPED_TEST_SUITE(HalfKernels, HalfTypes, HalfNames);

template <class Half>
std::vector<Half> AllHalves() {
  std::vector<Half> halves(0x10000);
  for (uint32_t i = 0; i < 0x10000u; ++i) halves[i].bits = static_cast<uint16_t>(i);
  return halves;
}

TYPED_TEST(HalfKernels, WidenEveryValueExactlyAndNanAsHalfDoes) {
  const HalfFormat format = FormatOf(TypeParam());
  const auto halves = AllHalves<TypeParam>();
  std::vector<float> floats(halves.size());
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    kernels->Unpack(floats.data(), DType::kFloat32, halves.data(), TypeOf(TypeParam()), 0x10000);
    for (int i = 0; i < 0x10000; ++i) {
      const float got = floats[static_cast<size_t>(i)];
      const int magnitude = i & 0x7fff;
      const std::string where = std::string(kernels->name()) + ", bits " + std::to_string(i);
      ASSERT_EQ(std::signbit(got), i >= 0x8000) << where;
      ASSERT_EQ(std::isnan(got), magnitude > format.Infinity()) << where;
      ASSERT_EQ(std::isinf(got), magnitude == format.Infinity()) << where;
      ASSERT_EQ(std::bit_cast<uint32_t>(got),
                std::bit_cast<uint32_t>(ToFloat(halves[static_cast<size_t>(i)])))
          << where;
      if (magnitude >= format.Infinity()) continue;
      ASSERT_EQ(std::fabs(static_cast<double>(got)), format.ValueOf(magnitude)) << where;
    }
  }
}

/// Where every run begins and ends: the numbers beside each tie, and the ties.
TYPED_TEST(HalfKernels, RoundToNearestEvenOnBothSidesOfEveryTie) {
  std::vector<float> floats;
  std::vector<uint16_t> expected;
  for (const HalfRun& run : AllRuns(FormatOf(TypeParam()))) {
    for (const uint32_t bits : {run.first, run.first + (run.last - run.first) / 2, run.last}) {
      floats.push_back(std::bit_cast<float>(bits));
      expected.push_back(run.bits);
    }
  }
  std::vector<uint16_t> got(floats.size());
  const auto count = static_cast<int64_t>(floats.size());
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    kernels->Pack(got.data(), TypeOf(TypeParam()), floats.data(), DType::kFloat32, count, 1.0);
    const auto wrong = std::mismatch(got.begin(), got.end(), expected.begin()).first - got.begin();
    ASSERT_EQ(wrong, count) << kernels->name() << ", float of bits "
                            << std::bit_cast<uint32_t>(floats[static_cast<size_t>(wrong)]);
  }
}

TYPED_TEST(HalfKernels, ScaleInFloatBeforeTheOneRounding) {
  std::vector<float> floats;
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 65'537) {
    floats.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  }
  std::vector<uint16_t> got(floats.size());
  const auto count = static_cast<int64_t>(floats.size());
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    kernels->Pack(got.data(), TypeOf(TypeParam()), floats.data(), DType::kFloat32, count, 0.3);
    for (size_t i = 0; i < floats.size(); ++i) {
      const float scaled = floats[i] * 0.3f;
      uint16_t expected = 0;
      if constexpr (std::is_same_v<TypeParam, Float16>) {
        expected = ToFloat16(scaled).bits;
      } else {
        expected = ToBfloat16(scaled).bits;
      }
      ASSERT_EQ(got[i], expected) << kernels->name() << ", " << floats[i];
    }
  }
}

}  // namespace
}  // namespace farandole
