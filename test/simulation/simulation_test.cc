// The negotiation survives every schedule it is given, and each rule of the protocol is needed.

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "coordinator/protocol/negotiation.h"
#include "test/simulation/world.h"

namespace farandole::simulation {
namespace {

constexpr uint64_t kSeedsPerTest = 500;

class Schedules : public testing::TestWithParam<uint64_t> {};

TEST_P(Schedules, EndEverySubmissionOnceAlikeOnAllRanks) {
  Totals totals;
  const uint64_t first = GetParam() * kSeedsPerTest;
  for (uint64_t seed = first; seed < first + kSeedsPerTest; ++seed) {
    const std::optional<std::string> failure = RunSeed(seed, 0, &totals);
    ASSERT_FALSE(failure) << *failure;
  }
  // Every kind of end was reached; otherwise the schedules have become too tame to prove anything.
  EXPECT_GT(totals.works, 10'000);
  EXPECT_GT(totals.skipped, 1'000);
  EXPECT_GT(totals.refused, 1'000);
  EXPECT_GT(totals.aborted, 1'000);
  EXPECT_GT(totals.joins, 1'000);
  EXPECT_GT(totals.reports, 1'000);
}

INSTANTIATE_TEST_SUITE_P(FiveHundred, Schedules, testing::Values(0, 1, 2, 3, 4, 5));

/// A rule of docs/protocol.md, a seed that fails without it, and how. Found by `simulate --broken
/// BIT --find`; search again when the scenarios change.
struct Needed {
  const char* name;
  BrokenRule rule;
  uint64_t seed;
  const char* symptom;
};

constexpr Needed kNeeded[] = {
    {"RefusingWaitsForAllMembers", kRefuseEarly, 157, "deadlock"},
    {"AKeyGoesUpOnceWhenAllBelowVoted", kSendKeyPerVote, 13, "decided but not submitted"},
    {"TheAbsentSetTravelsWithTheVote", kDeriveAbsentFromJoined, 2, "other contributions of rank"},
    {"AJoinIsSentAtOnce", kJoinWhenIdle, 32, "deadlock"},
    {"VotesGoAheadOfTheJoin", kJoinBeforeVotes, 22, "other contributions of rank"},
    {"JoinDoneWaitsForReadyKeys", kJoinDoneEarly, 49, "decided but not submitted"},
    {"AGroupIsDecidedAtOnce", kSplitGroup, 99, "deadlock"},
    {"AnAbsentRankReportsNothing", kReporterIgnoresAbsent, 84, "reports a batch of rank"},
    {"APresentRankReports", kReporterIgnoresAbsent, 6, "does not report its batch"},
    {"ApplyComesBeforeForward", kForwardBeforeApply, 3, "deadlock"},
    {"AnIdMeansWhatItsSenderKnew", kMeetLateIds, 63828, "a second vote"},
};

class Rule : public testing::TestWithParam<Needed> {};

TEST_P(Rule, IsNeededByItsSeed) {
  ASSERT_FALSE(RunSeed(GetParam().seed, 0)) << "the seed fails with the rule in force";
  const std::optional<std::string> failure = RunSeed(GetParam().seed, GetParam().rule);
  ASSERT_TRUE(failure) << "seed " << GetParam().seed << " passes without the rule";
  EXPECT_NE(failure->find(GetParam().symptom), std::string::npos) << *failure;
}

INSTANTIATE_TEST_SUITE_P(Protocol, Rule, testing::ValuesIn(kNeeded),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace farandole::simulation
