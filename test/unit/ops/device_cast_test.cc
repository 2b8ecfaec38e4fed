// The body of the cast kernel, run on the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "ops/cpu/kernels.h"
#include "ops/gpu/cuda/cast.h"
#include "test/support/cast_cases.h"
#include "test/support/cast_on_host.h"

namespace farandole {
namespace {

void ExpectAsPlain(const std::vector<CastCase>& cases) {
  for (const CastCase& wanted : cases) {
    EXPECT_EQ(CompareCasts(wanted, RunCastsOnHost, RunCastsPlainly, /*seed=*/1), "");
  }
}

TEST(CastOnHost, CastsAndScalesEveryPairOfTypesAsAPlainLoopDoes) {
  ExpectAsPlain(CasesOfEveryPair());
}

TEST(CastOnHost, WorksFromEveryAlignmentToEveryOther) { ExpectAsPlain(CasesOfEveryAlignment()); }

TEST(CastOnHost, TakesAnyNumberOfItems) { ExpectAsPlain(CasesOfAnyNumber()); }

TEST(CastOnHost, CutsLargeTensorsIntoSlicesWithoutASeam) {
  for (const CastSpec& spec : CastSpecsByShape()) {
    ExpectAsPlain({{spec, {{300007}, {1}, {70001, 3, 3}}}});
  }
  ExpectAsPlain({{{DType::kFloat32, DType::kFloat16}, {{9000001, 1, 2}}}});
}

TEST(CastOnHost, FillsAbsentInputsWithTheIdentity) {
  ExpectAsPlain(CasesOfAbsentInputs());
  ExpectAsPlain({{{DType::kFloat64, DType::kFloat16, 1.0, 1, ReduceOp::kMin}, {{77, 0, 5, true}}}});
}

TEST(CastOnHost, AgreesWithAPlainLoopOnEveryHalfAndOnTheEdgesOfEveryFloat) {
  EXPECT_EQ(CompareCastsOfSpecialElements(RunCastsOnHost, RunCastsPlainly), "");
}

TEST(CastOnHost, ScalesInPlace) {
  std::vector<float> values(10001, 3.0f);
  const CastItem item{values.data(), values.data(), 10001};
  ASSERT_TRUE(CastOnHost({&item, 1}, {DType::kFloat32, DType::kFloat32, 0.5}).ok());
  EXPECT_EQ(values, std::vector<float>(10001, 1.5f));
}

/// Every bit, NaN's too, is that of the CPU planes.
class AsTheCpuKernels : public ::testing::TestWithParam<DType> {
 protected:
  AsTheCpuKernels() : special_(SpecialElements(GetParam())) {}
  int64_t count() const { return static_cast<int64_t>(special_.size()) / SizeOf(GetParam()); }
  CastBytes Cast(DType to, double scale) const {
    CastBytes out(static_cast<size_t>(count() * SizeOf(to)));
    const CastItem item{special_.data(), out.data(), count()};
    const Status status = CastOnHost({&item, 1}, {GetParam(), to, scale});
    EXPECT_TRUE(status.ok()) << status.ToString();
    return out;
  }
  CastBytes special_;
};

TEST_P(AsTheCpuKernels, PacksToEveryWireType) {
  for (const WireFormat format : {WireFormat::kSame, WireFormat::kFloat16, WireFormat::kBfloat16}) {
    const DType wire = WireDType(GetParam(), format);
    for (const double prescale : {1.0, 0.1, 3e4}) {
      CastBytes expected(static_cast<size_t>(count() * SizeOf(wire)));
      BestCpuKernels().Pack(expected.data(), wire, special_.data(), GetParam(), count(), prescale);
      EXPECT_TRUE(Cast(wire, prescale) == expected) << Name(wire) << " " << prescale;
    }
  }
}

TEST_P(AsTheCpuKernels, MultipliesTwiceBeforeTheOneRounding) {
  CastBytes expected(special_.size()), out(special_.size());
  BestCpuKernels().Scale(expected.data(), special_.data(), GetParam(), count(), 0.1, 3e4);
  const CastItem item{special_.data(), out.data(), count()};
  const CastSpec spec{.from = GetParam(), .to = GetParam(), .scale = 0.1, .rescale = 3e4};
  ASSERT_TRUE(CastOnHost({&item, 1}, spec).ok());
  EXPECT_TRUE(out == expected);
}

class HalfAsTheCpuKernels : public AsTheCpuKernels {};

TEST_P(HalfAsTheCpuKernels, UnpacksToEveryDType) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    CastBytes expected(static_cast<size_t>(count() * SizeOf(dtype)));
    BestCpuKernels().Unpack(expected.data(), dtype, special_.data(), GetParam(), count());
    EXPECT_TRUE(Cast(dtype, 1.0) == expected) << Name(dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryFloat, AsTheCpuKernels,
                         ::testing::Values(DType::kFloat16, DType::kBfloat16, DType::kFloat32,
                                           DType::kFloat64),
                         [](const auto& param) { return std::string(Name(param.param)); });

INSTANTIATE_TEST_SUITE_P(EveryHalf, HalfAsTheCpuKernels,
                         ::testing::Values(DType::kFloat16, DType::kBfloat16),
                         [](const auto& param) { return std::string(Name(param.param)); });

TEST(CastOnHost, ScalesIntegersAsTheCpuKernels) {
  for (const DType dtype :
       {DType::kBool, DType::kUint8, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
    for (const auto& [scale, again] :
         {std::pair{1.0, 1.0}, std::pair{0.3, 1.0}, std::pair{-7.5, 0.1}, std::pair{1e300, 1e-3}}) {
      const CastBytes in = SpecialElements(DType::kFloat64);  // bits as good as any
      CastBytes expected(in.size());
      CastBytes out(in.size());
      const int64_t count = static_cast<int64_t>(in.size()) / SizeOf(dtype);
      BestCpuKernels().Scale(expected.data(), in.data(), dtype, count, scale, again);
      const CastItem item{in.data(), out.data(), count};
      const CastSpec spec{.from = dtype, .to = dtype, .scale = scale, .rescale = again};
      ASSERT_TRUE(CastOnHost({&item, 1}, spec).ok());
      EXPECT_TRUE(out == expected) << Name(dtype) << " " << scale;
    }
  }
}

TEST(CastOnHost, ClampsAScaledIntegerToItsOwnRangeBeforeItWidensIt) {
  const int8_t signed_in[] = {-100, -2, 0, 3, 100};
  const uint8_t unsigned_in[] = {0, 1, 100, 200, 255};
  int64_t out[5];
  const CastItem from_signed{signed_in, out, 5}, from_unsigned{unsigned_in, out, 5};
  ASSERT_TRUE(CastOnHost({&from_signed, 1}, {DType::kInt8, DType::kInt64, 2.5}).ok());
  EXPECT_THAT(out, ::testing::ElementsAre(-128, -5, 0, 7, 127));
  ASSERT_TRUE(CastOnHost({&from_unsigned, 1}, {DType::kUint8, DType::kInt64, -2.5}).ok());
  EXPECT_THAT(out, ::testing::Each(0));
  ASSERT_TRUE(CastOnHost({&from_unsigned, 1}, {DType::kUint8, DType::kInt64, 2.5}).ok());
  EXPECT_THAT(out, ::testing::ElementsAre(0, 2, 250, 255, 255));
}

Status Refusal(const CastItem& item, const CastSpec& spec) { return CastOnHost({&item, 1}, spec); }

TEST(CastOnHost, RefusesWhatNoKernelCanDo) {
  alignas(16) float memory[4] = {};
  const CastSpec cast{DType::kFloat32, DType::kFloat16};
  auto* const odd = reinterpret_cast<std::byte*>(memory) + 1;
  const Status refusals[] = {
      Refusal({memory, memory, 1}, {DType::kFloat32, DType::kInt32}),
      Refusal({memory, memory, 1}, {DType::kInt32, DType::kInt8}),
      Refusal({memory, memory, 1}, {DType::kFloat32, DType::kFloat32, 1.0, 2}),
      Refusal({memory, memory, 1}, {DType::kInt32, DType::kInt32, 1.0, 0}),
      Refusal({memory, memory, 1},
              {.from = DType::kFloat32, .to = DType::kFloat16, .rescale = 2.0}),
      Refusal({memory, memory, -1}, cast),
      Refusal({memory, nullptr, 1}, cast),
      Refusal({odd, memory, 1}, cast),
      Refusal({memory, odd, 1}, cast),
      Refusal({nullptr, odd, 1}, {DType::kFloat32, DType::kFloat32})};
  for (const Status& status : refusals) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
  }
  EXPECT_EQ(refusals[7].message(),
            "a cast of tensors, float32 -> float16, has input memory that is not aligned to its "
            "elements at number 0");
}

TEST(SliceElements, OccupiesSmallDevicesAndLargeOnes) {
  EXPECT_EQ(SliceElements(1 << 18, 4, 132), 1024);            // 1 MiB: 256 blocks of 4 KiB
  EXPECT_EQ(SliceElements(int64_t{25} << 18, 4, 132), 4096);  // 25 MiB: a whole step
  EXPECT_EQ(SliceElements(int64_t{1} << 28, 4, 132), 16384);  // 1 GiB: four
}

TEST(SliceElements, NeverNeedsMoreBlocksThanALaunchTakes) {
  const int64_t total = int64_t{1} << 60;
  EXPECT_LE(total / SliceElements(total, 8, 132), int64_t{1} << 30);
}

TEST(FillCastTable, CountsBlocksOfMoreThanTwoToThe31Elements) {
  const int64_t count = (int64_t{5} << 31) + 3;
  float* const somewhere = reinterpret_cast<float*>(uintptr_t{4096});
  const CastItem items[] = {{somewhere, somewhere, count}, {somewhere, somewhere, 1}};
  const Result<CastJob> job = MakeCastJob(items, {DType::kFloat32, DType::kFloat32, 2.0});
  ASSERT_TRUE(job.ok());
  SmallCastTable table;
  const uint32_t blocks = FillCastTable(job.value(), job.value().items, 132, &table);
  EXPECT_EQ(int64_t{table.first_block[1]}, (count + table.slice - 1) / table.slice);
  EXPECT_EQ(blocks, table.first_block[1] + 1);
}

}  // namespace
}  // namespace farandole
