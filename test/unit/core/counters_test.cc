#include "core/counters.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>
#include <thread>
#include <vector>

namespace farandole {
namespace {

TEST(Counters, StartAtZeroAndAddUp) {
  Counters counters;
  EXPECT_EQ(counters.Get(Counter::kBatches), 0);
  counters.Add(Counter::kBatches);
  counters.Add(Counter::kBatches, 4);
  EXPECT_EQ(counters.Get(Counter::kBatches), 5);
  EXPECT_EQ(counters.Get(Counter::kTensors), 0);
}

TEST(Counters, LoseNothingWhenManyThreadsAddShared) {
  Counters counters;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&counters] {
      for (int i = 0; i < 10'000; ++i) counters.AddShared(Counter::kSubmissions);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counters.Get(Counter::kSubmissions), 40'000);
}

TEST(Snapshot, NamesEveryCounterOnce) {
  Counters counters;
  counters.Add(Counter::kWakeUps, 3);
  std::set<std::string_view> names;
  for (const NamedCount& count : Snapshot(counters)) {
    EXPECT_NE(count.name, "unknown");
    EXPECT_TRUE(names.insert(count.name).second) << count.name;
    EXPECT_EQ(count.value, count.name == "wake_ups" ? 3 : 0) << count.name;
  }
  EXPECT_EQ(names.size(), kCounterCount);
}

}  // namespace
}  // namespace farandole
