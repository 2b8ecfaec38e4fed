// How batches that cut tensors are cut once more, into pieces of staging slots.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "ops/staged/cut.h"

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

std::vector<StagedPiece> Pieces(const Batch& batch, int64_t slot_bytes) {
  StagedCut cut;
  EXPECT_TRUE(cut.Begin(batch, slot_bytes).ok());
  std::vector<StagedPiece> pieces(static_cast<size_t>(cut.pieces()));
  for (StagedPiece& piece : pieces) cut.Next(piece);
  return pieces;
}

/// The places of `base` that runs touch, one by one, in ascending order.
template <class Pointer>
Sizes Touched(const std::vector<StagedPiece>& pieces, std::vector<StagedRun> StagedPiece::*runs,
              Pointer StagedRun::*place, const std::vector<std::byte>& base) {
  Sizes touched;
  for (const StagedPiece& piece : pieces) {
    for (const StagedRun& run : piece.*runs) {
      for (int64_t i = 0; i < run.count; ++i) {
        touched.push_back(static_cast<int64_t>(run.*place - base.data()) + i);
      }
    }
  }
  std::sort(touched.begin(), touched.end());
  return touched;
}
Sizes Down(const Member& member, const std::vector<StagedPiece>& pieces) {
  return Touched(pieces, &StagedPiece::down, &StagedRun::in, member.in);
}
Sizes Up(const Member& member, const std::vector<StagedPiece>& pieces) {
  return Touched(pieces, &StagedPiece::up, &StagedRun::out, member.out);
}
Sizes UpTo(int64_t count) {
  Sizes places(static_cast<size_t>(count));
  std::iota(places.begin(), places.end(), int64_t{0});
  return places;
}

/// Halves of the slot hold what goes down and what comes up, without a gap and without an overlap.
void ExpectToFit(const StagedPiece& piece, int64_t slot_bytes) {
  EXPECT_LE(piece.in_count, piece.out_begin);
  EXPECT_LE(piece.out_begin + piece.out_count, slot_bytes);
  for (const auto& [runs, count] :
       {std::pair{&piece.down, piece.in_count}, std::pair{&piece.up, piece.out_count}}) {
    int64_t at = 0;
    for (const StagedRun& run : *runs) {
      EXPECT_EQ(run.at, at);
      at += run.count;
    }
    EXPECT_EQ(at, count);
  }
}

class StagedCutTest : public ::testing::Test {
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

TEST_F(StagedCutTest, TakesEveryElementOnceAndTheSameSharesOnAllMembers) {
  SCOPED_TRACE(seed_);
  for (int round = 0; round < 300; ++round) {
    const int members = 2 + Below(3);
    const Sizes parts = DrawSizes(members);
    const int64_t slot_bytes = 16 + Below(100);
    const OpKind kind = Below(2) == 0 ? OpKind::kAllgather : OpKind::kReducescatter;
    std::vector<Sizes> first;
    for (int index = 0; index < members; ++index) {
      const Member member(kind, index, parts);
      const std::vector<StagedPiece> pieces = Pieces(member.batch, slot_bytes);
      const int64_t mine = parts[static_cast<size_t>(index)];
      const bool gathers = kind == OpKind::kAllgather;
      ASSERT_EQ(Down(member, pieces), UpTo(gathers ? mine : Sum(parts)));
      ASSERT_EQ(Up(member, pieces), UpTo(gathers ? Sum(parts) : mine));
      std::vector<Sizes> shares;
      for (const StagedPiece& piece : pieces) {
        ExpectToFit(piece, slot_bytes);
        ASSERT_EQ(piece.count, Sum(piece.parts));
        shares.push_back(piece.parts);
      }
      if (index == 0) first = shares;
      ASSERT_EQ(shares, first);
    }
  }
}

TEST_F(StagedCutTest, CutsBothEndsOfAnExchangeAlike) {
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
    std::vector<std::vector<StagedPiece>> all;
    for (size_t me = 0; me < size; ++me) {
      Member member(OpKind::kAlltoall, static_cast<int>(me), sends[me], receives[me]);
      member.batch.count = member.segment.count = largest;
      all.push_back(Pieces(member.batch, slot_bytes));
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

TEST_F(StagedCutTest, LeavesTheOwnPieceOfAnExchangeOnTheGpu) {
  Member member(OpKind::kAlltoall, 1, {3, 5, 2}, {4, 5, 1});
  member.batch.count = member.segment.count = 5;
  StagedCut cut;
  ASSERT_TRUE(cut.Begin(member.batch, 100).ok());
  std::vector<DeviceMove> moves;
  cut.Stays(moves);
  ASSERT_EQ(moves.size(), 1u);
  EXPECT_EQ(moves[0].in, member.in.data() + 3);
  EXPECT_EQ(moves[0].out, member.out.data() + 4);
  EXPECT_EQ(moves[0].count, 5);
  StagedPiece piece;
  cut.Next(piece);
  EXPECT_THAT(piece.sends, ElementsAre(3, 0, 2));
  EXPECT_THAT(piece.receives, ElementsAre(4, 0, 1));
}

TEST_F(StagedCutTest, BringsNothingUpThatIsDropped) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    Member member(kind, 0, {3, 3});
    member.batch.count = kind == OpKind::kAlltoall ? 3 : 6;
    member.segment.out = nullptr;
    for (const StagedPiece& piece : Pieces(member.batch, 100)) {
      EXPECT_FALSE(piece.takes);
      EXPECT_THAT(piece.up, IsEmpty());
    }
    StagedCut cut;
    ASSERT_TRUE(cut.Begin(member.batch, 100).ok());
    std::vector<DeviceMove> moves;
    cut.Stays(moves);
    EXPECT_THAT(moves, IsEmpty());
  }
}

TEST_F(StagedCutTest, RefusesASlotThatIsTooSmallForTheMembers) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    Member member(kind, 0, {1, 1, 1});
    member.batch.count = 3;
    StagedCut cut;
    const Status status = cut.Begin(member.batch, 5);
    EXPECT_EQ(status.code(), Code::kResourceExhausted);
    EXPECT_EQ(status.message(), std::string(Name(kind)) +
                                    " among 3 ranks: staging slots of 5 bytes are too small for "
                                    "as many");
  }
}

}  // namespace
}  // namespace farandole
