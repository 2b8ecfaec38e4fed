#include "ops/mpi/chunk_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace farandole {
namespace {

// A batch of `members` ranks and `count` elements; `ranks` is kept for it.
struct Sample {
  Sample(int members, int64_t count, DType dtype = DType::kFloat32)
      : ranks(static_cast<size_t>(members)) {
    std::iota(ranks.begin(), ranks.end(), 0);
    batch.ranks = ranks;
    batch.dtype = batch.wire = dtype;
    batch.count = count;
  }
  ChunkPlan Plan() const {
    ChunkPlan plan;
    plan.Reset(batch);
    return plan;
  }
  std::vector<int> ranks;
  Batch batch;
};

// Whether the shards of all members, in order, cover a chunk of `count` once.
bool ShardsTile(const ChunkPlan& plan, int64_t count) {
  int64_t next = 0;
  for (int member = 0; member < plan.members(); ++member) {
    const Slice shard = plan.ShardOf(member, count);
    if (shard.count == 0) continue;
    if (shard.begin != next) return false;
    next += shard.count;
  }
  return next == count;
}

int64_t TotalOfChunks(const ChunkPlan& plan) {
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) total += plan.CountOf(chunk);
  return total;
}

TEST(ChunkPlan, CoversEveryElementOnceForAnyNumberOfMembers) {
  for (const int members : {2, 3, 4, 7, 8, 9, 64}) {
    for (const int64_t count : {4097, 65'536, 1'000'003}) {
      const ChunkPlan plan = Sample(members, count).Plan();
      EXPECT_EQ(TotalOfChunks(plan), count);
      EXPECT_TRUE(ShardsTile(plan, plan.CountOf(plan.chunks() - 1))) << members << " " << count;
    }
  }
}

TEST(ChunkPlan, CoversABroadcastWithoutTheRoot) {
  for (const int root : {0, 1, 4}) {
    Sample sample(5, 100'000);
    sample.batch.kind = OpKind::kBroadcast;
    sample.batch.root_index = root;
    const ChunkPlan plan = sample.Plan();
    EXPECT_EQ(plan.ShardOf(root, plan.CountOf(0)).count, 0);
    EXPECT_TRUE(ShardsTile(plan, plan.CountOf(0))) << "root " << root;
    EXPECT_FALSE(plan.Forwards((root + 1) % 5, root));
  }
}

TEST(ChunkPlan, HasNoChunkForNoElements) { EXPECT_EQ(Sample(3, 0).Plan().chunks(), 0); }

TEST(ChunkPlan, CountsElementsBeyondTwoToThe31) {
  const int64_t count = (int64_t{1} << 33) + 5;
  EXPECT_EQ(TotalOfChunks(Sample(2, count, DType::kUint8).Plan()), count);
}

TEST(ChunkPlan, GivesEverybodyTheWholeOfATinyAllreduce) {
  const ChunkPlan plan = Sample(4, 4096).Plan();
  for (int member = 0; member < 4; ++member) EXPECT_EQ(plan.ShardOf(member, 4096).count, 4096);
  EXPECT_FALSE(plan.Forwards(0, 1));
}

TEST(ChunkPlan, ShardsATinyAllreduceInALargeSet) {
  const ChunkPlan plan = Sample(64, 4096).Plan();
  EXPECT_TRUE(ShardsTile(plan, 4096));
  EXPECT_TRUE(plan.Forwards(0, 1));
}

TEST(ChunkPlan, StagingHoldsEveryChunkAndEveryShard) {
  for (const int members : {2, 3, 7, 8, 9, 100}) {
    const StagingSize size = StagingFor(members);
    for (const int64_t count : {1, 4096, 4097, 1 << 20}) {
      const ChunkPlan plan = Sample(members, count).Plan();
      EXPECT_LE(plan.CountOf(0) * 4, size.chunk_bytes);
      EXPECT_LE(plan.ShardOf(0, plan.CountOf(0)).count * 4, size.inbox_bytes);
    }
  }
}

TEST(ChunkPlan, LeavesOutAbsentContributions) {
  Sample sample(4, 100'000);
  const std::vector<int> absent = {1, 3};
  sample.batch.absent = absent;
  const ChunkPlan plan = sample.Plan();
  EXPECT_TRUE(plan.Contributes(0));
  EXPECT_FALSE(plan.Contributes(1));
  EXPECT_TRUE(plan.Forwards(1, 0)) << "an absent member still reduces its shard";
}

}  // namespace
}  // namespace farandole
