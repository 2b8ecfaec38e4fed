// Each rule of the protocol is needed: without it the simulator fails, and an engine notices.
//
// The program links copies of sources into which break_rules.cmake has put the switches of
// broken_rules.h, in place of the sources themselves.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "test/simulation/broken_rules.h"
#include "test/simulation/membership_world.h"
#include "test/simulation/world.h"
#include "test/support/stepped_job.h"

namespace farandole::simulation {
namespace {

std::optional<std::string> Negotiate(uint64_t seed) { return RunSeed(seed); }
std::optional<std::string> Agree(uint64_t seed) { return RunSeedWithAgreements(seed); }
std::optional<std::string> Recover(uint64_t seed) { return RunMembershipSeed(seed); }

/// A rule of docs/protocol.md or of coordinator/membership/README.md, a seed that fails without it,
/// and how. Found by the disabled Search below; search again when the scenarios change.
struct Needed {
  const char* name;
  BrokenRule rule;
  uint64_t seed;
  const char* symptom;
  std::optional<std::string> (*run)(uint64_t) = Negotiate;
};

constexpr Needed kNeeded[] = {
    {"AStepIsNoRound", kStepsAreRounds, 3610, "differs on rank", Agree},
    {"RefusingWaitsForAllMembers", kRefuseEarly, 157, "deadlock"},
    {"AKeyGoesUpOnceWhenAllBelowVoted", kSendKeyPerVote, 13, "decided but not submitted"},
    {"TheAbsentSetTravelsWithTheVote", kDeriveAbsentFromJoined, 2, "other contributions of rank"},
    {"AJoinIsSentAtOnce", kJoinWhenIdle, 106, "deadlock"},
    {"VotesGoAheadOfTheJoin", kJoinBeforeVotes, 22, "other contributions of rank"},
    {"JoinDoneWaitsForReadyKeys", kJoinDoneEarly, 49, "decided but not submitted"},
    {"AGroupIsDecidedAtOnce", kSplitGroup, 90, "deadlock"},
    {"AnAbsentRankReportsNothing", kReporterIgnoresAbsent, 84, "reports a batch of rank"},
    {"APresentRankReports", kReporterIgnoresAbsent, 6, "does not report its batch"},
    {"ApplyComesBeforeForward", kForwardBeforeApply, 78, "a vote for unknown process set"},
    {"WhatIsReadyComesBeforeAJoinDoneFromAbove", kJoinEndOvertakes, 273,
     "decided but not submitted"},
    {"AnIdMeansWhatItsSenderKnew", kMeetLateIds, 72644, "a second vote"},
    {"ARetiredIdIsKnownWhileVotesByItAreOnTheirWay", kFreeIdsAtOnce, 159, "a vote with unknown id"},
    {"OfTwoHalvesTheOneWithTheFirstGoesOn", kHalfWithoutFirst, 86, "computes after", Recover},
    {"DeathsDoNotMakeASmallerMajority", kDeathsShrinkQuorums, 91, "computes after", Recover},
    {"SilenceIsNoDeath", kSuspectsAreDead, 16, "lacks steps", Recover},
    {"AListThatMayHaveStartedCounts", kForgetPending, 5773, "computes after", Recover},
    {"NewcomersDoNotVoteWhileSomebodyIsLeftOut", kVoteWhileLeftOut, 2045, "lacks steps", Recover},
    {"NewcomersThatNeverJoinedDoNotCount", kVoteAtOnce, 693, "halts, although", Recover},
    {"AMinorityHalts", kWaitForEver, 10, "somebody still waits", Recover},
    {"EndsThatNoEngineSeesAreLookedFor", kPingNobody, 5502, "halts, although", Recover},
    {"AJoinHearsThatOthersHaveGoneOn", kLetJoinsWait, 922, "somebody still waits", Recover},
    {"AJoinDoesNotAwaitASilentLeader", kAwaitSilentLeader, 5085, "somebody still waits", Recover},
    {"AListThatRestsOnOutdatedReportsDoesNotCount", kCountOutdated, 7694, "halts, although",
     Recover},
    {"MembersGetAVoteOnceThoseLeftOutHaveEnded", kGiveNoVotes, 41, "somebody still waits", Recover},
};

class Rule : public testing::TestWithParam<Needed> {};

TEST_P(Rule, IsNeededByItsSeed) {
  ASSERT_FALSE(GetParam().run(GetParam().seed)) << "the seed fails with the rule in force";
  const BreakRule broken(GetParam().rule);
  const std::optional<std::string> failure = GetParam().run(GetParam().seed);
  ASSERT_TRUE(failure) << "seed " << GetParam().seed << " passes without the rule";
  EXPECT_NE(failure->find(GetParam().symptom), std::string::npos) << *failure;
}

INSTANTIATE_TEST_SUITE_P(Protocol, Rule, testing::ValuesIn(kNeeded),
                         [](const auto& one) { return std::string(one.param.name); });

/// simulation_rules --gtest_also_run_disabled_tests --gtest_filter='*Search*': takes minutes.
TEST(Search, DISABLED_ForASeedOfEachRule) {
  for (const Needed& needed : kNeeded) {
    const BreakRule broken(needed.rule);
    std::optional<std::string> failure;
    for (uint64_t seed = 0; seed < 100'000; ++seed) {
      failure = needed.run(seed);
      if (failure && failure->find(needed.symptom) != std::string::npos) break;
    }
    std::printf("%s: %s\n", needed.name, failure.value_or("no seed").c_str());
    std::fflush(stdout);
  }
}

TEST(FinalError, OfABrokenNegotiationIsActedOnInTheSameStep) {
  const BreakRule broken(kSplitGroup);
  constexpr int kRanks = 4;
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.stall_ns = 0;
  SteppedJob job(kRanks, options);
  Signature group;
  for (int m = 0; m < 2; ++m) group.tensors.push_back({"", DType::kFloat32, {4}});
  float values[kRanks][4] = {};
  std::vector<std::shared_ptr<Work>> works;
  for (int r = 0; r < kRanks; ++r) {
    Result<Operation*> operation =
        job.engine(r).operations().Prepare({kGlobalSet, OpKind::kAllreduce, "group"}, group);
    ASSERT_TRUE(operation.ok()) << operation.status().message();
    const std::vector<const void*> in(2, values[r]);
    const std::vector<void*> out(2, values[r]);
    Result<std::shared_ptr<Work>> work = job.engine(r).Start(*operation.value(), in, out);
    ASSERT_TRUE(work.ok()) << work.status().message();
    works.push_back(work.value());
  }
  job.SettleHeld();
  for (int r = 0; r < kRanks; ++r) {
    const Work& work = *works[static_cast<size_t>(r)];
    ASSERT_TRUE(work.done()) << "rank " << r << " still waits";
    EXPECT_EQ(work.status().code(), Code::kInternal) << work.status().message();
    const char* const begin = r == 0 ? "protocol: " : "rank 0 failed: protocol: ";
    EXPECT_THAT(work.status().message(), testing::StartsWith(begin)) << "rank " << r;
  }
}

}  // namespace
}  // namespace farandole::simulation
