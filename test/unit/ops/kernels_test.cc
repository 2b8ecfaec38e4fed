#include "ops/cpu/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "core/half.h"

namespace farandole {
namespace {

constexpr DType kDTypes[] = {DType::kBool,    DType::kUint8,  DType::kInt8,    DType::kInt16,
                             DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBfloat16,
                             DType::kFloat32, DType::kFloat64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum,   ReduceOp::kAverage, ReduceOp::kMin,
                             ReduceOp::kMax,   ReduceOp::kProduct, ReduceOp::kBitAnd,
                             ReduceOp::kBitOr, ReduceOp::kBitXor};

using Bytes = std::vector<std::byte>;

Bytes RandomBytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

bool IsNan(DType dtype, const std::byte* element) {
  uint64_t bits = 0;
  std::memcpy(&bits, element, static_cast<size_t>(SizeOf(dtype)));
  switch (dtype) {
    case DType::kFloat16:
      return (bits & 0x7fffu) > 0x7c00u;
    case DType::kBfloat16:
      return (bits & 0x7fffu) > 0x7f80u;
    case DType::kFloat32:
      return (bits & 0x7fffffffu) > 0x7f800000u;
    case DType::kFloat64:
      return (bits & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
    default:
      return false;
  }
}

/// Equal bits, or NaN in both.
bool SameElements(DType dtype, const Bytes& a, const Bytes& b) {
  const size_t size = static_cast<size_t>(SizeOf(dtype));
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); i += size) {
    if (std::memcmp(&a[i], &b[i], size) == 0) continue;
    if (!IsNan(dtype, &a[i]) || !IsNan(dtype, &b[i])) return false;
  }
  return true;
}

std::vector<const void*> PointersTo(const std::vector<Bytes>& sources) {
  std::vector<const void*> pointers;
  for (const Bytes& source : sources) pointers.push_back(source.data());
  return pointers;
}

template <class T>
std::vector<T> Reduce(const std::vector<std::vector<T>>& sources, DType wire, ReduceOp op,
                      double postscale = 1.0, int64_t divisor = 0) {
  std::vector<T> result(sources[0].size());
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  const ReduceSpec spec{wire, op, divisor == 0 ? static_cast<int64_t>(sources.size()) : divisor,
                        postscale};
  BestCpuKernels().Reduce(result.data(), pointers, static_cast<int64_t>(result.size()), spec);
  return result;
}

/// Elements whose exponent is all ones, and the nearest ones that are not, as bits.
struct Extremes {
  DType dtype;
  std::vector<uint64_t> bad;
  std::vector<uint64_t> good;
};

std::vector<Extremes> AllExtremes() {
  const auto of = [](DType dtype, uint64_t inf, uint64_t sign) {
    // Infinity, its smallest and largest nan; zero, the smallest and largest denormal, the largest.
    return Extremes{dtype,
                    {inf, inf | sign, inf + 1, sign - 1, inf | sign | 1, sign | (sign - 1)},
                    {0, sign, 1, sign | 1, inf - 1, sign | (inf - 1), inf >> 1}};
  };
  return {of(DType::kFloat16, 0x7c00, 0x8000), of(DType::kBfloat16, 0x7f80, 0x8000),
          of(DType::kFloat32, 0x7f800000, 0x80000000),
          of(DType::kFloat64, 0x7ff0000000000000, 0x8000000000000000)};
}

TEST(FindNonFinite, FindsTheFirstAtEveryPositionOfEveryLength) {
  for (const CpuKernels* const kernels : SupportedCpuKernels()) {
    for (const Extremes& one : AllExtremes()) {
      const auto size = static_cast<size_t>(SizeOf(one.dtype));
      for (const int64_t count : {0, 1, 2, 7, 31, 64, 100, 1023, 1024, 1025, 2100}) {
        Bytes data(static_cast<size_t>(count) * size);
        const auto put = [&](int64_t i, uint64_t bits) {
          std::memcpy(data.data() + static_cast<size_t>(i) * size, &bits, size);
        };
        for (int64_t i = 0; i < count; ++i) {
          put(i, one.good[static_cast<size_t>(i) % one.good.size()]);
        }
        ASSERT_EQ(kernels->FindNonFinite(data.data(), one.dtype, count), count) << Name(one.dtype);
        for (int64_t at = count - 1; at >= 0; --at) {  // those found before stay, behind it
          put(at, one.bad[static_cast<size_t>(at) % one.bad.size()]);
          ASSERT_EQ(kernels->FindNonFinite(data.data(), one.dtype, count), at)
              << kernels->name() << " " << Name(one.dtype) << " of " << count;
        }
      }
    }
  }
}

TEST(FindNonFinite, ReadsNothingBehindTheLastAndFindsNothingInIntegers) {
  const std::vector<float> data = {1.0f, 2.0f, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(BestCpuKernels().FindNonFinite(data.data(), DType::kFloat32, 2), 2);
  EXPECT_EQ(BestCpuKernels().FindNonFinite(data.data(), DType::kInt32, 3), 3);
}

/// The counts cover whole blocks, whole vectors and what is left over.
class KernelsAgree : public ::testing::TestWithParam<int64_t> {
 protected:
  int64_t count() const { return GetParam(); }
  Bytes Random(DType dtype, uint64_t seed) const {
    return RandomBytes(static_cast<size_t>(count() * SizeOf(dtype)), seed);
  }
  std::vector<Bytes> Sources(DType dtype, size_t number) const {
    std::vector<Bytes> sources;
    for (size_t k = 0; k < number; ++k) sources.push_back(Random(dtype, k + 7));
    return sources;
  }
  /// Whether run(kernels, result) gives every instruction set the elements that the last of them,
  /// which every processor has, gives.
  template <class Run>
  ::testing::AssertionResult AllAgree(DType dtype, const Run& run) const {
    Bytes plain = Random(dtype, 98);
    run(*SupportedCpuKernels().back(), plain);
    for (const CpuKernels* kernels : SupportedCpuKernels()) {
      Bytes result = Random(dtype, 99);
      run(*kernels, result);
      if (!SameElements(dtype, result, plain)) {
        return ::testing::AssertionFailure() << kernels->name() << " gives other bits";
      }
    }
    return ::testing::AssertionSuccess();
  }
};

TEST_P(KernelsAgree, OnEveryReduction) {
  for (const DType dtype : kDTypes) {
    for (const ReduceOp op : kOps) {
      if (IsFloating(dtype) && IsBitwise(op)) continue;
      for (const size_t source_count : {1u, 2u, 3u, 5u}) {
        const std::vector<Bytes> sources = Sources(dtype, source_count);
        const std::vector<const void*> pointers = PointersTo(sources);
        for (const double postscale : {1.0, -0.7}) {
          const ReduceSpec spec{dtype, op, 5, postscale};
          ASSERT_TRUE(AllAgree(dtype,
                               [&](const CpuKernels& kernels, Bytes& result) {
                                 kernels.Reduce(result.data(), pointers, count(), spec);
                               }))
              << Name(dtype) << ' ' << Name(op) << ' ' << source_count << ' ' << postscale;
        }
      }
    }
  }
}

/// What the sources with numbers `present` say in one place, added up by the tree over their nodes.
template <class T>
std::optional<T> SumOfNode(std::span<const SlotRange> nodes, std::span<const int> present,
                           const std::vector<T>& values, int begin, int width) {
  std::vector<size_t> inside;
  for (size_t k = 0; k < present.size(); ++k) {
    const int slot = nodes[static_cast<size_t>(present[k])].begin;
    if (begin <= slot && slot < begin + width) inside.push_back(k);
  }
  if (inside.empty()) return {};
  if (inside.size() == 1) return values[inside[0]];
  const std::optional<T> left = SumOfNode(nodes, present, values, begin, width / 2);
  const std::optional<T> right = SumOfNode(nodes, present, values, begin + width / 2, width / 2);
  if (left && right) return *left + *right;
  return left ? left : right;
}

template <class T>
std::vector<T> SumsOfTree(std::span<const SlotRange> nodes, std::span<const int> present,
                          const std::vector<Bytes>& sources, int64_t count) {
  std::vector<T> sums;
  for (int64_t i = 0; i < count; ++i) {
    std::vector<T> values(sources.size());
    for (size_t k = 0; k < sources.size(); ++k) {
      std::memcpy(&values[k], sources[k].data() + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    }
    sums.push_back(*SumOfNode(nodes, present, values, 0, kMostSlots));
  }
  return sums;
}

TEST_P(KernelsAgree, OnEveryTreeOfSlots) {
  std::mt19937_64 random(static_cast<uint64_t>(count()));
  std::vector<uint8_t> merges;
  for (int tree = 0; tree < 24; ++tree) {
    const int slots = tree < 20 ? 1 + static_cast<int>(random() % 40) : kMostSlots - tree;
    const int ranks = 1 + static_cast<int>(random() % static_cast<uint64_t>(std::min(slots, 24)));
    const std::vector<SlotRange> nodes = SlotRanges(slots, ranks);
    std::vector<int> present;
    for (int k = 0; k < ranks; ++k) {
      if (tree % 2 == 0 || random() % 4 > 0 || k + 1 == ranks) present.push_back(k);
    }
    FindMerges(nodes, present, merges);
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16}) {
      std::vector<Bytes> sources = Sources(dtype, present.size());
      const auto size = static_cast<size_t>(SizeOf(dtype));
      for (Bytes& source : sources) {  // around 1: sums depend on their order
        for (size_t i = size - 1; i < source.size(); i += size) source[i] = std::byte{0x3f};
      }
      const std::vector<const void*> pointers = PointersTo(sources);
      for (const double postscale : {1.0, -0.7}) {
        const ReduceSpec spec{dtype, ReduceOp::kAverage, postscale == 1.0 ? 1 : ranks, postscale,
                              merges};
        ASSERT_TRUE(AllAgree(dtype,
                             [&](const CpuKernels& kernels, Bytes& result) {
                               kernels.Reduce(result.data(), pointers, count(), spec);
                             }))
            << Name(dtype) << ": " << ranks << " ranks of " << slots << " slots";
      }
      Bytes result = sources[0];
      BestCpuKernels().Reduce(result.data(), pointers, count(),
                              {dtype, ReduceOp::kSum, 1, 1.0, merges});
      const auto is_right = [&]<class T>(const std::vector<T>& sums) {
        return std::memcmp(sums.data(), result.data(), result.size()) == 0;
      };
      EXPECT_TRUE(dtype == DType::kFloat32
                      ? is_right(SumsOfTree<float>(nodes, present, sources, count()))
                  : dtype == DType::kFloat64
                      ? is_right(SumsOfTree<double>(nodes, present, sources, count()))
                      : true)
          << Name(dtype) << ": " << ranks << " ranks of " << slots << " slots";
    }
  }
}

TEST(SlotRanges, AreNodesThatSplitTheLargest) {
  const auto of = [](std::vector<int> begins) {
    std::vector<SlotRange> ranges;
    for (size_t k = 0; k + 1 < begins.size(); ++k) ranges.push_back({begins[k], begins[k + 1]});
    return ranges;
  };
  EXPECT_EQ(SlotRanges(8, 1), of({0, 8}));
  EXPECT_EQ(SlotRanges(8, 3), of({0, 2, 4, 8}));
  EXPECT_EQ(SlotRanges(6, 2), of({0, 4, 6}));
  EXPECT_EQ(SlotRanges(6, 4), of({0, 1, 2, 4, 6}));
  EXPECT_EQ(SlotRanges(7, 7), of({0, 1, 2, 3, 4, 5, 6, 7}));
  for (int slots = 1; slots <= 40; ++slots) {
    for (int ranks = 1; ranks <= slots; ++ranks) {
      for (const SlotRange range : SlotRanges(slots, ranks)) {
        EXPECT_TRUE(IsSlotNode(range, slots)) << range.begin << " to " << range.end;
      }
    }
  }
  EXPECT_FALSE(IsSlotNode({2, 6}, 8));
  EXPECT_FALSE(IsSlotNode({0, 6}, 8));
  EXPECT_FALSE(IsSlotNode({0, 3}, 8));
}

TEST_P(KernelsAgree, OnScalarProductsAndCombinations) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Bytes a = Random(dtype, 5);
    Bytes b = Random(dtype, 6);
    ASSERT_TRUE(AllAgree(dtype, [&](const CpuKernels& kernels, Bytes& result) {
      result = a;
      kernels.Combine(result.data(), b.data(), dtype, count(), 0.3, -1.7);
    })) << Name(dtype);
    const auto size = static_cast<size_t>(SizeOf(dtype));
    for (size_t i = size - 1; i < a.size(); i += size) {  // around 1: sums depend on their order
      a[i] = b[i] = std::byte{0x3f};
    }
    Bytes plain;
    for (const CpuKernels* kernels : SupportedCpuKernels()) {
      const ScalarProducts sums = kernels->MultiplyAndSum(a.data(), b.data(), dtype, count());
      Bytes got(3 * sizeof(double));
      std::memcpy(got.data(), &sums, sizeof sums);
      if (plain.empty()) plain = got;
      EXPECT_TRUE(SameElements(DType::kFloat64, got, plain)) << kernels->name();
    }
  }
}

TEST(Kernels, SumScalarProductsInDouble) {
  const std::vector<float> a = {1e7f, 1, -1e7f, 2, 3, 4, 5, 6, 7, 8, 9};
  const std::vector<float> b = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1};
  const ScalarProducts sums =
      BestCpuKernels().MultiplyAndSum(a.data(), b.data(), DType::kFloat32, 11);
  EXPECT_EQ(sums.ab, 27);
  EXPECT_EQ(sums.bb, 11);
  EXPECT_EQ(sums.aa, 2e14 + 285);
  const std::vector<double> x = {1.5, -2}, y = {4, 0.25};
  EXPECT_EQ(BestCpuKernels().MultiplyAndSum(x.data(), y.data(), DType::kFloat64, 2).ab, 5.5);
  EXPECT_EQ(BestCpuKernels().MultiplyAndSum(x.data(), y.data(), DType::kFloat64, 0).ab, 0);
}

TEST_P(KernelsAgree, OnEveryPackAndUnpack) {
  for (const DType dtype : kDTypes) {
    for (const WireFormat format :
         {WireFormat::kSame, WireFormat::kFloat16, WireFormat::kBfloat16}) {
      const DType wire = WireDType(dtype, format);
      const Bytes tensor = Random(dtype, 3);
      for (const double prescale : {1.0, 0.3}) {
        ASSERT_TRUE(AllAgree(wire,
                             [&](const CpuKernels& kernels, Bytes& packed) {
                               kernels.Pack(packed.data(), wire, tensor.data(), dtype, count(),
                                            prescale);
                             }))
            << "pack " << Name(dtype) << ' ' << Name(wire) << ' ' << prescale;
      }
      const Bytes packed = Random(wire, 4);
      ASSERT_TRUE(AllAgree(dtype,
                           [&](const CpuKernels& kernels, Bytes& unpacked) {
                             kernels.Unpack(unpacked.data(), dtype, packed.data(), wire, count());
                           }))
          << "unpack " << Name(dtype) << ' ' << Name(wire);
    }
  }
}

TEST_P(KernelsAgree, OnScalingInPlace) {
  for (const DType dtype : kDTypes) {
    const Bytes tensor = Random(dtype, 5);
    ASSERT_TRUE(AllAgree(dtype, [&](const CpuKernels& kernels, Bytes& scaled) {
      scaled = tensor;
      kernels.Scale(scaled.data(), scaled.data(), dtype, count(), 0.3, -7.0);
    })) << Name(dtype);
  }
}

TEST_P(KernelsAgree, WhenTheResultOverwritesASource) {
  for (const DType dtype : kDTypes) {
    for (const size_t overwritten : {0u, 1u, 2u}) {
      std::vector<Bytes> sources = Sources(dtype, std::max<size_t>(2, overwritten + 1));
      const std::vector<const void*> pointers = PointersTo(sources);
      const ReduceSpec spec{dtype, ReduceOp::kMax, 3, 1.0};
      Bytes apart = Random(dtype, 9);
      BestCpuKernels().Reduce(apart.data(), pointers, count(), spec);
      const Bytes before = sources[overwritten];
      for (const CpuKernels* kernels : SupportedCpuKernels()) {
        sources[overwritten] = before;
        kernels->Reduce(sources[overwritten].data(), pointers, count(), spec);
        ASSERT_TRUE(SameElements(dtype, sources[overwritten], apart))
            << kernels->name() << ' ' << Name(dtype);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Counts, KernelsAgree, ::testing::Values(0, 1, 7, 31, 1024, 1031, 5003));

TEST(Kernels, StreamBytesFromAndToAnyAlignment) {
  const Bytes source = RandomBytes(300, 1);
  for (size_t to = 0; to < 70; ++to) {
    for (const size_t size : {0u, 1u, 31u, 64u, 200u}) {
      Bytes streamed(300, std::byte{7});
      Bytes copied = streamed;
      std::copy_n(source.begin() + 3, size, copied.begin() + static_cast<std::ptrdiff_t>(to));
      for (const CpuKernels* kernels : SupportedCpuKernels()) {
        std::fill(streamed.begin(), streamed.end(), std::byte{7});
        kernels->Stream(streamed.data() + to, source.data() + 3, static_cast<int64_t>(size));
        ASSERT_EQ(streamed, copied) << kernels->name() << ' ' << to << ' ' << size;
      }
    }
  }
}

template <class T>
struct Reduction {
  const char* promise;
  ReduceOp op;
  std::vector<std::vector<T>> sources;
  std::vector<T> result;
  double postscale = 1.0;
  int64_t divisor = 0;  ///< 0: as many as there are sources.
};

template <class T>
void Check(DType wire, const std::vector<Reduction<T>>& rows) {
  for (const Reduction<T>& row : rows) {
    EXPECT_EQ(Reduce(row.sources, wire, row.op, row.postscale, row.divisor), row.result)
        << Name(wire) << " " << Name(row.op) << ": " << row.promise;
  }
}

TEST(Kernels, ReduceAsTheContractSays) {
  using Op = ReduceOp;
  const uint16_t big = ToFloat16(60000.0f).bits;
  // 2048 + 1 + 1: in float16 each step would round back to 2048. 60000 + 60000 overflows it.
  Check<uint16_t>(
      DType::kFloat16,
      {{"sums in float, rounds once", Op::kSum, {{0x6800}, {0x3c00}, {0x3c00}}, {0x6801}},
       {"divides before the one rounding", Op::kAverage, {{big}, {big}}, {big}}});
  Check<float>(DType::kFloat32,
               {{"divides by the full size", Op::kAverage, {{8}, {4}}, {3}, 1.0, 4}});
  Check<int32_t>(DType::kInt32,
                 {{"truncates toward zero", Op::kAverage, {{-5, 5}, {0, 0}}, {-2, 2}}});
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  Check<int64_t>(DType::kInt64, {{"is exact where the sum overflows",
                                  Op::kAverage,
                                  {{kMax}, {kMax}, {kMax - 3}},
                                  {kMax - 1}}});
  Check<uint8_t>(DType::kUint8, {{"does not wrap", Op::kAverage, {{250}, {254}}, {252}}});
  Check<int8_t>(
      DType::kInt8,
      {{"wraps", Op::kSum, {{100}, {100}}, {-56}},
       {"truncates and clamps 180 and -2.7", Op::kSum, {{100, -3}, {100, 0}}, {127, -2}, 0.9}});
  const std::vector<std::vector<uint8_t>> bools = {{0, 0, 2, 4}, {0, 1, 0, 3}};
  Check<uint8_t>(DType::kBool, {{"is and", Op::kMin, bools, {0, 0, 0, 1}},
                                {"is and", Op::kProduct, bools, {0, 0, 0, 1}},
                                {"is or", Op::kMax, bools, {0, 1, 1, 1}},
                                {"of logical values", Op::kBitAnd, bools, {0, 0, 0, 1}},
                                {"of logical values", Op::kBitOr, bools, {0, 1, 1, 1}},
                                {"of logical values", Op::kBitXor, bools, {0, 1, 1, 0}}});
}

TEST(Kernels, AverageKeepsEqualGradientsThatFloat16CanHold) {
  // From 1e-8 to 1e-4. Divided by 4 before the rounding, those below 1.2e-7 would become zero.
  std::vector<float> gradients;
  for (double g = 1e-8; g < 1e-4; g *= 1.01) gradients.push_back(static_cast<float>(g));
  const auto count = static_cast<int64_t>(gradients.size());
  std::vector<uint16_t> packed(gradients.size());
  BestCpuKernels().Pack(packed.data(), DType::kFloat16, gradients.data(), DType::kFloat32, count,
                        1.0);
  EXPECT_EQ(Reduce(std::vector(4, packed), DType::kFloat16, ReduceOp::kAverage), packed);
  const auto zeros = std::count(packed.begin(), packed.end(), 0);
  const auto below_the_tie = std::count_if(gradients.begin(), gradients.end(),
                                           [](float gradient) { return gradient <= 0x1p-25f; });
  EXPECT_EQ(zeros, below_the_tie);
}

TEST(Kernels, MinAndMaxPropagateNanFromAnyPlace) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> sources = {{nan, 1, 1}, {1, nan, 1}, {2, 2, nan}};
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const float value : Reduce(sources, DType::kFloat32, op)) EXPECT_TRUE(std::isnan(value));
  }
}

uint64_t CombineBits(ReduceOp op, uint64_t a, uint64_t b) {
  if (op == ReduceOp::kBitAnd) return a & b;
  return op == ReduceOp::kBitOr ? a | b : a ^ b;
}

/// Byte by byte: what an integer's width is does not matter to its bits.
TEST_P(KernelsAgree, WithAPlainLoopOverBits) {
  for (const DType dtype :
       {DType::kUint8, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64}) {
    for (const ReduceOp op : {ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      for (const size_t source_count : {2u, 3u}) {
        const std::vector<Bytes> sources = Sources(dtype, source_count);
        const std::vector<const void*> pointers = PointersTo(sources);
        Bytes expected = sources[0];
        for (size_t k = 1; k < source_count; ++k) {
          for (size_t i = 0; i < expected.size(); ++i) {
            expected[i] = static_cast<std::byte>(CombineBits(op, static_cast<uint64_t>(expected[i]),
                                                             static_cast<uint64_t>(sources[k][i])));
          }
        }
        Bytes result(expected.size());
        BestCpuKernels().Reduce(result.data(), pointers, count(), {dtype, op, 1, 1.0});
        ASSERT_EQ(result, expected) << Name(dtype) << ' ' << Name(op) << ' ' << source_count;
      }
    }
  }
}

TEST(Kernels, PackDoubleToFloat16RoundsOnce) {
  // Just above the tie between 1 and the next half; via float it would become the tie itself.
  const double value = 1.0 + 0x1p-11 + 0x1p-40;
  uint16_t bits = 0;
  BestCpuKernels().Pack(&bits, DType::kFloat16, &value, DType::kFloat64, 1, 1.0);
  EXPECT_EQ(bits, 0x3c01);
}

}  // namespace
}  // namespace farandole
