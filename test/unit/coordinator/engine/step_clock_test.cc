#include "coordinator/engine/step_clock.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <thread>

#include "core/clock.h"

namespace farandole {
namespace {

constexpr int64_t kMs = kNsPerMs;

TEST(StepClock, SaysWhatBecameOfTheTimeSinceTheLastStep) {
  StepClock clock;
  EXPECT_FALSE(clock.End(3, 0, {.bytes = 100, .ns = 2 * kMs}, 100 * kMs));
  StepClock of_other_engine;
  clock.NoteWait(true, 7 * kMs);
  clock.NoteWait(false, 3 * kMs);
  of_other_engine.NoteWait(true, 1 * kMs);
  std::thread([&] { clock.NoteWait(true, 9 * kMs); }).join();
  NoteTime(TimeOf::kInput, 5 * kMs);
  std::thread([] { NoteTime(TimeOf::kInput, 9 * kMs); }).join();  // another rank's, it may be
  std::thread([] { NoteTime(TimeOf::kGarbageCollection, 2 * kMs); }).join();
  NoteTime(TimeOf::kInput, -1);
  NoteTime(TimeOf::kInput, INT64_MAX);
  const auto times = clock.End(3, 0, {.bytes = 500, .ns = 6 * kMs}, 140 * kMs);
  ASSERT_TRUE(times);
  EXPECT_EQ(times->rank, 3);
  EXPECT_EQ(times->step, 2);
  EXPECT_EQ(times->ns, 40 * kMs);
  EXPECT_EQ(times->blocked_ns, 7 * kMs);
  EXPECT_EQ(times->input_ns, 5 * kMs);
  EXPECT_EQ(times->collecting_ns, 2 * kMs);
  EXPECT_EQ(times->other_groups_ns, 4 * kMs);
  EXPECT_EQ(times->link_ns, 4 * kMs);
  EXPECT_EQ(times->link_bytes, 400);
}

TEST(StepClock, KnowsNothingOfAStepThatAnotherThreadBegan) {
  StepClock clock;
  (void)clock.End(0, 0, {}, 100 * kMs);
  std::thread([&] { EXPECT_FALSE(clock.End(0, 0, {}, 140 * kMs)); }).join();
  std::thread([&] { EXPECT_FALSE(clock.End(0, 0, {}, 180 * kMs)); }).join();
  EXPECT_FALSE(clock.End(0, 0, {}, 220 * kMs));
  EXPECT_EQ(clock.End(0, 0, {}, 260 * kMs)->step, 5);
}

TEST(StepClock, CountsAnewAfterAJoinAsTheOtherRanksDo) {
  StepClock clock, of_joined;
  for (int64_t step = 1; step <= 30; ++step) (void)clock.End(0, 0, {}, step * kMs);
  for (int64_t step = 1; step <= 20; ++step) (void)of_joined.End(1, 0, {}, step * kMs);
  EXPECT_EQ(clock.End(0, 1, {}, 40 * kMs)->step, of_joined.End(1, 1, {}, 40 * kMs)->step);
}

TEST(StepClock, TimesAreNeverNegative) {
  StepClock clock;
  (void)clock.End(0, 0, {}, 100 * kMs);
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{0, files.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);  // so that /proc cannot be read
  const auto times = clock.End(0, 0, {}, 140 * kMs);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  ASSERT_TRUE(times);
  EXPECT_GE(times->queued_ns, 0);
  EXPECT_EQ(clock.End(0, 0, {}, 90 * kMs)->ns, 0);
}

}  // namespace
}  // namespace farandole
