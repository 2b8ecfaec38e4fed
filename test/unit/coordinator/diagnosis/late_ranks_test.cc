#include "coordinator/diagnosis/late_ranks.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/clock.h"

namespace farandole {
namespace {

constexpr int64_t kMs = kNsPerMs;

/// Steps of 40 ms, in which a rank is blocked for 2 ms and for as long as the last one lets it
/// wait.
class LateStepsTest : public testing::Test {
 protected:
  /// Ranks spend `busy` ms more than 38 in a step. @return what was said, by any rank of it.
  std::optional<LateRank> Step(const std::vector<double>& busy, StepTimes of_last = {}) {
    const double latest = *std::ranges::max_element(busy);
    std::optional<LateRank> said;
    ++step_;
    for (size_t rank = 0; rank < busy.size(); ++rank) {
      StepTimes times = rank + 1 == busy.size() ? of_last : StepTimes();
      times.rank = static_cast<int32_t>(rank);
      times.step = step_;
      times.ns = static_cast<int64_t>((40 + latest) * kMs);
      times.blocked_ns = static_cast<int64_t>((2 + latest - busy[rank]) * kMs);
      if (const auto late = steps_.Add(times)) said = late;
    }
    return said;
  }
  std::optional<LateRank> Steps(int count, const std::vector<double>& busy,
                                StepTimes of_last = {}) {
    std::optional<LateRank> said;
    for (int i = 0; i < count; ++i)
      if (const auto late = Step(Noisy(busy), of_last)) said = late;
    return said;
  }
  std::vector<double> Noisy(std::vector<double> busy) {
    for (double& one : busy) one += noise_(random_);
    return busy;
  }

  LateSteps steps_{4};
  int64_t step_ = 0;
  std::mt19937 random_{1};
  std::normal_distribution<double> noise_{0, 0.3};
};

TEST_F(LateStepsTest, NamesARankThatComputesForLonger) {
  EXPECT_FALSE(Steps(20, {0, 0, 0, 0}));
  const auto late = Steps(10, {0, 0, 0, 4});
  ASSERT_TRUE(late);
  EXPECT_EQ(late->rank, 3);
  EXPECT_EQ(late->cause, LateBy::kComputing);
  EXPECT_NEAR(static_cast<double>(late->late_ns), 4.0 * kMs, 1.0 * kMs);  // of ten, two were alike
  EXPECT_FALSE(Steps(50, {0, 0, 0, 4})) << "said twice";
}

TEST_F(LateStepsTest, SaysWhatTakesLonger) {
  EXPECT_EQ(Steps(12, {0, 0, 0, 8}, {.input_ns = 9 * kMs})->cause, LateBy::kInput);
  EXPECT_EQ(Steps(12, {0, 0, 0, 8}, {.queued_ns = 8 * kMs})->cause, LateBy::kProcessor);
  EXPECT_EQ(Steps(12, {0, 0, 0, 8}, {.collecting_ns = 8 * kMs})->cause, LateBy::kCollecting);
  EXPECT_EQ(Steps(12, {0, 0, 0, 8}, {.other_groups_ns = 8 * kMs})->cause, LateBy::kOtherGroups);
}

TEST_F(LateStepsTest, NamesASecondRankThatIsLateByLess) {
  std::set<int32_t> named;
  for (int i = 0; i < 30; ++i)
    if (const auto late = Step(Noisy({0, 0, 8, 4}))) named.insert(late->rank);
  EXPECT_EQ(named, (std::set<int32_t>{2, 3}));
}

TEST_F(LateStepsTest, DoesNotNameWhoWaitsInAnotherGroupForOneThatIsLate) {
  const StepTimes waits = {.other_groups_ns = 8 * kMs};
  for (int i = 0; i < 30; ++i) {
    const auto late = Step(Noisy({0, 0, 7.5, 8}), waits);
    EXPECT_FALSE(late && late->rank == 3);
  }
  EXPECT_EQ(Steps(20, {0, 0, 0, 8}, waits)->rank, 3) << "alone";
}

TEST_F(LateStepsTest, NamesACollectorThatComesNowAndThen) {
  std::optional<LateRank> said;
  for (int i = 0; i < 12; ++i) {
    const bool collects = i % 3 == 0;
    const StepTimes times = {.collecting_ns = collects ? 20 * kMs : 0};
    if (const auto late = Step({0, 0, 0, collects ? 20.0 : 0}, times)) said = late;
  }
  ASSERT_TRUE(said);
  EXPECT_EQ(said->cause, LateBy::kCollecting);
}

TEST_F(LateStepsTest, NamesNobodyForOneLongCollection) {
  EXPECT_FALSE(Steps(9, {0, 0, 0, 0}));
  EXPECT_FALSE(Step({0, 0, 0, 350}, {.collecting_ns = 350 * kMs}));
  EXPECT_FALSE(Steps(20, {0, 0, 0, 0}));
}

TEST_F(LateStepsTest, NamesNobodyForLessThanATwentieth) {
  EXPECT_FALSE(Steps(100, {0, 0, 0, 1.5}));
}

TEST_F(LateStepsTest, NamesNobodyByChance) {
  noise_ = std::normal_distribution<double>(0, 8);
  EXPECT_FALSE(Steps(2000, {0, 0, 0, 0}));
}

TEST_F(LateStepsTest, ComparesTwoRanksWithOneAnother) {
  LateSteps two(2);
  std::optional<LateRank> said;
  for (int64_t step = 1; step <= 12; ++step) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      const StepTimes times = {
          .rank = rank, .step = step, .ns = 50 * kMs, .blocked_ns = (rank == 0 ? 1 : 9) * kMs};
      if (const auto late = two.Add(times)) said = late;
    }
  }
  ASSERT_TRUE(said);
  EXPECT_EQ(said->rank, 0);
  EXPECT_EQ(said->late_ns, 8 * kMs);
}

TEST_F(LateStepsTest, WaitsForRanksThatAreBehindAndSkipsStepsOfWhichSomeAreMissing) {
  LateSteps two(2);
  int said = 0;
  for (int64_t step = 1; step <= 40; ++step) {
    said += two.Add({.rank = 0, .step = step, .ns = 50 * kMs, .blocked_ns = 1 * kMs}) ? 1 : 0;
    if (step < 3 || step % 7 == 0) continue;
    said += two.Add({.rank = 1, .step = step - 2, .ns = 50 * kMs, .blocked_ns = 9 * kMs}) ? 1 : 0;
  }
  EXPECT_EQ(said, 1);
}

/// Ranks of as many hosts that wait for 30 of 60 ms in each step, while each sends 1 MB.
std::optional<LateRank> SayOfLinks(LateSteps& steps, const std::vector<double>& link_ms) {
  std::optional<LateRank> said;
  for (int64_t step = 1; step <= 11; ++step) {
    for (size_t rank = 0; rank < link_ms.size(); ++rank) {
      StepTimes times{.rank = static_cast<int32_t>(rank), .step = step, .ns = 60 * kMs};
      times.blocked_ns = 30 * kMs + step % 2;
      times.link_ns = static_cast<int64_t>(link_ms[rank] * kMs);
      times.link_bytes = link_ms[rank] > 0 ? 1'000'000 : 0;
      if (const auto late = steps.Add(times)) said = late;
    }
  }
  return said;
}

TEST(SlowLink, IsNamedWithItsRateAndThatOfTheOthers) {
  LateSteps steps(3);
  const auto said = SayOfLinks(steps, {2, 20, 2.5});
  ASSERT_TRUE(said);
  EXPECT_EQ(said->rank, 1);
  EXPECT_EQ(said->cause, LateBy::kLink);
  EXPECT_EQ(said->late_ns, 17'500'000);
  EXPECT_DOUBLE_EQ(said->rate, 50e6);
  EXPECT_DOUBLE_EQ(said->others_rate, 400e6);
}

TEST(SlowLink, IsNoneWhereAllAreAlikeOrCarryLittle) {
  for (const std::vector<double>& link_ms :
       std::vector<std::vector<double>>{{20, 20, 30}, {0.1, 2, 0.1}, {0, 20, 0}, {0, 0, 0}}) {
    LateSteps steps(3);
    EXPECT_FALSE(SayOfLinks(steps, link_ms)) << link_ms[1];
  }
}

TEST(SlowLink, IsTheSlowestOfSeveral) {
  LateSteps steps(5);
  EXPECT_EQ(SayOfLinks(steps, {2, 20, 2, 25, 2})->rank, 3);
}

TEST(SlowLink, IsNamedBesideARankThatIsLate) {
  LateSteps steps(4);
  std::set<LateBy> causes;
  for (int64_t step = 1; step <= 12; ++step) {
    for (const int32_t rank : {0, 1, 2, 3}) {
      StepTimes times{.rank = rank, .step = step, .ns = 60 * kMs, .link_bytes = 1'000'000};
      times.blocked_ns = (rank == 0 ? 5 : 30) * kMs;
      times.link_ns = (rank == 3 ? 20 : 2) * kMs;
      if (const auto said = steps.Add(times)) causes.insert(said->cause);
    }
  }
  EXPECT_EQ(causes, (std::set{LateBy::kComputing, LateBy::kLink}));
}

TEST(SlowLink, CountsNoLongerThanItsRankWaits) {
  LateSteps steps(3);
  EXPECT_EQ(SayOfLinks(steps, {2, 50, 2})->late_ns, 30 * kMs);
}

TEST(SlowLink, OfTwoHostsIsNamedIfAllWaitForItForMostOfAStep) {
  for (const double link_ms : {25.0, 31.0}) {
    LateSteps two(2, true);
    for (int64_t step = 1; step <= 12; ++step) {
      for (const int32_t rank : {0, 1}) {
        StepTimes times{.rank = rank, .step = step, .ns = 60 * kMs, .blocked_ns = 40 * kMs};
        times.link_ns = static_cast<int64_t>(link_ms * kMs);
        times.link_bytes = 310'000;
        const auto said = two.Add(times);
        ASSERT_EQ(said.has_value(), link_ms > 30 && step == 11 && rank == 1);
        if (!said) continue;
        EXPECT_EQ(said->cause, LateBy::kNetwork);
        EXPECT_EQ(Describe(*said), "31 ms of 60 in each step: a connection carries 10.0 MB/s");
      }
    }
  }
}

TEST(SlowLink, OfTwoHostsIsNamedOnceWhicheverRankHasTheSlowest) {
  LateSteps two(2, true);
  int said = 0;
  for (int64_t step = 1; step <= 60; ++step) {
    for (const int32_t rank : {0, 1}) {
      StepTimes times{.rank = rank, .step = step, .ns = 60 * kMs, .blocked_ns = 40 * kMs};
      times.link_ns = (step / 20 % 2 == rank ? 36 : 32) * kMs;
      times.link_bytes = 310'000;
      said += two.Add(times) ? 1 : 0;
    }
  }
  EXPECT_EQ(said, 1);
}

TEST(LateRankText, IsASentence) {
  EXPECT_EQ(Describe({3, LateBy::kLink, 8'000'000, 61'000'000, 8'000'000, 12.34e6, 110e6}),
            "8.00 ms of 61 in each step: its link carries 12.3 MB/s, the others' 110.0 MB/s");
  EXPECT_EQ(Describe({3, LateBy::kOtherGroups, 12'600'000, 61'000'000, 12'000'000}),
            "13 ms of 61 in each step: it is in operations of other groups for 12 ms more than the "
            "others");
  EXPECT_EQ(Describe({3, LateBy::kInput, 8'000'000, 61'000'000, 9'040'000}),
            "8.00 ms of 61 in each step: its input takes 9.04 ms longer than the others'");
  EXPECT_EQ(Describe({3, LateBy::kProcessor, 12'600'000, 61'000'000, 12'000'000}),
            "13 ms of 61 in each step: it is without a processor for 12 ms more than the others");
}

}  // namespace
}  // namespace farandole
