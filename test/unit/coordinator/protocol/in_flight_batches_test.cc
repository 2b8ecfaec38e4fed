#include "coordinator/protocol/in_flight_batches.h"

#include <gtest/gtest.h>

#include "test/support/count_allocations.h"

namespace farandole {
namespace {

TEST(InFlightBatches, GiveEachBatchBackOnceWithItsTag) {
  InFlightBatches batches;
  for (const int64_t number : {3, 5}) {
    for (const int32_t index : {0, 2}) batches.Add(number, static_cast<uint32_t>(number), index);
  }
  uint32_t tag = 0;
  EXPECT_TRUE(batches.Take(3, 2, &tag));
  EXPECT_EQ(tag, 3u);
  EXPECT_FALSE(batches.Take(3, 2, &tag));
  EXPECT_FALSE(batches.Take(3, 1, &tag));
  EXPECT_FALSE(batches.Take(4, 0, &tag));
  EXPECT_TRUE(batches.Take(3, 0, &tag));
  EXPECT_TRUE(batches.Take(5, 0, &tag));
  EXPECT_EQ(tag, 5u);
}

// One decision is always in flight, and never the same one for long.
TEST(InFlightBatches, KeepNothingOfDecisionsThatAreDone) {
  InFlightBatches batches;
  batches.Add(0, 0, 0);
  batches.Add(1, 0, 0);
  const CountAllocations allocations;
  uint32_t tag = 0;
  for (int64_t number = 2; number < 1000; ++number) {
    ASSERT_TRUE(batches.Take(number - 2, 0, &tag));
    batches.Add(number, 0, 0);
  }
  EXPECT_EQ(allocations.count(), 0);
}

}  // namespace
}  // namespace farandole
