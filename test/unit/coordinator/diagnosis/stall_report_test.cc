#include "coordinator/diagnosis/stall_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/clock.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

/// Rank 0 waits for the key, the missing ranks have done nothing.
StallFacts Stalled(const std::string& name, const std::vector<int32_t>& missing,
                   int64_t seconds = 10, OpKind kind = OpKind::kAllreduce) {
  StallFacts facts;
  facts.key = {kGlobalSet, kind, name};
  facts.waited_ns = seconds * kNsPerSecond;
  facts.answers.push_back({0, true, "float32 [2]", "", 0, 0, {}});
  for (const int32_t rank : missing) facts.answers.push_back({rank, false, "", "", 0, 0, {}});
  return facts;
}

/// A group of that many parameters.
StallFacts Gradients(const std::string& name, int32_t tensors, std::vector<std::string> names) {
  StallFacts facts = Stalled("gradients.0." + name, {1});
  facts.answers[0].tensors = tensors;
  facts.answers[0].names = std::move(names);
  return facts;
}

TEST(DescribeStalls, PutsWhatWaitsForTheSameRanksIntoOneLine) {
  const std::vector<std::string> lines = DescribeStalls(
      {Stalled("a", {1}), Stalled("b", {2, 1}), Stalled("c", {1}, 12), Stalled("d", {1, 2})}, 20);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(
      lines[0],
      "stalled for 12 s: allreduce \"a\", allreduce \"c\": rank 0 waits; missing: rank 1 (has "
      "submitted nothing yet)");
  EXPECT_THAT(lines[1], HasSubstr("allreduce \"b\", allreduce \"d\": rank 0 waits; missing: "));
}

TEST(DescribeStalls, TellsGradientsByOptimizerAndParameter) {
  const std::vector<std::string> lines =
      DescribeStalls({Stalled("gradients.0.fc.bias", {1}), Gradients("group 0 of 2", 2, {"a", "b"}),
                      Gradients("group 1 of 2", 400, {"c", "d", "e"}),
                      Stalled("gradients.1.w", {1}), Stalled("gradients.0.number and order", {1}),
                      Stalled("gradients.0.parameters at the wrap", {1})},
                     20);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0],
              HasSubstr("the gradients of optimizer 1 (backward()/step()) of \"fc.bias\", "
                        "\"a\", \"b\", ... (403 parameters), the gradients of optimizer 2 "
                        "(backward()/step()) of \"w\": rank 0 waits"));
}

TEST(DescribeStalls, HasAtMostTwentyLinesAndCountsTheRest) {
  std::vector<StallFacts> stalls;
  for (int32_t rank = 1; rank <= 30; ++rank) stalls.push_back(Stalled("x", {rank}));
  const std::vector<std::string> lines = DescribeStalls(stalls, kMostStallLines);
  ASSERT_EQ(lines.size(), 20u);
  EXPECT_THAT(lines[18], HasSubstr("missing: rank 19 "));
  EXPECT_THAT(lines[19], HasSubstr("... and 11 more groups"));
}

TEST(DescribeStalls, IsShortWhereManyCallsWait) {
  std::vector<StallFacts> stalls;
  for (int i = 0; i < 500; ++i) stalls.push_back(Stalled("x" + std::to_string(i), {1}));
  const std::vector<std::string> lines = DescribeStalls(stalls, 20);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr("allreduce \"x7\", ... (500 calls): rank 0 waits"));
}

TEST(DescribeCall, GivesTheCallOfTheProgram) {
  const auto call = [](OpKind kind, const char* name, const char* function = "") {
    return DescribeCall({kGlobalSet, kind, name, function});
  };
  EXPECT_EQ(call(OpKind::kAllreduce, "x"), "allreduce \"x\"");
  EXPECT_EQ(call(OpKind::kAllreduce, "k", "allgather"), "allgather \"k\"");
  EXPECT_EQ(call(OpKind::kAllreduce, "allreduce.noname.3"), "an allreduce without a name");
  EXPECT_EQ(call(OpKind::kAllreduce, "noname.allgather.3", "allgather"),
            "an allgather without a name");
  EXPECT_EQ(call(OpKind::kBroadcast, "state", "broadcast_object"), "broadcast_object \"state\"");
  EXPECT_EQ(call(OpKind::kBroadcast, "broadcast.noname.2", "broadcast_object"),
            "a broadcast_object without a name");
  EXPECT_EQ(call(OpKind::kAllreduce, "gradients.12.group 0 of 7"),
            "the gradients of optimizer 13 (backward()/step())");
  EXPECT_EQ(call(OpKind::kAllreduce, "gradients.norm"), "allreduce \"gradients.norm\"");
  EXPECT_EQ(DescribeCall({3, OpKind::kBroadcast, "x"}), "broadcast \"x\" (process set 3)");
}

TEST(DescribeStall, TellsARankThatSkipsBackwardWhatItNeeds) {
  const std::string gradients = "the gradients of optimizer 1 (backward()/step())";
  StallFacts facts;
  facts.key.name = "gradients.0.w";
  facts.answers = {{0, true, "float32 [2]", gradients, 0, 0, {}}, {1, false, "", "", 0, 0, {}}};
  const std::string hint = "complete=\"step\"";
  EXPECT_EQ(DescribeStall(facts).find(hint), std::string::npos) << "it may be late only";
  facts.answers[1].last = gradients;
  EXPECT_EQ(DescribeStall(facts).find(hint), std::string::npos);
  facts.answers[1].last = "broadcast \"epoch\"";
  EXPECT_NE(DescribeStall(facts).find(hint), std::string::npos);
  facts.key.name = "metrics";
  EXPECT_EQ(DescribeStall(facts).find(hint), std::string::npos);
}

TEST(StallReport, TellsWhatRecursEverMoreRarely) {
  StallReport report;
  std::vector<int> told;
  for (int second = 0; second < 1000; second += 10) {  // each step another tensor, rank 1 late
    const auto name = "step " + std::to_string(second);
    if (!report.Lines({Stalled(name, {1})}, second * kNsPerSecond).empty()) told.push_back(second);
  }
  EXPECT_EQ(told, (std::vector<int>{0, 10, 30, 70, 150, 310, 630}));
}

TEST(StallReport, TellsAtOnceWhatIsNew) {
  StallReport report;
  int64_t now_ns = 0;
  const auto is_told = [&](const StallFacts& stall) {
    now_ns += kNsPerSecond;
    return report.Lines({stall}, now_ns).size() == 1;
  };
  EXPECT_TRUE(is_told(Stalled("x", {1})));
  EXPECT_FALSE(is_told(Stalled("y", {1})));
  EXPECT_TRUE(is_told(Stalled("y", {1, 2}))) << "another rank is missing";
  EXPECT_TRUE(is_told(Stalled("z", {1}, 20))) << "it has never waited so long";
  EXPECT_FALSE(is_told(Stalled("z", {1}, 21)));
}

}  // namespace
}  // namespace farandole
