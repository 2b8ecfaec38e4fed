#include "test/simulation/scaled_job.h"

#include <gtest/gtest.h>

namespace farandole::simulation {
namespace {

ScaledRound RunOnce(ScaledJobOptions options) {
  ScaledJob job(options);
  job.WarmUp();
  return job.Run(nullptr);
}

TEST(ScaledJob, SendsTwoMessagesOnEachLinkHoweverManyRanksAndTensors) {
  for (const int ranks : {1, 2, 8, 64, 1000}) {
    for (const int tensors : {1, 300}) {
      const ScaledRound round = RunOnce({.ranks = ranks, .tensors = tensors});
      EXPECT_EQ(round.messages, 2 * (ranks - 1)) << ranks << " ranks";
      EXPECT_EQ(round.most_on_a_link, ranks == 1 ? 0 : 2) << ranks << " ranks";
      EXPECT_EQ(round.decisions, 1) << ranks << " ranks";
    }
  }
}

TEST(ScaledJob, SendsAsManyBytesForThousandsOfTensorsAsForTwo) {
  const ScaledRound two = RunOnce({.ranks = 64, .tensors = 2});
  const ScaledRound many = RunOnce({.ranks = 64, .tensors = 3000});
  EXPECT_EQ(two.bytes, many.bytes);
}

TEST(ScaledJob, DecidesForProcessSetsWithinAHostThere) {
  const ScaledRound round = RunOnce({.ranks = 64, .tensors = 3, .ranks_per_set = 8});
  EXPECT_EQ(round.messages, 8 * 7 * 2);
  EXPECT_EQ(round.most_on_a_link, 2);
  const ScaledRound pairs = RunOnce({.ranks = 64, .tensors = 3, .ranks_per_set = 2});
  // A leader decides for its own pair and for the other three, whose batches are reported to it.
  EXPECT_EQ(pairs.messages, 8 * (7 * 2 + 3));
}

// By hand: 8 + 8 ranks on two hosts. A leaf's vote is with its leader after o + L + o, and 7 of
// them one o after the other; so is the leader's on its way up, and the decision down again.
TEST(ScaledJob, TakesTheTimeOfTheLongestPath) {
  const Link link{1000, 100, 0};
  const ScaledRound round =
      RunOnce({.ranks = 16, .tensors = 1, .in_host = link, .between_hosts = link});
  const double at_leader = 100 + 1000 + 7 * 100;
  const double at_root = at_leader + 100 + 1000 + 100;
  // The root sends to 7 leaves and a leader, in the order of their ranks; the leader to 7 leaves.
  const double at_other_leader = at_root + 8 * 100 + 1000 + 100;
  EXPECT_EQ(round.ns, at_other_leader + 7 * 100 + 1000 + 100);
}

TEST(ScaledJob, NoiseOnlyDelays) {
  ScaledJob job({.ranks = 256, .tensors = 10, .noise_share = 0.2});
  job.WarmUp();
  const double quiet = job.Run(nullptr).ns;
  const double noisy = job.Run(nullptr, true).ns;
  EXPECT_GT(noisy, quiet);
  EXPECT_LT(noisy, quiet + 16 * 50'000);
  EXPECT_EQ(job.Run(nullptr).ns, quiet);
}

}  // namespace
}  // namespace farandole::simulation
