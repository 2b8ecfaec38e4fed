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
    signature.members.push_back({"", DType::kFloat32, std::move(shape)});
  }
  return signature;
}

KeyName Key(OpKind kind) { return {kGlobalSet, kind, "x"}; }

std::vector<int64_t> Parts(OpKind kind, const Signature& signature, size_t m, size_t size) {
  std::vector<int64_t> parts;
  CountsOf(kind, signature, m, size, parts);
  return parts;
}

TEST(CountsOf, GivesTheFirstRanksOneRowMoreOfAReducescatter) {
  EXPECT_THAT(Parts(OpKind::kReducescatter, Tensors({{8, 2, 5}}), 0, 3), ElementsAre(30, 30, 20));
}

TEST(CountsOf, GivesTheLastRanksNothingOfFewerRowsThanRanks) {
  EXPECT_THAT(Parts(OpKind::kReducescatter, Tensors({{2}}), 0, 3), ElementsAre(1, 1, 0));
}

TEST(CountsOf, TakesTheRowsOfItsTensorInAnAllgather) {
  Signature signature = Tensors({{3, 2}, {6}});
  signature.rows = {1, 2, 0, 4, 0, 2};
  EXPECT_THAT(Parts(OpKind::kAllgather, signature, 0, 3), ElementsAre(2, 4, 0));
  EXPECT_THAT(Parts(OpKind::kAllgather, signature, 1, 3), ElementsAre(4, 0, 2));
}

TEST(SplitsOf, HasTheRowsSentBeforeThoseReceivedOfEachTensor) {
  const std::vector<int64_t> splits = {1, 2, 3, 4, 5, 6, 7, 8};
  const Splits second = SplitsOf(splits, 1, 2);
  EXPECT_THAT(second.sends, ElementsAre(5, 6));
  EXPECT_THAT(second.receives, ElementsAre(7, 8));
}

TEST(DescribeRows, ShortensALongList) {
  const std::vector<int64_t> rows(20, 7);
  EXPECT_EQ(DescribeRows(rows), "[7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,7,... (20 ranks)]");
}

struct Refused {
  const char* name;
  OpKind kind;
  Signature signature;
  std::vector<int64_t> rows;
  std::vector<int64_t> splits;
  const char* text;
};

class Cut : public testing::TestWithParam<Refused> {};

TEST_P(Cut, IsRefusedByNameBeforeItStarts) {
  Signature signature = GetParam().signature;
  signature.rows = GetParam().rows;
  Status refused = Validate(Key(GetParam().kind), signature, kRanks);
  if (refused.ok()) {
    refused = CheckSplits(Key(GetParam().kind), signature, GetParam().splits, kRanks, 2);
  }
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr(GetParam().text));
}

Signature Flags() {
  Signature signature = Tensors({{6}});
  signature.members[0].dtype = DType::kBool;
  return signature;
}

INSTANTIATE_TEST_SUITE_P(
    Tensor, Cut,
    testing::Values(Refused{"ScalarOfAnAllgather",
                            OpKind::kAllgather,
                            Tensors({{}}),
                            {1, 0, 0},
                            {},
                            "allgather \"x\": float32 [] is a scalar, which has no rows"},
                    Refused{"ScalarOfAnAlltoall",
                            OpKind::kAlltoall,
                            Tensors({{}}),
                            {},
                            {0, 0, 0, 0, 0, 0},
                            "alltoall \"x\": float32 [] is a scalar"},
                    Refused{"RowsOfTwoRanksOfThree",
                            OpKind::kAllgather,
                            Tensors({{4}}),
                            {2, 2},
                            {},
                            "2 numbers of rows; expected one for each of 1 tensors and 3 ranks"},
                    Refused{"NoTensor", OpKind::kAllgather, Signature(), {}, {}, "no tensor"},
                    Refused{"RowsThatDoNotAddUp",
                            OpKind::kAllgather,
                            Tensors({{4}}),
                            {2, 1, 2},
                            {},
                            "rows [2,1,2] of float32 [4] add up to 5; expected 4"},
                    Refused{"RowsOfAReducescatter",
                            OpKind::kReducescatter,
                            Tensors({{4}}),
                            {2, 1, 1},
                            {},
                            "told for an allgather alone"},
                    Refused{"SumOfBools",
                            OpKind::kReducescatter,
                            Flags(),
                            {},
                            {},
                            "reducescatter \"x\": sum is not defined for bool"},
                    Refused{"SplitsOfAnAllreduce",
                            OpKind::kAllreduce,
                            Tensors({{4}}),
                            {},
                            {1},
                            "1 numbers of rows sent and received; expected 0"},
                    Refused{"SplitsOfTwoRanksOfThree",
                            OpKind::kAlltoall,
                            Tensors({{4}}),
                            {},
                            {1, 1, 1, 1},
                            "4 numbers of rows sent and received; expected 6"},
                    Refused{"NegativeSplit",
                            OpKind::kAlltoall,
                            Tensors({{4}}),
                            {},
                            {1, -1, 1, 1, 1, 1},
                            "what is sent has -1 rows for one rank; expected 0 to 4"},
                    Refused{"SplitAboveTheLargest",
                            OpKind::kAlltoall,
                            Tensors({{4}}),
                            {},
                            {1, 1, 1, 1, 5, 1},
                            "what is received has 5 rows for one rank; expected 0 to 4"},
                    Refused{"AnotherNumberToItself",
                            OpKind::kAlltoall,
                            Tensors({{4}}),
                            {},
                            {0, 1, 0, 0, 2, 0},
                            "rank 2 sends itself 1 rows and receives 2 from itself"},
                    Refused{"MoreThanAnAddressHolds",
                            OpKind::kAlltoall,
                            Tensors({{int64_t{1} << 58}}),
                            {},
                            {int64_t{1} << 58, int64_t{1} << 58, 0, 0, 0, 0},
                            "exceeds"}),
    [](const auto& one) { return std::string(one.param.name); });

TEST(CheckSplits, TakesThoseThatFit) {
  const std::vector<int64_t> splits = {4, 0, 1, 0, 0, 0, 0, 3, 0, 2, 3, 4};
  const Signature signature = Tensors({{4}, {4, 0}});
  EXPECT_TRUE(CheckSplits(Key(OpKind::kAlltoall), signature, splits, kRanks, 2).ok());
}

Extent ExtentOfFour(OpKind kind, std::vector<int64_t> rows, std::vector<int64_t> splits,
                    int32_t rank) {
  Operation operation;
  operation.name = Key(kind);
  operation.signature = Tensors({{4, 2}});
  operation.signature.root = 2;
  operation.signature.rows = std::move(rows);
  operation.splits = std::move(splits);
  return ExtentOf(operation, 0, kRanks, rank);
}

TEST(ExtentOf, CountsTheBytesOfThisRank) {
  EXPECT_EQ(ExtentOfFour(OpKind::kAllgather, {1, 3, 0}, {}, 5), (Extent{0, 32}));
  EXPECT_EQ(ExtentOfFour(OpKind::kAllgather, {1, 3, 0}, {}, 2), (Extent{24, 32}));
  EXPECT_EQ(ExtentOfFour(OpKind::kAlltoall, {}, {0, 0, 0, 1, 2, 3}, 0), (Extent{0, 48}));
  EXPECT_EQ(ExtentOfFour(OpKind::kReducescatter, {}, {}, 0), (Extent{32, 16}));
  EXPECT_EQ(ExtentOfFour(OpKind::kReducescatter, {}, {}, 5), (Extent{32, 8}));
  EXPECT_EQ(ExtentOfFour(OpKind::kBroadcast, {}, {}, 0), (Extent{0, 32}));
  EXPECT_EQ(ExtentOfFour(OpKind::kBroadcast, {}, {}, 2), (Extent{32, 32}));
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
