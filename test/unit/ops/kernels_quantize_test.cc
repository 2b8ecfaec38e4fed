// Quantize and Dequantize, for every instruction set this processor has, beside plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ops/cpu/kernels.h"

namespace farandole {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Quantized {
  std::vector<std::byte> bytes;
  std::vector<float> residual;
};

Quantized QuantizeBy(const CpuKernels& kernels, const std::vector<float>& values,
                     std::vector<float> residual, double prescale) {
  const auto count = static_cast<int64_t>(values.size());
  Quantized result{std::vector<std::byte>(static_cast<size_t>(QuantizedBytes(count))),
                   std::move(residual)};
  kernels.Quantize(result.bytes.data(), values.data(), result.residual.data(), count, prescale);
  return result;
}

std::vector<float> DequantizeBy(const CpuKernels& kernels, const std::vector<std::byte>& bytes,
                                size_t count, float factor = 1.0f) {
  std::vector<float> values(count);
  kernels.Dequantize(values.data(), bytes.data(), static_cast<int64_t>(count), factor, false);
  return values;
}

/// As the contract of CpuKernels says it, element by element, for finite values of common size.
Quantized Expected(const std::vector<float>& values, std::vector<float> residual, float prescale) {
  Quantized result{{}, std::move(residual)};
  for (size_t begin = 0; begin < values.size(); begin += kQuantizedBlock) {
    const size_t end = std::min(values.size(), begin + size_t{kQuantizedBlock});
    float most = 0;
    for (size_t i = begin; i < end; ++i) {
      result.residual[i] = prescale * values[i] + result.residual[i];
      most = std::max(most, std::fabs(result.residual[i]));
    }
    const float scale = most / 127.0f;
    const auto* const raw = reinterpret_cast<const std::byte*>(&scale);
    result.bytes.insert(result.bytes.end(), raw, raw + sizeof scale);
    for (size_t i = begin; i < end; ++i) {
      const float q = std::nearbyint(result.residual[i] * (127.0f / most));
      result.bytes.push_back(static_cast<std::byte>(static_cast<int8_t>(q)));
      const float sent = q * scale;
      result.residual[i] = result.residual[i] - sent;
    }
  }
  return result;
}

std::vector<float> Normal(size_t count, uint64_t seed, float deviation = 1.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(QuantizeKernels, RoundBlocksAsTheContractSays) {
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    for (const size_t count : {1u, 7u, 255u, 256u, 257u, 1000u, 4096u}) {
      for (const float prescale : {1.0f, 0.3f}) {
        const std::vector<float> values = Normal(count, count), left = Normal(count, 9, 0.01f);
        const Quantized expected = Expected(values, left, prescale);
        const Quantized got = QuantizeBy(*kernels, values, left, static_cast<double>(prescale));
        EXPECT_EQ(got.bytes, expected.bytes) << kernels->name() << ", " << count;
        EXPECT_EQ(got.residual, expected.residual) << kernels->name() << ", " << count;
      }
    }
  }
}

TEST(QuantizeKernels, GiveBackWhatTheResidualLacks) {
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    const std::vector<float> values = Normal(1000, 3);
    const Quantized got = QuantizeBy(*kernels, values, std::vector<float>(1000), 1.0);
    const std::vector<float> back = DequantizeBy(*kernels, got.bytes, 1000);
    for (size_t i = 0; i < 1000; ++i) {
      ASSERT_NEAR(back[i] + got.residual[i], values[i], 1e-6f) << kernels->name() << ", " << i;
      ASSERT_LE(std::fabs(got.residual[i]), 4.5f / 254.0f) << kernels->name() << ", " << i;
    }
  }
}

TEST(QuantizeKernels, AddAndScaleInFloat) {
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    const Quantized got = QuantizeBy(*kernels, Normal(300, 5), std::vector<float>(300), 1.0);
    const std::vector<float> plain = DequantizeBy(*kernels, got.bytes, 300);
    std::vector<float> sum(300, 2.0f);
    kernels->Dequantize(sum.data(), got.bytes.data(), 300, 1.0f, true);
    const std::vector<float> half = DequantizeBy(*kernels, got.bytes, 300, 0.5f);
    for (size_t i = 0; i < 300; ++i) {
      ASSERT_EQ(sum[i], 2.0f + plain[i]) << kernels->name();
      ASSERT_EQ(half[i], 0.5f * plain[i]) << kernels->name();
    }
  }
}

TEST(QuantizeKernels, ShowWhatIsNotFiniteInItsBlockAlone) {
  for (const float bad : {kInfinity, -kInfinity, std::nanf(""), 0x1p127f}) {
    for (const CpuKernels* kernels : SupportedCpuKernels()) {
      std::vector<float> values = Normal(600, 6);
      values[300] = bad;
      const Quantized got = QuantizeBy(*kernels, values, std::vector<float>(600), 1.0);
      const std::vector<float> back = DequantizeBy(*kernels, got.bytes, 600);
      for (size_t i = 0; i < 600; ++i) {
        const bool is_hit = i >= 256 && i < 512;
        ASSERT_EQ(std::isnan(back[i]), is_hit) << kernels->name() << ", " << bad << ", " << i;
        ASSERT_TRUE(std::isfinite(got.residual[i])) << kernels->name() << ", " << bad;
        ASSERT_TRUE(!is_hit || got.residual[i] == 0.0f) << kernels->name() << ", " << bad;
      }
    }
  }
}

TEST(QuantizeKernels, KeepWhatIsTooSmallToSend) {
  for (const CpuKernels* kernels : SupportedCpuKernels()) {
    const std::vector<float> values(300, 0x1p-102f);
    Quantized got = QuantizeBy(*kernels, values, std::vector<float>(300), 1.0);
    EXPECT_EQ(DequantizeBy(*kernels, got.bytes, 300), std::vector<float>(300, 0.0f));
    EXPECT_EQ(got.residual, values);
    for (int i = 0; i < 3; ++i) got = QuantizeBy(*kernels, values, got.residual, 1.0);
    EXPECT_EQ(DequantizeBy(*kernels, got.bytes, 300)[299], 0x1p-100f) << kernels->name();
  }
}

}  // namespace
}  // namespace farandole
