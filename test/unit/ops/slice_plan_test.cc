#include "ops/hierarchical/slice_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace farandole {
namespace {

/// Two hosts of three and two members.
Topology Uneven() {
  const std::vector<int> ranks = {0, 1, 2, 3, 4};
  const std::vector<int> memory = {7, 7, 7, 8, 8};
  return Topology(ranks, 0, memory);
}

TEST(SlicePlan, CoversTheBatchWithSlicesOfWhichTheLastIsShorter) {
  const SlicePlan plan(1000, 128, Uneven());  // two shards, as the smaller host has two members
  ASSERT_EQ(plan.slices(), 4);
  EXPECT_EQ(plan.CountOf(0), 256);
  EXPECT_EQ(plan.CountOf(3), 1000 - 3 * 256);
}

TEST(SlicePlan, DividesASliceAmongTheMembersThatEveryHostHas) {
  const SlicePlan plan(1000, 128, Uneven());
  for (int64_t slice = 0; slice < plan.slices(); ++slice) {
    int64_t next = 0;
    for (int local = 0; local < 3; ++local) {
      const Slice shard = plan.ShardOf(local, slice);
      EXPECT_EQ(shard.begin, next) << slice << " " << local;
      next += shard.count;
    }
    EXPECT_EQ(next, plan.CountOf(slice));
    EXPECT_EQ(plan.ShardOf(2, slice).count, 0);
  }
}

/// The order of a host whose slices have crossed as soon as they are scattered: s or g.
std::string OrderOf(const SlicePlan& plan) {
  std::string order;
  int64_t scattered = 0;
  for (int64_t gathered = 0; gathered < plan.slices();) {
    const SlicePlan::Next next = plan.After(scattered, scattered, gathered);
    if (next == SlicePlan::Next::kNothing) return order + "?";
    order += next == SlicePlan::Next::kScatter ? 's' : 'g';
    (next == SlicePlan::Next::kScatter ? scattered : gathered) += 1;
  }
  return order;
}

TEST(PathOf, ComposesTheTreeOverSlotsWhereEachHostHoldsANode) {
  const std::vector<int> ranks = {0, 1, 2, 3};
  const auto path = [&](int slots, const std::vector<int>& memory, DType wire, int64_t count) {
    const std::vector<SlotRange> nodes = SlotRanges(slots, 4);
    Batch batch;
    batch.ranks = ranks;
    batch.slots = nodes;
    batch.wire = wire;
    batch.count = count;
    return PathOf(batch, Topology(ranks, 0, memory));
  };
  constexpr int64_t kMany = 100'000;
  EXPECT_EQ(path(8, {0, 0, 1, 1}, DType::kFloat32, kMany), Path::kComposed);
  EXPECT_EQ(path(8, {0, 0, -1, -1}, DType::kFloat32, kMany), Path::kComposed);
  EXPECT_EQ(path(8, {0, 0, 0, 1}, DType::kFloat32, kMany), Path::kFlat) << "6 slots are no node";
  EXPECT_EQ(path(6, {0, 0, 0, 1}, DType::kFloat32, kMany), Path::kComposed) << "1, 1, 2 and 2";
  EXPECT_EQ(path(8, {0, 1, 0, 1}, DType::kFloat32, kMany), Path::kFlat) << "not neighbours";
  EXPECT_EQ(path(8, {0, 0, 1, 1}, DType::kFloat16, kMany), Path::kFlat) << "sums would be rounded";
  EXPECT_EQ(path(8, {0, 0, 1, 1}, DType::kFloat32, 10), Path::kFlat) << "tiny";
}

TEST(SlicePlan, ScattersAheadAndThenTakesTurns) {
  EXPECT_EQ(OrderOf(SlicePlan(5 * 256, 128, Uneven())), "sssgsgsggg");
  EXPECT_EQ(OrderOf(SlicePlan(256, 128, Uneven())), "sg");
  EXPECT_EQ(OrderOf(SlicePlan(0, 128, Uneven())), "");
}

TEST(SlicePlan, WaitsForASliceToCrossRatherThanChangeTheOrder) {
  const SlicePlan plan(5 * 256, 128, Uneven());
  EXPECT_EQ(plan.After(3, 0, 0), SlicePlan::Next::kNothing);
  EXPECT_EQ(plan.After(3, 1, 0), SlicePlan::Next::kGather);
  EXPECT_EQ(plan.After(3, 3, 1), SlicePlan::Next::kScatter);
}

}  // namespace
}  // namespace farandole
