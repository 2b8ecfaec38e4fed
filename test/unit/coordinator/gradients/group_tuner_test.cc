#include "coordinator/gradients/group_tuner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

namespace farandole {
namespace {

using ::testing::HasSubstr;
using Cost = std::function<double(int64_t bytes)>;

constexpr int64_t kDefault = int64_t{4} << 20;
/// All trials of sweeps and pairs, were the grid of any size up to six.
constexpr int kMostTrials = GroupTuner::kSweeps * 6 + 2 * GroupTuner::kPairs;

/// Runs until it is done. `cost` is in milliseconds; each step takes up to `noise` more, and now
/// and then four times as long. @return the size found.
int64_t Tune(GroupTuner& tuner, const Cost& cost, double noise = 0, unsigned seed = 0) {
  std::mt19937 random(seed);
  std::exponential_distribution<double> more(1);
  std::bernoulli_distribution is_pause(0.05);
  int64_t bytes = tuner.Next();
  for (int trial = 0; trial < kMostTrials && !tuner.is_done(); ++trial) {
    for (size_t step = 0; step + 1 < GroupTuner::kRounds; ++step) {
      const double factor = 1 + noise * more(random) + (noise > 0 && is_pause(random) ? 3 : 0);
      const double first = step < GroupTuner::kSettling ? 5 : 1;  // new groups are slow at first
      tuner.AddStep(static_cast<int64_t>(1e6 * cost(bytes) * factor * first));
    }
    bytes = tuner.Next();
  }
  EXPECT_TRUE(tuner.is_done()) << "after so many trials: " << kMostTrials;
  return bytes;
}

/// Least at `best`.
Cost Valley(int64_t best, double depth) {
  return [=](int64_t bytes) {
    const double octaves =
        std::abs(std::log2(static_cast<double>(bytes) / static_cast<double>(best)));
    return 40 * (1 + depth * octaves);
  };
}

TEST(GroupTuner, FindsTheBestOfItsSizesWhereverThatIs) {
  for (const int64_t best : GroupTuner::Sizes(kDefault)) {
    GroupTuner tuner(kDefault);
    EXPECT_EQ(Tune(tuner, Valley(best, 0.05)), best);
  }
}

TEST(GroupTuner, EndsWithinAFewHundredthsOfTheBestWithNoisySteps) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    for (const int64_t best : GroupTuner::Sizes(kDefault)) {
      const Cost cost = Valley(best, 0.05);
      GroupTuner tuner(kDefault);
      EXPECT_LE(cost(Tune(tuner, cost, 0.02, seed)), 1.05 * cost(best)) << "seed " << seed;
    }
  }
}

TEST(GroupTuner, NeverEndsWithASizeThatIsSlowerThanTheDefault) {
  // By three parts in a hundred, which steps that differ by a fifth hide.
  const Cost cost = [](int64_t bytes) { return bytes == kDefault ? 40.0 : 41.2; };
  for (unsigned seed = 0; seed < 200; ++seed) {
    GroupTuner tuner(kDefault);
    EXPECT_EQ(Tune(tuner, cost, 0.2, seed), kDefault) << "seed " << seed;
  }
}

TEST(GroupTuner, KeepsTheDefaultWhereNothingMatters) {
  int others = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    GroupTuner tuner(kDefault);
    others += Tune(
                  tuner, [](int64_t) { return 40.0; }, 0.05, seed) == kDefault
                  ? 0
                  : 1;
  }
  EXPECT_LE(others, 6);
}

TEST(GroupTuner, TriesTheSizeThatIsSetBesidesTheGrid) {
  GroupTuner tuner(3 << 20);
  EXPECT_EQ(Tune(tuner, Valley(3 << 20, 0.05)), 3 << 20);
  EXPECT_THAT(tuner.Report(), HasSubstr("\nFARANDOLE_GROUP_BYTES=3145728\n"));
}

TEST(GroupTuner, GivesTheSameSizeAgainAfterTooFewSteps) {
  GroupTuner tuner(kDefault);
  const int64_t first = tuner.Next();
  for (size_t step = 1; step < GroupTuner::kLeastSteps; ++step) tuner.AddStep(1);
  EXPECT_EQ(tuner.Next(), first);
  for (size_t step = 0; step < GroupTuner::kLeastSteps; ++step) tuner.AddStep(1);
  EXPECT_NE(tuner.Next(), first);
}

TEST(GroupTuner, SaysWhatWasFoundAndWhatItBrings) {
  GroupTuner tuner(kDefault);
  Tune(tuner, [](int64_t bytes) { return bytes == 1 << 20 ? 41.2 : 44; });
  EXPECT_EQ(tuner.Describe(),
            "groups of 1 MiB: 41.20 ms a step, with 4 MiB, as set, 44.00 ms a step");
  EXPECT_THAT(tuner.Report(), HasSubstr("# 1048576: 41.20 ms 41.20 ms"));
  GroupTuner same(kDefault);
  Tune(same, [](int64_t) { return 44; });
  EXPECT_EQ(same.Describe(),
            "groups of 4 MiB, as set: 44.00 ms a step, and no other size is clearly better");
}

}  // namespace
}  // namespace farandole
