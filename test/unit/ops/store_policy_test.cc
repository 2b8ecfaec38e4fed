#include "ops/shm/store_policy.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

/// Chunk times of a machine on which each policy costs a fixed time.
struct Machine {
  int64_t cached_ns;
  int64_t streamed_ns;
  int64_t Chunk(StorePolicy policy) const {
    return policy == StorePolicy::kCached ? cached_ns : streamed_ns;
  }
};

/// Runs `chunks` chunks. @return How many of them were written past the cache.
int RunChunks(StorePolicyChooser& chooser, const Machine& machine, int chunks) {
  int streamed = 0;
  for (int i = 0; i < chunks; ++i) {
    const StorePolicy policy = chooser.policy();
    streamed += policy == StorePolicy::kStreamed;
    chooser.OnChunk(machine.Chunk(policy));
  }
  return streamed;
}

constexpr Machine kSharedCache{25'000, 45'000};
constexpr Machine kApart{130'000, 35'000};

TEST(StorePolicyChooser, StaysWithTheCacheWhereItIsFaster) {
  StorePolicyChooser chooser;
  EXPECT_LT(RunChunks(chooser, kSharedCache, 20'000), 20'000 / 100);  // probes only
}

TEST(StorePolicyChooser, GoesPastTheCacheWhereThatIsFaster) {
  StorePolicyChooser chooser;
  RunChunks(chooser, kApart, 100);
  EXPECT_GT(RunChunks(chooser, kApart, 20'000), 20'000 * 99 / 100);
}

TEST(StorePolicyChooser, FollowsAProcessorThatMovesAwayWithinAFewChunks) {
  StorePolicyChooser chooser;
  RunChunks(chooser, kSharedCache, 20'000);  // probes have become rare
  EXPECT_GT(RunChunks(chooser, kApart, 100), 50);
}

TEST(StorePolicyChooser, FollowsAProcessorThatComesBack) {
  StorePolicyChooser chooser;
  RunChunks(chooser, kApart, 20'000);
  RunChunks(chooser, kSharedCache,
            3 * 1024 * 4);  // past the cache stays as fast: only a probe shows it
  EXPECT_LT(RunChunks(chooser, kSharedCache, 1000), 100);
}

TEST(StorePolicyChooser, IsNotMisledByOneSlowChunk) {
  StorePolicyChooser chooser;
  RunChunks(chooser, kSharedCache, 1000);
  chooser.OnChunk(50'000'000);
  EXPECT_LT(RunChunks(chooser, kSharedCache, 1000), 100);
}

TEST(StorePolicyChooser, KeepsAFixedPolicy) {
  StorePolicyChooser chooser(StorePolicy::kStreamed);
  EXPECT_EQ(RunChunks(chooser, kSharedCache, 1000), 1000);
}

}  // namespace
}  // namespace farandole
