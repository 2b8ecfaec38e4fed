#include "coordinator/diagnosis/divergence.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace farandole {
namespace {

KeyName Named(const std::string& name, uint32_t set = kGlobalSet) {
  return {set, OpKind::kAllreduce, name};
}

using Positions = std::vector<size_t>;

struct Row {
  const char* why;
  std::vector<WaitingRanks> waiting;
  bool (*is_awaited)(const KeyName&, int32_t);
  Positions stuck;
};

const auto kEverybody = [](const KeyName&, int32_t) { return true; };

const Row kRows[] = {
    {"two wait for different keys",
     {{{0}, {Named("a")}}, {{1, 2}, {Named("b")}}},
     kEverybody,
     {0, 1}},
    {"both wait for rank 2 alone, which may submit", {{{0, 1}, {Named("a")}}}, kEverybody, {}},
    {"rank 2 computes, but the others need one another",
     {{{0}, {Named("a")}}, {{1}, {Named("b")}}},
     kEverybody,
     {0, 1}},
    {"one key that can be decided is enough",
     {{{0}, {Named("a"), Named("b")}}, {{1}, {Named("b")}}},
     kEverybody,
     {}},
    {"rank 2 waits for rank 1, which will have ended what it has in common with rank 0",
     {{{0}, {Named("a")}}, {{1}, {Named("a")}}, {{2}, {Named("c")}}},
     [](const KeyName& key, int32_t rank) { return key.name == "a" ? rank < 2 : rank > 0; },
     {}},
    {"ranks outside of the set and joined ones are not missing",
     {{{0}, {Named("a", 1)}}, {{1}, {Named("b", 2)}}},
     [](const KeyName&, int32_t) { return false; },
     {}},
    {"a cycle over sets: n holds ranks n - 1 and n mod 3",
     {{{0}, {Named("x", 1)}}, {{1}, {Named("y", 2)}}, {{2}, {Named("z", 3)}}},
     [](const KeyName& key, int32_t rank) {
       const auto set = static_cast<int32_t>(key.set);
       return rank == set - 1 || rank == set % 3;
     },
     {0, 1, 2}},
    {"rank 1 may go on", {{{0}, {Named("a")}}, {{1}, {Named("b")}, true}}, kEverybody, {}},
};

TEST(CannotGoOn, FindsWhoIsStuck) {
  for (const Row& row : kRows)
    EXPECT_EQ(CannotGoOn(row.waiting, row.is_awaited), row.stuck) << row.why;
}

WaitingRanks InOrder(int32_t rank, const std::vector<std::string>& names) {
  WaitingRanks waiting{{rank}, {}, true, true};
  for (const std::string& name : names) waiting.keys.push_back(Named(name));
  return waiting;
}

TEST(OutOfOrder, WhoHasOnlyFallenBehindIsNot) {
  EXPECT_EQ(OutOfOrder(std::vector{InOrder(0, {"a", "b"}), InOrder(1, {"a"})}), Positions());
  EXPECT_EQ(OutOfOrder(std::vector{InOrder(0, {"a", "b"}), InOrder(1, {})}), Positions());
}

TEST(OutOfOrder, TwoThatHaveEachSubmittedWhatTheOtherOneHasNotAre) {
  const std::vector<WaitingRanks> waiting = {InOrder(0, {"a", "b"}), InOrder(1, {"a"}),
                                             InOrder(2, {"a", "c"})};
  EXPECT_EQ(OutOfOrder(waiting), (Positions{0, 2}));
}

TEST(OutOfOrder, OnlyRanksWithAnOrderAre) {
  std::vector<WaitingRanks> waiting = {InOrder(0, {"a"}), InOrder(1, {"b"})};
  waiting[1].in_order = false;
  EXPECT_EQ(OutOfOrder(waiting), Positions());
}

TEST(DescribeDivergence, SuggestsOneNameForTwoThatAreAlike) {
  EXPECT_EQ(
      DescribeDivergence({{{0}, {Named("loss")}}, {{1, 2, 3}, {Named("losss")}}}, false),
      "ranks wait for different operations, and none can go on: rank 0 waits for allreduce "
      "\"loss\"; ranks 1, 2, 3 wait for allreduce \"losss\"; rank 0 is the odd one out; did you "
      "mean one name by \"loss\" and \"losss\"?");
}

TEST(DescribeDivergence, NumbersInNamesAreMeant) {
  EXPECT_EQ(DescribeDivergence({{{0}, {Named("layer1")}}, {{1}, {Named("layer2")}}}, true),
            "ranks wait for different operations, and none can go on: rank 0 waits for allreduce "
            "\"layer1\"; rank 1 waits for allreduce \"layer2\"; all of them were run before: the "
            "orders of the calls differ");
}

TEST(DescribeDivergence, SaysWhereRanksAreAndWhatCallsInOrderNeed) {
  WaitingRanks first = InOrder(0, {"loss"}), second = InOrder(1, {"losss"});
  first.place = "train.py:12 in main";
  EXPECT_EQ(DescribeDivergence({first, second}, true),
            "ranks wait for different operations, and none can go on: rank 0 waits for allreduce "
            "\"loss\" at train.py:12 in main; rank 1 waits for allreduce \"losss\"; all ranks must "
            "make the same calls in the same order");
}

// Rank 0 may have skipped "loss", or rank 1 backward().
TEST(DescribeDivergence, SaysThatBackwardIsACall) {
  const std::string text = DescribeDivergence(
      {{{0}, {Named("gradients.0.weight"), Named("gradients.0.bias")}}, {{1}, {Named("loss")}}},
      true);
  EXPECT_EQ(text,
            "ranks wait for different operations, and none can go on: rank 0 waits for the "
            "gradients of optimizer 1 (backward()/step()); rank 1 waits for allreduce \"loss\"; "
            "all ranks must make the same calls in the same order; backward() is such a call, or "
            "step() where DistributedOptimizer has complete=\"step\"");
}

TEST(DescribeDivergence, RanksThatWaitForOtherKeysOfOneCallAreOneGroup) {
  const std::string text = DescribeDivergence({{{0, 2}, {Named("gradients.0.weight")}},
                                               {{1}, {Named("loss")}},
                                               {{3}, {Named("gradients.0.bias")}}},
                                              true);
  EXPECT_NE(text.find("ranks 0, 2, 3 wait for the gradients of optimizer 1 (backward()/step()); "
                      "rank 1 waits for allreduce \"loss\"; rank 1 is the odd one out; "),
            std::string::npos)
      << text;
}

TEST(DescribeDivergence, NobodyIsOddBeforeMostRanksAreKnownToWaitForTheSame) {
  const std::vector<WaitingRanks> diverged = {{{0, 1}, {Named("a")}}, {{3}, {Named("b")}}};
  EXPECT_NE(DescribeDivergence(diverged, true).find("rank 3 is the odd one out"),
            std::string::npos);
  const std::string text = DescribeDivergence(diverged, true, {2});
  EXPECT_NE(text.find("\"b\"; rank 2 has not come that far; all of them"), std::string::npos)
      << text;
  // One of the small set waits in it for the others, which need it in the large one.
  const std::string sets =
      DescribeDivergence({{{0, 1}, {Named("a")}}, {{2}, {Named("a", 1)}}}, true);
  EXPECT_EQ(sets.find("odd"), std::string::npos) << sets;
}

}  // namespace
}  // namespace farandole
