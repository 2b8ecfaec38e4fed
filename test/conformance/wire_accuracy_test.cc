// What a 16-bit wire may cost. The conformance suite holds every plane to data_plane_reference.h
// bit by bit, on the same inputs; here that reference is held to sums and averages in double.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/half.h"
#include "test/conformance/data_plane_case.h"
#include "test/conformance/data_plane_reference.h"

namespace farandole {
namespace {

/// How well a type holds a number: |rounded - x| <= unit * |x| + tiny.
struct Precision {
  double unit;
  double tiny;
};
constexpr Precision kFloatPrecision{0x1p-24, 0x1p-150};

Precision PrecisionOf(WireFormat wire) {
  return wire == WireFormat::kFloat16 ? Precision{0x1p-11, 0x1p-25} : Precision{0x1p-8, 0x1p-134};
}

double RoundToWire(WireFormat wire, double x) {
  const float odd = RoundToOdd(x);
  return static_cast<double>(wire == WireFormat::kFloat16 ? ToFloat(ToFloat16(odd))
                                                          : ToFloat(ToBfloat16(odd)));
}

double Input(const PlaneCase& c, int member, int64_t index) {
  const auto bits = static_cast<uint32_t>(InputBits(c, member, index));
  return static_cast<double>(std::bit_cast<float>(bits));
}

/// The sum in double, and the sum of magnitudes.
struct Exact {
  double sum = 0;
  double magnitude = 0;
};
Exact ExactSum(const PlaneCase& c, int64_t index) {
  Exact exact;
  for (int member = 0; member < c.members; ++member) {
    exact.sum += Input(c, member, index);
    exact.magnitude += std::fabs(Input(c, member, index));
  }
  return exact;
}

/// What the roundings may add up to: each contribution to the wire, each sum in float, the result
/// to the wire. The last is of a value that the others have moved already.
double Bound(const PlaneCase& c, const Exact& exact) {
  const Precision wire = PrecisionOf(c.wire);
  const double members = c.members;
  const double divisor = c.op == ReduceOp::kAverage ? members : 1.0;
  const double contributions = wire.unit * exact.magnitude + members * wire.tiny;
  const double sums = (members + 1) * kFloatPrecision.unit * exact.magnitude * (1 + wire.unit);
  const double before = (contributions + sums) / divisor;
  return before + wire.unit * (std::fabs(exact.sum) / divisor + before) + wire.tiny;
}

std::vector<float> Reference(const PlaneCase& c) {
  const std::vector<std::byte> bytes = ReferenceResult(c);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

PlaneCase WireCase(int members, WireFormat wire, ReduceOp op, Fill fill) {
  PlaneCase c;
  c.members = members;
  c.wire = wire;
  c.op = op;
  c.fill = fill;
  c.counts = {20'000};
  c.seed = 17;
  return c;
}

std::vector<PlaneCase> WireCases() {
  std::vector<PlaneCase> cases;
  for (const int members : {2, 3, 4, 7}) {
    for (const WireFormat wire : {WireFormat::kFloat16, WireFormat::kBfloat16}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        cases.push_back(WireCase(members, wire, op, Fill::kRandom));
        cases.push_back(WireCase(members, wire, op, Fill::kGradient));
      }
    }
  }
  return cases;
}

TEST(Wire, CostsNoMoreThanItsRoundings) {
  for (const PlaneCase& c : WireCases()) {
    const std::vector<float> got = Reference(c);
    for (int64_t i = 0; i < c.Count(); ++i) {
      const Exact exact = ExactSum(c, i);
      const double wanted = c.op == ReduceOp::kAverage ? exact.sum / c.members : exact.sum;
      const double error = std::fabs(static_cast<double>(got[static_cast<size_t>(i)]) - wanted);
      ASSERT_LE(error, Bound(c, exact)) << c.ToString() << ", element " << i;
    }
  }
}

/// An element that comes out as zero: every contribution was too small for the wire, or they add up
/// to something that is.
bool MustBeZero(const PlaneCase& c, int64_t index) {
  double sum = 0;
  for (int member = 0; member < c.members; ++member) {
    sum += RoundToWire(c.wire, Input(c, member, index));
  }
  return RoundToWire(c.wire, c.op == ReduceOp::kAverage ? sum / c.members : sum) == 0.0;
}

void ExpectOnlyWhatMustBeZero(WireFormat wire) {
  for (const int members : {2, 3, 4, 7}) {
    const PlaneCase c = WireCase(members, wire, ReduceOp::kAverage, Fill::kGradient);
    const std::vector<float> got = Reference(c);
    int64_t zeros = 0;
    for (int64_t i = 0; i < c.Count(); ++i) {
      const bool is_zero = got[static_cast<size_t>(i)] == 0.0f;
      ASSERT_EQ(is_zero, MustBeZero(c, i)) << c.ToString() << ", element " << i;
      zeros += is_zero ? 1 : 0;
    }
    const bool reaches_the_tiniest = zeros > 0 || wire == WireFormat::kBfloat16;
    EXPECT_TRUE(reaches_the_tiniest) << "no input is too small for float16";
  }
}

TEST(Wire, LosesNoGradientToZeroThatFloat16CouldHold) {
  ExpectOnlyWhatMustBeZero(WireFormat::kFloat16);
}

TEST(Wire, LosesNoGradientToZeroThatBfloat16CouldHold) {
  ExpectOnlyWhatMustBeZero(WireFormat::kBfloat16);
}

}  // namespace
}  // namespace farandole
