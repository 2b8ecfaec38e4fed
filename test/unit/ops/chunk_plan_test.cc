#include "ops/p2p/chunk_plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "ops/cpu/batch.h"

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

TEST(ChunkPlan, SendsATinyBroadcastToEveryMemberDirectly) {
  Sample sample(64, 4096);
  sample.batch.kind = OpKind::kBroadcast;
  const ChunkPlan plan = sample.Plan();
  for (int member = 1; member < 64; ++member) EXPECT_EQ(plan.ShardOf(member, 4096).count, 4096);
  EXPECT_FALSE(plan.Forwards(1, 2));
}

TEST(ChunkPlan, StagingHoldsEveryChunkAndEveryShard) {
  for (const int members : {2, 3, 7, 8, 9, 100, 1000, 16'384, 16'385, 65'536}) {
    const StagingSize size = StagingFor(members);
    for (const DType dtype : {DType::kUint8, DType::kFloat32, DType::kFloat64}) {
      for (const int64_t count : {1, 4096, 4097, 1 << 20}) {
        const ChunkPlan plan = Sample(members, count, dtype).Plan();
        const int64_t chunk = plan.CountOf(0);
        EXPECT_LE(chunk * SizeOf(dtype), size.chunk_bytes) << members;
        EXPECT_LE(plan.ShardOf(0, chunk).count * SizeOf(dtype), size.inbox_bytes) << members;
        EXPECT_TRUE(ShardsTile(plan, chunk)) << members << " members, " << count;
      }
    }
  }
}

TEST(StagingFor, StaysBelowSixteenMebibytesAndHoldsASliceOfEveryMember) {
  for (int members = 2; members <= 65'536; ++members) {
    const StagingSize size = StagingFor(members);
    const int64_t slot = 2 * size.chunk_bytes + members * size.inbox_bytes;
    ASSERT_LE(4 * slot, 16 << 20) << members;
    ASSERT_GT(size.slice_bytes, 0) << members;
    ASSERT_EQ(size.slice_bytes % 8, 0) << members << ": slices end between elements";
    ASSERT_LE(size.slice_bytes, size.inbox_bytes) << members;
    ASSERT_LE(members * size.slice_bytes, size.chunk_bytes) << members;
  }
}

TEST(StagingFor, KeepsMessagesOfSixteenKibibytesUpToSixtyFourMembers) {
  EXPECT_EQ(StagingFor(64).slice_bytes, 16 * 1024);
  EXPECT_EQ(StagingFor(64).inbox_bytes, 16 * 1024);
}

TEST(ChunkPlan, LeavesOutAbsentContributions) {
  Sample sample(4, 100'000);
  const std::vector<int> absent = {1, 3};
  sample.batch.absent = absent;
  const ChunkPlan plan = sample.Plan();
  EXPECT_TRUE(Contributes(sample.batch, 0));
  EXPECT_FALSE(Contributes(sample.batch, 1));
  EXPECT_TRUE(plan.Forwards(1, 0)) << "an absent member still reduces its shard";
}

// What each member has at the end, by member: letters of all members, each in its place.
using Gathered = std::vector<std::string>;

char LetterOf(int member) { return static_cast<char>('a' + member % 26); }

GatherPlan GatherPlanOf(Sample& sample, int member) {
  sample.batch.my_index = member;
  GatherPlan plan;
  plan.Reset(sample.batch);
  return plan;
}

// A message, which must be what its receiver expects from its sender with the round.
void Deliver(const std::vector<GatherPlan>& plans, int64_t round, int from, int port,
             const Gathered& sent, Gathered& received) {
  const GatherPlan::Message out = plans[static_cast<size_t>(from)].Sent(round, port);
  if (out.bytes == 0) return;
  const auto to = static_cast<size_t>(out.peer);
  const GatherPlan::Message in = plans[to].Received(round, port);
  EXPECT_EQ(in.peer, from);
  ASSERT_EQ(in.bytes, out.bytes);
  const std::string bytes = sent[static_cast<size_t>(from)].substr(static_cast<size_t>(out.begin),
                                                                   static_cast<size_t>(out.bytes));
  received[to].replace(static_cast<size_t>(in.begin), bytes.size(), bytes);
}

Gathered RunGather(Sample& sample) {
  std::vector<GatherPlan> plans;
  Gathered gathered;
  for (int member = 0; member < static_cast<int>(sample.ranks.size()); ++member) {
    plans.push_back(GatherPlanOf(sample, member));
    const Slice own = plans.back().BlockOf(member);
    EXPECT_EQ(own.begin, 0);
    gathered.push_back(std::string(2000, '.'));
    gathered.back().replace(0, static_cast<size_t>(own.count), static_cast<size_t>(own.count),
                            LetterOf(member));
  }
  for (int64_t round = 0; round < plans[0].rounds(); ++round) {
    const Gathered before = gathered;
    for (int from = 0; from < static_cast<int>(plans.size()); ++from) {
      for (int port = 0; port < plans[0].ports(); ++port) {
        Deliver(plans, round, from, port, before, gathered);
      }
    }
  }
  return gathered;
}

TEST(GatherPlan, BringsBlocksOfAnyLengthToEveryMember) {
  for (const int members : {2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 33}) {
    Sample sample(members, 0, DType::kUint8);
    sample.batch.kind = OpKind::kAllgather;
    std::vector<int64_t> splits;
    for (int i = 0; i < members; ++i) splits.push_back(i * 7 % 5);
    sample.batch.splits = splits;
    const Gathered gathered = RunGather(sample);
    for (int me = 0; me < members; ++me) {
      for (int from = 0; from < members; ++from) {
        const Slice block = GatherPlanOf(sample, me).BlockOf(from);
        EXPECT_EQ(block.count, splits[static_cast<size_t>(from)]);
        EXPECT_EQ(gathered[static_cast<size_t>(me)].substr(static_cast<size_t>(block.begin),
                                                           static_cast<size_t>(block.count)),
                  std::string(static_cast<size_t>(block.count), LetterOf(from)))
            << members << " members, from " << from << " to " << me;
      }
    }
  }
}

TEST(GatherPlan, SendsAMessageToEachMemberOfASmallSetAndOneARoundInLargerOnes) {
  const struct {
    int members, rounds, messages;
  } cases[] = {{2, 1, 1},  {3, 1, 2},  {7, 1, 6},  {8, 1, 7},       {9, 4, 4},
               {12, 4, 4}, {16, 4, 4}, {17, 5, 5}, {16'384, 14, 14}};
  for (const auto& one : cases) {
    Sample sample(one.members, 1);
    const GatherPlan plan = GatherPlanOf(sample, one.members / 2);
    EXPECT_EQ(plan.rounds(), one.rounds) << one.members;
    EXPECT_EQ(plan.rounds() * plan.ports(), one.messages) << one.members;
  }
}

TEST(GatherPlan, LeavesOutAbsentContributions) {
  for (const int members : {5, 12}) {
    Sample sample(members, 3, DType::kUint8);
    const std::vector<int> absent = {1, 2};
    sample.batch.absent = absent;
    const GatherPlan plan = GatherPlanOf(sample, 0);
    EXPECT_EQ(plan.BlockOf(1).count, 0);
    EXPECT_EQ(plan.BlockOf(3).begin, 3) << "blocks lie end to end";
    EXPECT_EQ(plan.Received(0, 0).bytes, 0);
    EXPECT_EQ(plan.Sent(0, 0).bytes, 3);
  }
}

TEST(GatherPlan, HasNoRoundForNoElements) {
  Sample sample(3, 0);
  EXPECT_EQ(GatherPlanOf(sample, 0).rounds(), 0);
}

TEST(GatherPlan, SuitsByWhatAllContributeTogether) {
  EXPECT_TRUE(GatherPlan::Suits(Sample(16, 1024).batch));
  EXPECT_FALSE(GatherPlan::Suits(Sample(16, 1025).batch));
  EXPECT_TRUE(GatherPlan::Suits(Sample(16'384, 1).batch));
  EXPECT_FALSE(GatherPlan::Suits(Sample(16'385, 1).batch));
  EXPECT_FALSE(GatherPlan::Suits(Sample(2, int64_t{1} << 62).batch));
  Sample gather(16, 16 * 1024);  // in all
  gather.batch.kind = OpKind::kAllgather;
  EXPECT_TRUE(GatherPlan::Suits(gather.batch));
  gather.batch.count += 1;
  EXPECT_FALSE(GatherPlan::Suits(gather.batch));
  Sample few(8, 16);
  few.batch.kind = OpKind::kAllgather;
  EXPECT_FALSE(GatherPlan::Suits(few.batch)) << "takes one round as it is";
}

}  // namespace
}  // namespace farandole
