#include "ops/cpu/partition.h"

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
  Partition Divide(int64_t slice_elements) const {
    Partition partition;
    partition.Reset(batch, slice_elements);
    return partition;
  }
  std::vector<int> ranks = {0, 1, 2};
  std::vector<int64_t> splits = {7, 5, 0};
  std::vector<int64_t> sends = {2, 6, 9};
  std::vector<int64_t> receives = {0, 6, 4};
  Batch batch;
};

constexpr OpKind kVariableSize[] = {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall};

TEST(Partition, HasAsManyChunksAsTheLongestSplitNeeds) {
  EXPECT_EQ(Sample(OpKind::kAllgather).Divide(4).chunks(), 2);
  EXPECT_EQ(Sample(OpKind::kReducescatter).Divide(3).chunks(), 3);
  EXPECT_EQ(Sample(OpKind::kAlltoall).Divide(4).chunks(), 3)
      << "by the count, not by the own splits";
}

TEST(Partition, HasNoChunkForNoElements) {
  for (const OpKind kind : kVariableSize) {
    Sample sample(kind);
    sample.batch.count = 0;
    sample.splits = sample.sends = sample.receives = {0, 0, 0};
    EXPECT_EQ(sample.Divide(4).chunks(), 0) << Name(kind);
  }
}

TEST(Partition, SendsTheOwnSplitOfAnAllgatherToEverybody) {
  const Partition partition = Sample(OpKind::kAllgather).Divide(4);
  for (const int to : {0, 1, 2}) {
    EXPECT_EQ(partition.Sent(to, 0), (Slice{0, 4}));
    EXPECT_EQ(partition.Sent(to, 1), (Slice{4, 1}));
  }
  EXPECT_EQ(partition.Received(0, 1), (Slice{4, 3}));
  EXPECT_EQ(partition.Received(1, 1), (Slice{11, 1}));
  EXPECT_EQ(partition.Received(2, 0).count, 0);
}

TEST(Partition, ReceivesTheOwnSplitOfAReducescatterFromEverybody) {
  const Partition partition = Sample(OpKind::kReducescatter).Divide(4);
  for (const int from : {0, 1, 2}) {
    EXPECT_EQ(partition.Received(from, 0), (Slice{0, 4}));
    EXPECT_EQ(partition.Received(from, 1), (Slice{4, 1}));
  }
  EXPECT_EQ(partition.Sent(0, 1), (Slice{4, 3}));
  EXPECT_EQ(partition.Sent(1, 1), (Slice{11, 1}));
  EXPECT_EQ(partition.Sent(2, 0).count, 0);
}

TEST(Partition, SendsAndReceivesAccordingToTheSplits) {
  const Partition partition = Sample(OpKind::kAlltoall).Divide(4);
  EXPECT_EQ(partition.Sent(0, 0), (Slice{0, 2}));
  EXPECT_EQ(partition.Sent(1, 1), (Slice{6, 2}));
  EXPECT_EQ(partition.Sent(2, 2), (Slice{16, 1}));
  EXPECT_EQ(partition.Received(0, 0).count, 0);
  EXPECT_EQ(partition.Received(2, 0), (Slice{6, 4}));
  EXPECT_EQ(partition.Received(2, 1).count, 0);
}

TEST(Partition, CountsTheChunksThatAreFull) {
  Sample sample(OpKind::kAllgather);
  EXPECT_EQ(sample.Divide(4).full_chunks(), 0) << "a split is empty";
  sample.splits = {8, 12, 9};
  EXPECT_EQ(sample.Divide(4).full_chunks(), 2);
  Sample all(OpKind::kAlltoall);
  all.receives = {6, 6, 4};
  EXPECT_EQ(all.Divide(2).full_chunks(), 1) << "by what is sent too";
}

TEST(Partition, CoversEverySplitOnce) {
  for (const OpKind kind : kVariableSize) {
    const Sample sample(kind);
    const Partition partition = sample.Divide(4);
    for (const int member : {0, 1, 2}) {
      int64_t next = partition.Sent(member, 0).begin;
      for (int64_t chunk = 0; chunk < partition.chunks(); ++chunk) {
        const Slice slice = partition.Sent(member, chunk);
        EXPECT_EQ(slice.begin, next) << Name(kind);
        EXPECT_LE(slice.count, partition.longest_slice());
        next += slice.count;
      }
      EXPECT_EQ(partition.Sent(member, partition.chunks()), (Slice{next, 0})) << Name(kind);
    }
  }
}

TEST(Partition, CountsElementsBeyondTwoToThe31) {
  Sample sample(OpKind::kAllgather);
  sample.splits = {int64_t{1} << 33, 5, 0};
  const Partition partition = sample.Divide(1 << 17);
  EXPECT_EQ(partition.chunks(), 1 << 16);
  EXPECT_EQ(partition.Received(0, (1 << 16) - 1), (Slice{(int64_t{1} << 33) - (1 << 17), 1 << 17}));
}

}  // namespace
}  // namespace farandole
