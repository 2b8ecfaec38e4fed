#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>

#include "ops/cpu/batch.h"
#include "test/unit/ops/nccl_plan_case.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr DType kEveryDType[] = {DType::kBool,    DType::kUint8,  DType::kInt8,    DType::kInt16,
                                 DType::kInt32,   DType::kInt64,  DType::kFloat16, DType::kBfloat16,
                                 DType::kFloat32, DType::kFloat64};
constexpr ReduceOp kEveryOp[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                                 ReduceOp::kProduct};

/// A batch on one of `size` members, with pointers that nobody follows.
struct Case : NcclPlanCase {
  explicit Case(int size, std::vector<int64_t> counts = {5})
      : NcclPlanCase(static_cast<size_t>(size)) {
    for (int64_t count : counts) {
      segments.push_back({&inputs[segments.size()], &outputs[segments.size()], count});
      batch.count += count;
    }
    batch.segments = segments;
  }

  void Be(DType dtype, ReduceOp op = ReduceOp::kSum) {
    batch.dtype = batch.wire = dtype;
    batch.op = op;
  }
  void BeAbsent() {
    absent = {batch.my_index};
    batch.absent = absent;
    for (Segment& segment : segments) segment.in = nullptr;
  }

  std::array<std::byte, 16> inputs, outputs;
  std::vector<Segment> segments;
};

TEST(PlanNccl, SendsEveryTypeAsOneThatNcclHas) {
  const std::vector<NcclDataType> types = {NcclDataType::kUint8,   NcclDataType::kUint8,
                                           NcclDataType::kInt8,    NcclDataType::kInt32,
                                           NcclDataType::kInt32,   NcclDataType::kInt64,
                                           NcclDataType::kFloat16, NcclDataType::kBfloat16,
                                           NcclDataType::kFloat32, NcclDataType::kFloat64};
  std::vector<NcclDataType> planned;
  for (DType dtype : kEveryDType) {
    Case one(2);
    one.Be(dtype, ReduceOp::kMax);
    planned.push_back(one.Call().type);
  }
  EXPECT_EQ(planned, types);
}

TEST(PlanNccl, UsesNcclsOperations) {
  std::vector<NcclRedOp> planned;
  for (ReduceOp op : kEveryOp) {
    Case one(3);
    one.Be(DType::kFloat32, op);
    planned.push_back(one.Call().op);
  }
  EXPECT_THAT(planned, ElementsAre(NcclRedOp::kSum, NcclRedOp::kAvg, NcclRedOp::kMin,
                                   NcclRedOp::kMax, NcclRedOp::kProd));
}

TEST(PlanNccl, LetsNcclReadAndWriteOneTensorThatNeedsNothing) {
  const Case one(3, {0, 7, 0});
  const NcclPlan plan = one.Plan();
  EXPECT_FALSE(one.IsFused());
  EXPECT_EQ(plan.calls.front().count, 7);
  EXPECT_EQ(one.buffer_bytes, 0);
  EXPECT_TRUE(one.Packed().empty());
  EXPECT_TRUE(one.Unpacked().empty());
  EXPECT_EQ(one.Call().in, one.segments[1].in);
  EXPECT_EQ(one.Call().out, one.segments[1].out);
}

TEST(PlanNccl, TouchesResultsWhereNcclWroteThemSoThatTheyCanBePoisoned) {
  Case direct(2, {0, 7}), root(2), drops(2);
  for (Case* one : {&root, &drops}) one->batch.kind = OpKind::kBroadcast;
  root.segments[0].out = const_cast<void*>(root.segments[0].in);
  drops.batch.my_index = 1;
  drops.segments[0].out = nullptr;
  void* const out = direct.segments[1].out;
  EXPECT_THAT(direct.Plan().unpack, ElementsAre(Item(out, out, 7)));
  EXPECT_EQ(direct.Plan().unpack_spec.from, DType::kInt32) << "bit by bit";
  EXPECT_TRUE(root.Plan().unpack.empty()) << "NCCL writes nothing there";
  EXPECT_TRUE(drops.Plan().unpack.empty());
}

TEST(PlanNccl, PacksOneTensorThatNeedsACastOrAFactor) {
  Case cast(2), before(2), after(2);
  cast.batch.wire = DType::kFloat16;
  before.batch.prescale = 0.5;
  after.batch.postscale = 0.5;
  for (const Case* one : {&cast, &before, &after}) {
    EXPECT_TRUE(one->IsFused());
  }
}

TEST(PlanNccl, BeginsEveryTensorAtSixteenBytes) {
  Case several(2, {5, 0, 4, 1});
  several.batch.wire = DType::kFloat16;
  const NcclPlan plan = several.Plan();
  EXPECT_EQ(plan.calls.front().count, 17);
  EXPECT_EQ(several.buffer_bytes, 34);
  EXPECT_EQ(plan.pack_spec.to, DType::kFloat16);
  EXPECT_EQ(plan.unpack_spec.from, DType::kFloat16);
  const auto& [a, none, b, c] =
      std::tie(several.segments[0], several.segments[1], several.segments[2], several.segments[3]);
  EXPECT_THAT(several.Packed(),
              ElementsAre(Item(a.in, several.buffer, 5), Item(b.in, several.buffer + 16, 4),
                          Item(c.in, several.buffer + 32, 1)));
  EXPECT_THAT(several.Unpacked(),
              ElementsAre(Item(several.buffer, a.out, 5), Item(several.buffer + 16, b.out, 4),
                          Item(several.buffer + 32, c.out, 1)));
}

TEST(PlanNccl, FillsAnAbsentContributionInPlaceOfTheResult) {
  Case one(2);
  one.BeAbsent();
  EXPECT_THAT(one.Packed(), ElementsAre(Item(nullptr, one.segments[0].out, 5)));
  EXPECT_EQ(one.Call().in, one.segments[0].out);
  EXPECT_EQ(one.BufferBytes(), 0);
}

TEST(PlanNccl, ReceivesInTheBufferWhatNobodyWants) {
  Case joined(2);
  joined.BeAbsent();
  joined.segments[0].out = nullptr;
  EXPECT_EQ(joined.BufferBytes(), 20);
  EXPECT_THAT(joined.Packed(), ElementsAre(Item(nullptr, joined.buffer, 5)));
  EXPECT_EQ(joined.Call().in, joined.buffer);
  EXPECT_EQ(joined.Call().out, joined.buffer);
  EXPECT_TRUE(joined.Unpacked().empty());
}

TEST(PlanNccl, PacksTheIdentityAndUnpacksNothingWhereARankJoined) {
  Case joined(2, {2, 3});
  joined.BeAbsent();
  for (Segment& segment : joined.segments) segment.out = nullptr;
  EXPECT_THAT(joined.Packed(),
              ElementsAre(Item(nullptr, joined.buffer, 2), Item(nullptr, joined.buffer + 16, 3)));
  EXPECT_TRUE(joined.Unpacked().empty());
}

TEST(PlanNccl, DividesSixteenBitAveragesBeforeTheRounding) {
  Case several(3, {2, 2});
  several.batch.wire = DType::kBfloat16;
  several.batch.op = ReduceOp::kAverage;
  several.batch.prescale = 6.0;
  const NcclPlan plan = several.Plan();
  EXPECT_EQ(plan.calls.front().op, NcclRedOp::kSum);
  EXPECT_EQ(plan.pack_spec.scale, 2.0);
  EXPECT_EQ(plan.unpack_spec.scale, 1.0);
}

TEST(PlanNccl, LeavesASixteenBitAverageToNcclOnlyWhereItIsExact) {
  Case two(2), three(3);
  two.Be(DType::kFloat16, ReduceOp::kAverage);
  three.Be(DType::kFloat16, ReduceOp::kAverage);
  EXPECT_FALSE(two.IsFused());
  EXPECT_EQ(two.Call().op, NcclRedOp::kAvg);
  EXPECT_TRUE(three.IsFused());
  EXPECT_EQ(three.Call().op, NcclRedOp::kSum);
}

TEST(PlanNccl, SumsIntegersThatAreDividedInSixtyFourBits) {
  Case one(3);
  one.Be(DType::kInt8, ReduceOp::kAverage);
  one.batch.postscale = 0.5;
  const NcclPlan plan = one.Plan();
  EXPECT_EQ(plan.calls.front().type, NcclDataType::kInt64);
  EXPECT_EQ(plan.calls.front().op, NcclRedOp::kSum);
  EXPECT_EQ(plan.pack_spec.divisor, 1);
  EXPECT_EQ(plan.unpack_spec.divisor, 3);
  EXPECT_EQ(plan.unpack_spec.scale, 0.5);
}

TEST(PlanNccl, SumsIntegersThatAreScaledLaterInSixtyFourBits) {
  Case scaled(3), greatest(3);
  scaled.Be(DType::kInt8, ReduceOp::kProduct);
  greatest.Be(DType::kInt8, ReduceOp::kMax);
  scaled.batch.postscale = greatest.batch.postscale = 2.0;
  EXPECT_EQ(scaled.Call().type, NcclDataType::kInt64);
  EXPECT_EQ(greatest.Call().type, NcclDataType::kInt8);
}

TEST(PlanNccl, PrescalesInTheLaunchThatPacks) {
  Case real(2), integer(2), widened(2, {3, 3});
  real.batch.wire = DType::kFloat16;
  integer.Be(DType::kInt32);
  widened.Be(DType::kInt16);
  for (Case* one : {&real, &integer, &widened}) {
    one->batch.prescale = 10.0;
    EXPECT_EQ(one->Plan().pack_spec.scale, 10.0);
    EXPECT_EQ(one->Packed().size(), one->segments.size());
  }
  EXPECT_EQ(widened.Plan().pack_spec.to, DType::kInt32);
}

TEST(PlanNccl, CallsNothingForNoElements) {
  const Case empty(4, {0, 0});
  EXPECT_THAT(empty.Calls(), IsEmpty());
  EXPECT_TRUE(empty.Packed().empty());
}

TEST(PlanNccl, BroadcastsBytesFromTheRoot) {
  Case root(3, {3, 1}), other(3, {3, 1});
  root.batch.kind = other.batch.kind = OpKind::kBroadcast;
  root.batch.root_index = other.batch.root_index = 2;
  root.batch.my_index = 2;
  root.segments[0].out = const_cast<void*>(root.segments[0].in);
  for (Case* one : {&root, &other}) {
    one->Be(DType::kFloat64);
    EXPECT_EQ(one->Call().type, NcclDataType::kUint8);
    EXPECT_EQ(one->Call().count, 5 * 8);
  }
  EXPECT_THAT(root.Packed(), ElementsAre(Item(root.segments[0].in, root.buffer, 3),
                                         Item(root.segments[1].in, root.buffer + 32, 1)));
  EXPECT_THAT(root.Unpacked(), ElementsAre(Item(root.buffer + 32, root.segments[1].out, 1)));
  EXPECT_TRUE(other.Packed().empty());
  EXPECT_EQ(other.Unpacked().size(), 2u);
}

TEST(PlanNccl, BroadcastsOneTensorStraight) {
  Case root(2), other(2), drops(2);
  for (Case* one : {&root, &other, &drops}) one->batch.kind = OpKind::kBroadcast;
  other.batch.my_index = drops.batch.my_index = 1;
  root.segments[0].out = nullptr;
  drops.segments[0].out = nullptr;
  EXPECT_EQ(root.Call().in, root.segments[0].in);
  EXPECT_EQ(root.Call().out, root.segments[0].in);  // NCCL writes nothing at the root
  EXPECT_EQ(root.BufferBytes(), 0);
  EXPECT_EQ(other.Call().out, other.segments[0].out);
  EXPECT_EQ(drops.Call().out, drops.buffer);
  EXPECT_EQ(drops.BufferBytes(), 20);
}

TEST(PlanNccl, CountsBeyondThirtyTwoBits) {
  const int64_t many = int64_t{3} << 31;
  const Case several(2, {many, many});
  EXPECT_EQ(several.Call().count, 2 * many);
  EXPECT_EQ(several.BufferBytes(), 8 * many);
}

/// Changes what only this rank knows: where its memory is, and whether there is any.
void Vary(Case& one, std::mt19937& random) {
  const bool absent = random() % 2 == 0;
  const bool joined = absent && random() % 2 == 0;
  if (absent) one.BeAbsent();
  for (Segment& segment : one.segments) {
    if (joined) segment.out = nullptr;
    if (!absent && random() % 2 == 0) segment.out = const_cast<void*>(segment.in);
  }
}

TEST(PlanNccl, MakesTheSameCallOnAllMembersWhateverOneOfThemContributes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 5000; ++round) {
    const int size = 2 + static_cast<int>(random() % 4);
    const std::vector<int64_t> counts(1 + random() % 3, static_cast<int64_t>(random() % 9));
    Case one(size, counts), other(size, counts);
    const DType dtype = kEveryDType[random() % kReducibleDTypeCount];
    const DType wire = WireDType(dtype, static_cast<WireFormat>(random() % 3));
    const double factors[] = {1.0, 1.0, 0.5};
    one.Be(dtype, kEveryOp[random() % 5]);
    one.batch.wire = wire;
    one.batch.prescale = factors[random() % 3];
    one.batch.postscale = factors[random() % 3];
    other.Be(dtype, one.batch.op);
    other.batch.wire = wire;
    other.batch.prescale = one.batch.prescale;
    other.batch.postscale = one.batch.postscale;
    Vary(other, random);
    const std::vector<NcclCall> a = one.Calls(), b = other.Calls();
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].kind, b[i].kind);
      ASSERT_EQ(a[i].type, b[i].type);
      ASSERT_EQ(a[i].op, b[i].op);
      ASSERT_EQ(a[i].count, b[i].count);
      ASSERT_EQ(a[i].peer, b[i].peer);
    }
  }
}

}  // namespace
}  // namespace farandole
