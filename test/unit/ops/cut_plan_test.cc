#include "ops/cpu/cut_plan.h"

#include <gtest/gtest.h>

#include <vector>

namespace farandole {

// Printed by GoogleTest.
bool operator==(const Slice& a, const Slice& b) { return a.begin == b.begin && a.count == b.count; }

namespace {

/// Three members; this one is the second.
struct Sample {
  explicit Sample(OpKind kind) {
    batch.kind = kind;
    batch.ranks = ranks;
    batch.my_index = 1;
    batch.count = kind == OpKind::kAlltoall ? 9 : 12;
    batch.splits = splits;
    batch.sends = sends;
    batch.receives = receives;
  }
  CutPlan Plan(int64_t slice_elements) const {
    CutPlan plan;
    plan.Reset(batch, slice_elements);
    return plan;
  }
  std::vector<int> ranks = {0, 1, 2};
  std::vector<int64_t> splits = {7, 5, 0};
  std::vector<int64_t> sends = {2, 6, 9};
  std::vector<int64_t> receives = {0, 6, 4};
  Batch batch;
};

constexpr OpKind kCutting[] = {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall};

TEST(CutPlan, HasAsManyChunksAsTheLongestSplitNeeds) {
  EXPECT_EQ(Sample(OpKind::kAllgather).Plan(4).chunks(), 2);
  EXPECT_EQ(Sample(OpKind::kReducescatter).Plan(3).chunks(), 3);
  EXPECT_EQ(Sample(OpKind::kAlltoall).Plan(4).chunks(), 3) << "by the count, not by the own splits";
}

TEST(CutPlan, HasNoChunkForNoElements) {
  for (const OpKind kind : kCutting) {
    Sample sample(kind);
    sample.batch.count = 0;
    sample.splits = sample.sends = sample.receives = {0, 0, 0};
    EXPECT_EQ(sample.Plan(4).chunks(), 0) << Name(kind);
  }
}

TEST(CutPlan, SendsTheOwnSplitOfAnAllgatherToEverybody) {
  const CutPlan plan = Sample(OpKind::kAllgather).Plan(4);
  for (const int to : {0, 1, 2}) {
    EXPECT_EQ(plan.Sent(to, 0), (Slice{0, 4}));
    EXPECT_EQ(plan.Sent(to, 1), (Slice{4, 1}));
  }
  EXPECT_EQ(plan.Taken(0, 1), (Slice{4, 3}));
  EXPECT_EQ(plan.Taken(1, 1), (Slice{11, 1}));
  EXPECT_EQ(plan.Taken(2, 0).count, 0);
}

TEST(CutPlan, TakesTheOwnSplitOfAReducescatterFromEverybody) {
  const CutPlan plan = Sample(OpKind::kReducescatter).Plan(4);
  for (const int from : {0, 1, 2}) {
    EXPECT_EQ(plan.Taken(from, 0), (Slice{0, 4}));
    EXPECT_EQ(plan.Taken(from, 1), (Slice{4, 1}));
  }
  EXPECT_EQ(plan.Sent(0, 1), (Slice{4, 3}));
  EXPECT_EQ(plan.Sent(1, 1), (Slice{11, 1}));
  EXPECT_EQ(plan.Sent(2, 0).count, 0);
}

TEST(CutPlan, ExchangesWhatTheSplitsSay) {
  const CutPlan plan = Sample(OpKind::kAlltoall).Plan(4);
  EXPECT_EQ(plan.Sent(0, 0), (Slice{0, 2}));
  EXPECT_EQ(plan.Sent(1, 1), (Slice{6, 2}));
  EXPECT_EQ(plan.Sent(2, 2), (Slice{16, 1}));
  EXPECT_EQ(plan.Taken(0, 0).count, 0);
  EXPECT_EQ(plan.Taken(2, 0), (Slice{6, 4}));
  EXPECT_EQ(plan.Taken(2, 1).count, 0);
}

TEST(CutPlan, TellsTheChunksThatAreFull) {
  Sample sample(OpKind::kAllgather);
  EXPECT_EQ(sample.Plan(4).full_chunks(), 0) << "a split is empty";
  sample.splits = {8, 12, 9};
  EXPECT_EQ(sample.Plan(4).full_chunks(), 2);
  Sample all(OpKind::kAlltoall);
  all.receives = {6, 6, 4};
  EXPECT_EQ(all.Plan(2).full_chunks(), 1) << "by what is sent too";
}

TEST(CutPlan, CoversEverySplitOnce) {
  for (const OpKind kind : kCutting) {
    const Sample sample(kind);
    const CutPlan plan = sample.Plan(4);
    for (const int member : {0, 1, 2}) {
      int64_t next = plan.Sent(member, 0).begin;
      for (int64_t chunk = 0; chunk < plan.chunks(); ++chunk) {
        const Slice slice = plan.Sent(member, chunk);
        EXPECT_EQ(slice.begin, next) << Name(kind);
        EXPECT_LE(slice.count, plan.longest_slice());
        next += slice.count;
      }
      EXPECT_EQ(plan.Sent(member, plan.chunks()), (Slice{next, 0})) << Name(kind);
    }
  }
}

TEST(CutPlan, CountsElementsBeyondTwoToThe31) {
  Sample sample(OpKind::kAllgather);
  sample.splits = {int64_t{1} << 33, 5, 0};
  const CutPlan plan = sample.Plan(1 << 17);
  EXPECT_EQ(plan.chunks(), 1 << 16);
  EXPECT_EQ(plan.Taken(0, (1 << 16) - 1), (Slice{(int64_t{1} << 33) - (1 << 17), 1 << 17}));
}

}  // namespace
}  // namespace farandole
