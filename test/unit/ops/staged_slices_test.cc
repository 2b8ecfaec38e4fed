// How batches are divided into slices of staging slots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "ops/gpu/staged/slices.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Sizes = std::vector<int64_t>;

int64_t Sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }

/// What one member passes: bytes, so that counts are addresses.
struct Member {
  Member(OpKind kind, int index, const Sizes& parts) : Member(kind, index, parts, parts) {}
  Member(OpKind kind, int index, const Sizes& first, const Sizes& second)
      : one(first), other(second), ranks(first.size()) {
    std::iota(ranks.begin(), ranks.end(), 0);
    batch.kind = kind;
    batch.dtype = batch.wire = DType::kUint8;
    batch.ranks = ranks;
    batch.my_index = index;
    if (kind == OpKind::kAlltoall) {
      batch.sends = one;
      batch.receives = other;
    } else {
      batch.splits = one;
      batch.count = Sum(one);
    }
    segment = {in.data(), out.data(), batch.count};
    batch.segments = {&segment, 1};
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  Sizes one, other;
  std::vector<int> ranks;
  std::vector<std::byte> in = std::vector<std::byte>(1000);
  std::vector<std::byte> out = std::vector<std::byte>(1000);
  Segment segment;
  Batch batch;
};

std::vector<StagedSlice> Slices(const Batch& batch, int64_t slot_bytes) {
  StagedSlices all;
  EXPECT_TRUE(all.Begin(batch, slot_bytes).ok());
  std::vector<StagedSlice> slices(static_cast<size_t>(all.count()));
  for (StagedSlice& slice : slices) all.Next(slice);
  return slices;
}

/// The places of `base` that runs touch, one by one, in ascending order.
template <class Pointer>
Sizes Touched(const std::vector<StagedSlice>& slices, std::vector<StagedRun> StagedSlice::*runs,
              Pointer StagedRun::*place, const std::vector<std::byte>& base) {
  Sizes touched;
  for (const StagedSlice& slice : slices) {
    for (const StagedRun& run : slice.*runs) {
      for (int64_t i = 0; i < run.count; ++i) {
        touched.push_back(static_cast<int64_t>(run.*place - base.data()) + i);
      }
    }
  }
  std::sort(touched.begin(), touched.end());
  return touched;
}
Sizes Down(const Member& member, const std::vector<StagedSlice>& slices) {
  return Touched(slices, &StagedSlice::down, &StagedRun::in, member.in);
}
Sizes Up(const Member& member, const std::vector<StagedSlice>& slices) {
  return Touched(slices, &StagedSlice::up, &StagedRun::out, member.out);
}
Sizes UpTo(int64_t count) {
  Sizes places(static_cast<size_t>(count));
  std::iota(places.begin(), places.end(), int64_t{0});
  return places;
}

/// Halves of the slot hold what goes down and what comes up, without a gap and without an overlap.
void ExpectToFit(const StagedSlice& slice, int64_t slot_bytes) {
  EXPECT_LE(slice.in_count, slice.out_begin);
  EXPECT_LE(slice.out_begin + slice.out_count, slot_bytes);
  for (const auto& [runs, count] :
       {std::pair{&slice.down, slice.in_count}, std::pair{&slice.up, slice.out_count}}) {
    int64_t at = 0;
    for (const StagedRun& run : *runs) {
      EXPECT_EQ(run.at, at);
      at += run.count;
    }
    EXPECT_EQ(at, count);
  }
}

class StagedSlicesTest : public ::testing::Test {
 protected:
  int Below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }
  Sizes DrawSizes(int members) {
    Sizes sizes(static_cast<size_t>(members));
    for (int64_t& size : sizes) size = Below(3) * Below(80);
    return sizes;
  }

  const unsigned seed_ = std::random_device{}();
  std::mt19937 random_{seed_};
};

TEST_F(StagedSlicesTest, TakesEveryElementOnceAndTheSameSharesOnAllMembers) {
  SCOPED_TRACE(seed_);
  for (int round = 0; round < 300; ++round) {
    const int members = 2 + Below(3);
    const Sizes parts = DrawSizes(members);
    const int64_t slot_bytes = 16 + Below(100);
    const OpKind kind = Below(2) == 0 ? OpKind::kAllgather : OpKind::kReducescatter;
    std::vector<Sizes> first;
    for (int index = 0; index < members; ++index) {
      const Member member(kind, index, parts);
      const std::vector<StagedSlice> slices = Slices(member.batch, slot_bytes);
      const int64_t mine = parts[static_cast<size_t>(index)];
      const bool gathers = kind == OpKind::kAllgather;
      ASSERT_EQ(Down(member, slices), UpTo(gathers ? mine : Sum(parts)));
      ASSERT_EQ(Up(member, slices), UpTo(gathers ? Sum(parts) : mine));
      std::vector<Sizes> shares;
      for (const StagedSlice& slice : slices) {
        ExpectToFit(slice, slot_bytes);
        ASSERT_EQ(slice.count, Sum(slice.splits));
        shares.push_back(slice.splits);
      }
      if (index == 0) first = shares;
      ASSERT_EQ(shares, first);
    }
  }
}

TEST_F(StagedSlicesTest, CutsBothEndsOfAnExchangeAlike) {
  SCOPED_TRACE(seed_);
  for (int round = 0; round < 300; ++round) {
    const int members = 2 + Below(3);
    const auto size = static_cast<size_t>(members);
    std::vector<Sizes> sends, receives(size, Sizes(size));
    int64_t largest = 0;
    for (size_t from = 0; from < size; ++from) {
      sends.push_back(DrawSizes(members));
      for (size_t to = 0; to < size; ++to) receives[to][from] = sends[from][to];
      largest = std::max(largest, *std::max_element(sends[from].begin(), sends[from].end()));
    }
    const int64_t slot_bytes = 16 + Below(100);
    std::vector<std::vector<StagedSlice>> all;
    for (size_t me = 0; me < size; ++me) {
      Member member(OpKind::kAlltoall, static_cast<int>(me), sends[me], receives[me]);
      member.batch.count = member.segment.count = largest;
      all.push_back(Slices(member.batch, slot_bytes));
      EXPECT_EQ(Down(member, all.back()).size(),
                static_cast<size_t>(Sum(sends[me]) - sends[me][me]));
      EXPECT_EQ(Up(member, all.back()).size(),
                static_cast<size_t>(Sum(receives[me]) - receives[me][me]));
      ASSERT_EQ(all.back().size(), all.front().size());
    }
    for (size_t k = 0; k < all.front().size(); ++k) {
      for (size_t from = 0; from < size; ++from) {
        ExpectToFit(all[from][k], slot_bytes);
        ASSERT_EQ(all[from][k].count, all[0][k].count);
        for (size_t to = 0; to < size; ++to) {
          ASSERT_EQ(all[from][k].sends[to], all[to][k].receives[from]);
          ASSERT_LE(all[from][k].sends[to], all[0][k].count);
        }
      }
    }
  }
}

TEST_F(StagedSlicesTest, LeavesTheOwnPieceOfAnExchangeOnTheGpu) {
  Member member(OpKind::kAlltoall, 1, {3, 5, 2}, {4, 5, 1});
  member.batch.count = member.segment.count = 5;
  StagedSlices all;
  ASSERT_TRUE(all.Begin(member.batch, 100).ok());
  std::vector<DeviceMove> moves;
  all.Stays(moves);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(moves[0].in, member.in.data() + 3);
  EXPECT_EQ(moves[0].out, member.out.data() + 4);
  EXPECT_EQ(moves[0].count, 5);
  StagedSlice slice;
  all.Next(slice);
  EXPECT_THAT(slice.sends, ElementsAre(3, 0, 2));
  EXPECT_THAT(slice.receives, ElementsAre(4, 0, 1));
}

TEST_F(StagedSlicesTest, BringsNothingUpThatIsDropped) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    Member member(kind, 0, {3, 3});
    member.batch.count = kind == OpKind::kAlltoall ? 3 : 6;
    member.segment.out = nullptr;
    for (const StagedSlice& slice : Slices(member.batch, 100)) {
      EXPECT_FALSE(slice.takes);
      EXPECT_THAT(slice.up, IsEmpty());
    }
    StagedSlices all;
    ASSERT_TRUE(all.Begin(member.batch, 100).ok());
    std::vector<DeviceMove> moves;
    all.Stays(moves);
    EXPECT_THAT(moves, IsEmpty());
  }
}

TEST_F(StagedSlicesTest, RefusesASlotThatIsTooSmallForTheMembers) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    Member member(kind, 0, {1, 1, 1});
    member.batch.count = 3;
    StagedSlices all;
    const Status status = all.Begin(member.batch, 5);
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(status.message(), std::string(Name(kind)) +
                                    " among 3 ranks: staging slots of 5 bytes are too small for "
                                    "as many");
  }
}

}  // namespace
}  // namespace farandole
