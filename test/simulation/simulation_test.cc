// The negotiation survives every schedule it is given.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <random>
#include <string>

#include "test/simulation/world.h"

namespace farandole::simulation {
namespace {

#if defined(FARANDOLE_SANITIZE_ADDRESS) || defined(FARANDOLE_SANITIZE_THREAD)
constexpr int64_t kSeedsPerTest = 100;  // all of them in a build that is optimised
#else
constexpr int64_t kSeedsPerTest = 500;
#endif

class Schedules : public testing::TestWithParam<uint64_t> {};

TEST_P(Schedules, EndEverySubmissionOnceAlikeOnAllRanks) {
  Totals totals;
  const uint64_t first = GetParam() * uint64_t{kSeedsPerTest};
  for (uint64_t seed = first; seed < first + kSeedsPerTest; ++seed) {
    const std::optional<std::string> failure = RunSeed(seed, &totals);
    ASSERT_FALSE(failure) << *failure;
  }
  // Every kind of end was reached; otherwise the schedules have become too tame to prove anything.
  EXPECT_GT(totals.works, 20 * kSeedsPerTest);
  EXPECT_GT(totals.skipped, 2 * kSeedsPerTest);
  EXPECT_GT(totals.refused, 2 * kSeedsPerTest);
  EXPECT_GT(totals.aborted, 2 * kSeedsPerTest);
  EXPECT_GT(totals.joins, 2 * kSeedsPerTest);
  EXPECT_GT(totals.reports, 2 * kSeedsPerTest);
  EXPECT_GT(totals.retired, kSeedsPerTest / 5);
  EXPECT_GT(totals.known, kSeedsPerTest / 5);
}

INSTANTIATE_TEST_SUITE_P(Hundreds, Schedules, testing::Values(0, 1, 2));

void PlayThousandWithFaults(uint64_t first) {
  Totals totals;
  for (uint64_t seed = first; seed < first + 1000; ++seed) {
    const std::optional<std::string> failure = RunSeedWithFaults(seed, &totals);
    ASSERT_FALSE(failure) << *failure << "\nagain: simulate --faults 1 --seeds 1 --first " << seed;
  }
  EXPECT_GT(totals.crashes, 100) << "from seed " << first;
  EXPECT_GT(totals.stops, 100) << "from seed " << first;
  EXPECT_GT(totals.lost, 1'000) << "from seed " << first;
  EXPECT_GT(totals.diverged, 1'000) << "from seed " << first;
}

class Faults : public testing::TestWithParam<uint64_t> {};

TEST_P(Faults, EndEverySubmissionOfTheSurvivorsAndNameWhoCrashed) {
  PlayThousandWithFaults(GetParam() * 1000);
}

TEST_P(Faults, DoSoWithSeedsDrawnAnew) {
  const uint64_t first = std::random_device{}();
  std::printf("simulate --faults 1 --seeds 1000 --first %llu\n",
              static_cast<unsigned long long>(first));
  PlayThousandWithFaults(first);
}

INSTANTIATE_TEST_SUITE_P(Thousand, Faults, testing::Values(0, 1, 2));

TEST(Agreements, AreTheSameWorkOnAllMembers) {
  Totals totals;
  for (uint64_t seed = 0; seed < 2 * kSeedsPerTest; ++seed) {
    const std::optional<std::string> failure = RunSeedWithAgreements(seed, &totals);
    ASSERT_FALSE(failure) << *failure << "\nagain: simulate --agreements 1 --seeds 1 --first "
                          << seed;
  }
  EXPECT_GT(totals.agreed, kSeedsPerTest / 5);
  EXPECT_GT(totals.declined, kSeedsPerTest / 5);
}

/// A rank was asked whether it is blocked, by a Tick, while it was about to act.
TEST(OneSeed, CallsNoRankBlockedThatIsAboutToAct) {
  const std::optional<std::string> failure = RunSeedWithFaults(9016071);
  EXPECT_FALSE(failure) << *failure;
}

/// A rank left while ids of the global set were being retired; rank 0 gave them to another set.
TEST(OneSeed, GivesNoIdAwayThatAnEndedGlobalSetStillHas) {
  const std::optional<std::string> failure = RunSeedWithFaults(700128391);
  EXPECT_FALSE(failure) << *failure;
}

}  // namespace
}  // namespace farandole::simulation
