// The plans of allgather, reducescatter and alltoall over NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <vector>

#include "test/unit/ops/nccl_plan_case.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = NcclCall::Kind;

MATCHER_P5(Transfers, kind, peer, in, out, size_bytes, "") {
  return arg.kind == kind && arg.peer == peer && arg.in == in && arg.out == out &&
         arg.count == size_bytes;
}

/// A batch that cuts floats, as one member sees it; nobody follows the pointers.
struct Case : NcclPlanCase {
  Case(OpKind kind, std::vector<int64_t> sizes, int my_index = 0)
      : NcclPlanCase(sizes.size()), parts(std::move(sizes)) {
    batch.kind = kind;
    batch.my_index = my_index;
    batch.splits = parts;
    batch.count = std::accumulate(parts.begin(), parts.end(), int64_t{0});
    segment = {inputs, outputs, batch.count};
    batch.segments = {&segment, 1};
  }

  void BeAbsent() {
    absent = {batch.my_index};
    batch.absent = absent;
    segment.in = nullptr;
  }
  void Exchange(const std::vector<int64_t>& receives) {
    received = receives;
    batch.sends = parts;
    batch.receives = received;
    batch.splits = {};
    batch.count = segment.count = std::max(*std::max_element(parts.begin(), parts.end()),
                                           *std::max_element(received.begin(), received.end()));
  }

  std::byte inputs[512];
  mutable std::byte outputs[512];
  std::vector<int64_t> parts, received;
  Segment segment;
};

TEST(PlanAllgather, LetsNcclGatherEqualPartsAsBytesWhereTheyAre) {
  Case one(OpKind::kAllgather, {3, 3}, 1);
  one.batch.wire = DType::kFloat16;
  one.batch.prescale = 2.0;
  const NcclPlan plan = one.Plan();
  EXPECT_EQ(plan.calls.front().kind, NcclCall::Kind::kAllGather);
  EXPECT_EQ(plan.calls.front().type, NcclDataType::kUint8);
  EXPECT_EQ(plan.calls.front().count, 12);
  EXPECT_EQ(one.buffer_bytes, 0);
  EXPECT_EQ(one.Call().in, one.inputs);
  EXPECT_EQ(one.Call().out, one.outputs);
  EXPECT_THAT(one.Packed(), IsEmpty());
  EXPECT_THAT(one.Unpacked(), IsEmpty());
}

TEST(PlanAllgather, BroadcastsEachPartThatHasElementsWherePartsDiffer) {
  const Case one(OpKind::kAllgather, {2, 0, 3}, 2);
  EXPECT_THAT(one.Calls(),
              ElementsAre(Transfers(Kind::kBroadcast, 0, one.outputs, one.outputs, 8),
                          Transfers(Kind::kBroadcast, 2, one.inputs, one.outputs + 8, 12)));
}

TEST(PlanAllgather, ReceivesInTheBufferWhatIsDropped) {
  Case equal(OpKind::kAllgather, {2, 2}), joined(OpKind::kAllgather, {0, 2});
  joined.BeAbsent();
  equal.segment.out = joined.segment.out = nullptr;
  EXPECT_EQ(equal.BufferBytes(), 16);
  EXPECT_EQ(equal.Call().out, equal.buffer);
  EXPECT_EQ(joined.BufferBytes(), 8);
  EXPECT_THAT(joined.Calls(),
              ElementsAre(Transfers(Kind::kBroadcast, 1, joined.buffer, joined.buffer, 8)));
}

// A sum's prescale may be this rank's own; NCCL's counts must be equal all the same.
TEST(PlanReducescatter, CountsAlikeWhetherOrNotThisRankMultiplies) {
  for (const std::vector<int64_t>& parts : {std::vector<int64_t>{3, 3}, {3, 4}}) {
    const Case plain(OpKind::kReducescatter, parts, 1);
    Case scaled(OpKind::kReducescatter, parts, 1);
    scaled.batch.prescale = 0.5;
    EXPECT_EQ(plain.Call().count, scaled.Call().count);
  }
}

TEST(PlanReducescatter, LetsNcclReduceEqualPartsWhereTheyAre) {
  const Case one(OpKind::kReducescatter, {3, 3}, 1);
  const NcclPlan plan = one.Plan();
  EXPECT_EQ(plan.calls.front().kind, NcclCall::Kind::kReduceScatter);
  EXPECT_FALSE(one.IsFused());
  EXPECT_EQ(plan.calls.front().type, NcclDataType::kFloat32);
  EXPECT_EQ(plan.calls.front().count, 3);
  EXPECT_EQ(one.buffer_bytes, 0);
  EXPECT_EQ(one.Call().in, one.inputs);
  EXPECT_EQ(one.Call().out, one.outputs);
  EXPECT_THAT(one.Packed(), IsEmpty());
  EXPECT_THAT(one.Unpacked(), IsEmpty());
}

TEST(PlanReducescatter, PacksPartsThatDifferAsLongAsTheLongest) {
  const Case one(OpKind::kReducescatter, {6, 5, 0}, 1);
  const NcclPlan plan = one.Plan();
  EXPECT_EQ(plan.calls.front().count, 8);  // 16 bytes divide it
  EXPECT_EQ(one.buffer_bytes, 3 * 32);
  EXPECT_THAT(one.Packed(), ElementsAre(Item(one.inputs, one.buffer, 6),
                                        Item(one.inputs + 24, one.buffer + 32, 5),
                                        Item(one.inputs + 44, one.buffer + 64, 0)));
  EXPECT_EQ(one.Call().in, one.buffer);
  EXPECT_EQ(one.Call().out, one.buffer + 32);
  EXPECT_THAT(one.Unpacked(), ElementsAre(Item(one.buffer + 32, one.outputs, 5)));
}

TEST(PlanReducescatter, TakesNothingHomeWhereItsPartIsEmpty) {
  const Case one(OpKind::kReducescatter, {6, 5, 0}, 2);
  EXPECT_EQ(one.Packed().size(), 3u);
  EXPECT_THAT(one.Unpacked(), IsEmpty());
}

TEST(PlanReducescatter, CastsAndMultipliesInTheLaunchesAroundIt) {
  Case one(OpKind::kReducescatter, {4, 4}, 1);
  one.batch.wire = DType::kBfloat16;
  one.batch.op = ReduceOp::kAverage;
  one.batch.prescale = 6.0;
  one.batch.postscale = 0.5;
  const NcclPlan plan = one.Plan();
  EXPECT_EQ(plan.calls.front().type, NcclDataType::kBfloat16);
  EXPECT_EQ(plan.calls.front().op, NcclRedOp::kSum);
  EXPECT_EQ(plan.pack_spec.scale, 3.0);
  EXPECT_EQ(plan.unpack_spec.scale, 0.5);
  EXPECT_EQ(plan.calls.front().count, 4);
  EXPECT_THAT(one.Packed(), ElementsAre(Item(one.inputs, one.buffer, 4),
                                        Item(one.inputs + 16, one.buffer + 8, 4)));
}

TEST(PlanReducescatter, AveragesAsAnAllreduceDoes) {
  Case halves(OpKind::kReducescatter, {4, 4}), uneven(OpKind::kReducescatter, {4, 3});
  Case integers(OpKind::kReducescatter, {4, 4});
  for (Case* one : {&halves, &uneven, &integers}) one->batch.op = ReduceOp::kAverage;
  halves.batch.dtype = halves.batch.wire = DType::kFloat16;
  uneven.batch.dtype = uneven.batch.wire = DType::kFloat16;
  integers.batch.dtype = integers.batch.wire = DType::kInt8;
  EXPECT_EQ(halves.Call().op, NcclRedOp::kAvg);
  EXPECT_FALSE(halves.IsFused());
  EXPECT_EQ(uneven.Call().op, NcclRedOp::kSum);
  EXPECT_EQ(uneven.Plan().pack_spec.scale, 0.5);
  EXPECT_EQ(integers.Call().type, NcclDataType::kInt64);
  EXPECT_EQ(integers.Plan().unpack_spec.divisor, 2);
}

TEST(PlanReducescatter, FillsAllPartsWithTheIdentityWhereARankIsAbsent) {
  Case straight(OpKind::kReducescatter, {3, 3}, 1), packed(OpKind::kReducescatter, {3, 2}, 1);
  for (Case* one : {&straight, &packed}) one->BeAbsent();
  EXPECT_EQ(straight.BufferBytes(), 24);
  EXPECT_THAT(straight.Packed(), ElementsAre(Item(nullptr, straight.buffer, 6)));
  EXPECT_EQ(straight.Call().in, straight.buffer);
  EXPECT_EQ(straight.Call().out, straight.outputs);
  EXPECT_THAT(packed.Packed(), ElementsAre(Item(nullptr, packed.buffer, 8)));
  EXPECT_EQ(packed.Unpacked().size(), 1u);
}

TEST(PlanReducescatter, ReceivesInTheBufferWhatIsDropped) {
  Case gives(OpKind::kReducescatter, {3, 3}, 1), joined(OpKind::kReducescatter, {3, 3}, 1);
  joined.BeAbsent();
  for (Case* one : {&gives, &joined}) one->segment.out = nullptr;
  EXPECT_EQ(gives.BufferBytes(), 12);
  EXPECT_EQ(gives.Call().in, gives.inputs);
  EXPECT_EQ(gives.Call().out, gives.buffer);
  EXPECT_EQ(joined.BufferBytes(), 24);
  EXPECT_EQ(joined.Call().out, joined.buffer + 12);  // in place, as NCCL understands it
  EXPECT_THAT(joined.Unpacked(), IsEmpty());
}

TEST(PlanAlltoall, SendsAndReceivesPiecesThatHaveElements) {
  Case one(OpKind::kAlltoall, {2, 1, 0}, 1);
  one.Exchange({0, 1, 5});
  EXPECT_EQ(one.BufferBytes(), 0);
  EXPECT_THAT(one.Calls(), ElementsAre(Transfers(Kind::kSend, 0, one.inputs, nullptr, 8),
                                       Transfers(Kind::kSend, 1, one.inputs + 8, nullptr, 4),
                                       Transfers(Kind::kReceive, 1, nullptr, one.outputs, 4),
                                       Transfers(Kind::kReceive, 2, nullptr, one.outputs + 4, 20)));
}

TEST(PlanAlltoall, CallsNothingOnARankThatNeitherSendsNorReceives) {
  Case idle(OpKind::kAlltoall, {0, 0});
  idle.Exchange({0, 0});
  idle.batch.count = idle.segment.count = 7;  // what others send each other
  EXPECT_THAT(idle.Calls(), IsEmpty());
}

TEST(PlanAlltoall, ReceivesInTheBufferWhatIsDropped) {
  Case one(OpKind::kAlltoall, {0, 1});
  one.Exchange({0, 3});
  one.segment.out = nullptr;
  EXPECT_EQ(one.BufferBytes(), 12);
  EXPECT_THAT(one.Calls(), ElementsAre(Transfers(Kind::kSend, 1, one.inputs, nullptr, 4),
                                       Transfers(Kind::kReceive, 1, nullptr, one.buffer, 12)));
}

TEST(PlanParts, CallsNothingForNoElements) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    Case empty(kind, {0, 0});
    if (kind == OpKind::kAlltoall) empty.Exchange({0, 0});
    EXPECT_THAT(empty.Packed(), IsEmpty());
    EXPECT_THAT(empty.Unpacked(), IsEmpty());
    EXPECT_THAT(empty.Calls(), IsEmpty());
  }
}

TEST(PlanParts, MakesTheSameCallOnAllMembersWhateverOneOfThemContributes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const DType dtypes[] = {DType::kInt16, DType::kFloat16, DType::kFloat32};
  for (int round = 0; round < 2000; ++round) {
    std::vector<int64_t> parts(2 + random() % 3);
    for (int64_t& part : parts) part = static_cast<int64_t>(random() % 3);
    const OpKind kind = random() % 2 == 0 ? OpKind::kAllgather : OpKind::kReducescatter;
    Case one(kind, parts, 0), other(kind, parts, 1);
    const DType dtype = dtypes[random() % 3];
    const auto op = static_cast<ReduceOp>(random() % 5);
    for (Case* each : {&one, &other}) {
      each->batch.dtype = each->batch.wire = dtype;
      each->batch.op = op;
    }
    if (kind == OpKind::kReducescatter && random() % 2 == 0) other.BeAbsent();
    if (random() % 2 == 0) other.segment.out = nullptr;
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
