#include "coordinator/protocol/splits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coordinator/engine/operation.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kRanks[] = {0, 2, 5};

Signature Tensors(std::vector<std::vector<int64_t>> shapes) {
  Signature signature;
  for (std::vector<int64_t>& shape : shapes) {
    signature.tensors.push_back({"", DType::kFloat32, std::move(shape)});
  }
  return signature;
}

KeyName Key(OpKind kind) { return {kGlobalSet, kind, "x"}; }

std::vector<int64_t> Counts(OpKind kind, Signature signature, size_t t, size_t size,
                            std::vector<int64_t> rows = {}) {
  std::vector<int64_t> counts;
  signature.kind = kind;
  CountsOf(signature, rows, t, size, counts);
  return counts;
}

TEST(CountsOf, GivesTheFirstRanksOneRowMoreOfAReducescatter) {
  EXPECT_THAT(Counts(OpKind::kReducescatter, Tensors({{8, 2, 5}}), 0, 3), ElementsAre(30, 30, 20));
}

TEST(CountsOf, GivesTheLastRanksNothingOfFewerRowsThanRanks) {
  EXPECT_THAT(Counts(OpKind::kReducescatter, Tensors({{2}}), 0, 3), ElementsAre(1, 1, 0));
}

TEST(CountsOf, TakesTheRowsOfItsTensorInAnAllgather) {
  const Signature signature = Tensors({{0, 2}, {0}});
  const std::vector<int64_t> rows = {1, 2, 0, 4, 0, 2};
  EXPECT_THAT(Counts(OpKind::kAllgather, signature, 0, 3, rows), ElementsAre(2, 4, 0));
  EXPECT_THAT(Counts(OpKind::kAllgather, signature, 1, 3, rows), ElementsAre(4, 0, 2));
}

TEST(SplitEvenly, GivesEachRankTheSameNumberOfRows) {
  const std::vector<int64_t> rows = {6, 0};
  EXPECT_THAT(SplitEvenly(Key(OpKind::kAlltoall), rows, 3).value(), ElementsAre(2, 2, 2, 0, 0, 0));
  EXPECT_THAT(SplitEvenly(Key(OpKind::kAlltoall), rows, 4).status().message(),
              HasSubstr("alltoall \"x\": 6 rows do not divide among 4 ranks"));
}

TEST(WithoutRows, KeepsThemApartFromWhatRanksAgreeOn) {
  std::vector<int64_t> rows;
  EXPECT_EQ(WithoutRows(Tensors({{4, 2}, {1}, {}}), rows), Tensors({{0, 2}, {0}, {}}));
  EXPECT_THAT(rows, ElementsAre(4, 1, 0));
}

TEST(CollectRows, TakesKnownRowsOfRanksThatSentNoneAndNoneOfAbsentOnes) {
  const Signature signature = Tensors({{0}, {0}});
  KeyVotes votes;
  votes.rows = {{2, {7, 8}}};
  votes.absent = {{5, {2}}};
  const std::vector<int64_t> known = {1, 2, 3, 4, 5, 6};
  const KeyName key = Key(OpKind::kAllgather);
  EXPECT_THAT(CollectRows(key, signature, votes, kRanks, known).value(),
              ElementsAre(1, 7, 3, 4, 8, 0));
  EXPECT_THAT(CollectRows(key, signature, votes, kRanks, {}).status().message(),
              HasSubstr("rank 0 voted without its rows"));
}

TEST(DescribeRows, ShortensALongList) {
  const std::vector<int64_t> rows(20, 7);
  EXPECT_EQ(DescribeRows(rows), "[7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,... (20 ranks)]");
}

struct Refused {
  OpKind kind;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> splits;
  const char* text;
  DType dtype = DType::kFloat32;
};

const Refused kRefused[] = {
    {OpKind::kAllgather, {{}}, {}, "allgather \"x\": float32 [] is a scalar, which has no rows"},
    {OpKind::kAlltoall, {{}}, {0, 0, 0}, "alltoall \"x\": float32 [] is a scalar"},
    {OpKind::kAllgather, {{-1, 4}}, {}, "[-1] rows of float32 [*,4] must not be negative"},
    {OpKind::kAllgather, {}, {}, "no tensor"},
    {OpKind::kReducescatter,
     {{6}},
     {},
     "reducescatter \"x\": sum is not defined for bool",
     DType::kBool},
    {OpKind::kAllreduce, {{4}}, {1}, "1 splits; expected one for each of 0 tensors"},
    {OpKind::kAlltoall, {{4}}, {1, 1}, "2 splits; expected one for each of 1 tensors and 3 ranks"},
    {OpKind::kAlltoall, {{4}}, {1, -1, 1}, "[1,-1,1] rows of float32 [*] must not be negative"},
    {OpKind::kAlltoall,
     {{4}},
     {1, 1, 3},
     "splits [1,1,3] add up to 5 rows; expected at most the 4 of the tensor"},
    {OpKind::kAlltoall, {{int64_t{1} << 60}}, {0, 0, 0}, "exceed"},
};

TEST(Cut, IsRefusedByNameBeforeItStarts) {
  for (const Refused& row : kRefused) {
    const KeyName key = Key(row.kind);
    std::vector<int64_t> rows;
    Signature signature = Tensors(row.shapes);
    for (TensorSignature& tensor : signature.tensors) tensor.dtype = row.dtype;
    if (RowsMayDiffer(key.kind)) signature = WithoutRows(signature, rows);
    Status refused = Validate(key, signature, kRanks);
    if (refused.ok()) refused = CheckPassedRows(key, signature, rows);
    if (refused.ok()) refused = CheckSplits(key, signature, rows, row.splits, 3);
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.message(), HasSubstr(row.text));
  }
}

TEST(CheckSplits, TakesThoseThatFit) {
  const std::vector<int64_t> rows = {4, 5}, splits = {4, 0, 0, 1, 0, 3};
  const Signature signature = Tensors({{0}, {0, 0}});
  EXPECT_TRUE(CheckSplits(Key(OpKind::kAlltoall), signature, rows, splits, 3).ok());
}

Extent ExtentOfFour(OpKind kind, std::vector<int64_t> splits, int32_t rank) {
  Operation operation;
  operation.name = Key(kind);
  operation.signature = Tensors({{4, 2}});
  if (RowsMayDiffer(kind)) operation.signature = WithoutRows(operation.signature, operation.rows);
  operation.signature.root = 2;
  operation.splits = std::move(splits);
  return ExtentOf(operation, 0, kRanks, rank);
}

TEST(ExtentOf, CountsTheBytesOfThisRank) {
  EXPECT_EQ(ExtentOfFour(OpKind::kAllgather, {}, 2), (Extent{32, 96}));
  EXPECT_EQ(ExtentOfFour(OpKind::kAlltoall, {0, 2, 1}, 0), (Extent{24, 32}));
  EXPECT_EQ(ExtentOfFour(OpKind::kReducescatter, {}, 0), (Extent{32, 16}));
  EXPECT_EQ(ExtentOfFour(OpKind::kReducescatter, {}, 5), (Extent{32, 8}));
  EXPECT_EQ(ExtentOfFour(OpKind::kBroadcast, {}, 0), (Extent{0, 32}));
  EXPECT_EQ(ExtentOfFour(OpKind::kBroadcast, {}, 2), (Extent{32, 32}));
}

TEST(ExtentOf, IsNothingOfNoRows) {
  Operation operation;
  operation.name = Key(OpKind::kAllreduce);
  operation.signature = Tensors({{0, int64_t{1} << 40, int64_t{1} << 40}, {}});
  EXPECT_EQ(ExtentOf(operation, 0, kRanks, 0), Extent());
  EXPECT_EQ(ExtentOf(operation, 1, kRanks, 0), (Extent{4, 4})) << "a scalar has one element";
}

}  // namespace
}  // namespace farandole
