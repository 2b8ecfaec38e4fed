#include "ops/local/store_way_chooser.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

/// Chunk times of a machine on which each way costs a fixed time.
struct Machine {
  int64_t cached_ns;
  int64_t streamed_ns;
  int64_t Chunk(StoreWay way) const { return way == StoreWay::kCached ? cached_ns : streamed_ns; }
};

/// Runs `chunks` chunks. @return How many of them were written past the cache.
int RunChunks(StoreWayChooser& chooser, const Machine& machine, int chunks) {
  int streamed = 0;
  for (int i = 0; i < chunks; ++i) {
    const StoreWay way = chooser.way();
    streamed += way == StoreWay::kStreamed;
    chooser.OnChunk(machine.Chunk(way));
  }
  return streamed;
}

constexpr Machine kSharedCache{25'000, 45'000};
constexpr Machine kApart{130'000, 35'000};

TEST(StoreWayChooser, StaysWithTheCacheWhereItIsFaster) {
  StoreWayChooser chooser;
  EXPECT_LT(RunChunks(chooser, kSharedCache, 20'000), 20'000 / 100);  // probes only
}

TEST(StoreWayChooser, GoesPastTheCacheWhereThatIsFaster) {
  StoreWayChooser chooser;
  RunChunks(chooser, kApart, 100);
  EXPECT_GT(RunChunks(chooser, kApart, 20'000), 20'000 * 99 / 100);
}

TEST(StoreWayChooser, FollowsAProcessorThatMovesAwayWithinAFewChunks) {
  StoreWayChooser chooser;
  RunChunks(chooser, kSharedCache, 20'000);  // probes have become rare
  EXPECT_GT(RunChunks(chooser, kApart, 100), 50);
}

TEST(StoreWayChooser, FollowsAProcessorThatComesBack) {
  StoreWayChooser chooser;
  RunChunks(chooser, kApart, 20'000);
  RunChunks(chooser, kSharedCache,
            3 * 1024 * 4);  // past the cache stays as fast: a probe has to tell
  EXPECT_LT(RunChunks(chooser, kSharedCache, 1000), 100);
}

TEST(StoreWayChooser, IsNotMisledByOneSlowChunk) {
  StoreWayChooser chooser;
  RunChunks(chooser, kSharedCache, 1000);
  chooser.OnChunk(50'000'000);
  EXPECT_LT(RunChunks(chooser, kSharedCache, 1000), 100);
}

TEST(StoreWayChooser, KeepsAFixedWay) {
  StoreWayChooser chooser(StoreWay::kStreamed);
  EXPECT_EQ(RunChunks(chooser, kSharedCache, 1000), 1000);
}

}  // namespace
}  // namespace farandole
