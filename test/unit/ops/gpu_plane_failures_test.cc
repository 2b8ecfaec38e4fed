// What becomes of batches that are launched when a rank gives up: nobody hangs, and no step of the
// optimizer applies what an aborted collective leaves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "test/fakes/driver.h"
#include "test/unit/ops/gpu_plane_fixture.h"

namespace farandole {
namespace {

/// Both sets are connected.
class GpuFailures : public GpuPlaneOverNccl {
 protected:
  GpuFailures() {
    Open();
    Warm();
  }
  /// A batch of rank 0 alone, launched, then abandoned; all that its streams hold has run.
  Given& Aborted(const std::vector<int64_t>& counts) {
    Given& given = Start(0, 7, counts);
    EXPECT_TRUE(StepUntil([&] { return given.launched; }));
    Abandon(given);
    Synchronize();
    return given;
  }
};

/// Which of two sets is aborted first is not said: both orders of their kernels must do.
class TwoSetsInFlight : public GpuFailures, public ::testing::WithParamInterface<uint32_t> {};

TEST_P(TwoSetsInFlight, EndWhenOneOfThemIsAbandoned) {
  Given& one = Start(0, GetParam(), {4, 4});
  Given& other = Start(0, 15 - GetParam(), {4, 4});  // rank 1 starts neither
  ASSERT_TRUE(StepUntil([this] { return AllLaunched(); }));
  Abandon(one);
  ASSERT_TRUE(StepUntil([&] { return other.last.state == State::kFailed; }));
  Synchronize();
}

INSTANTIATE_TEST_SUITE_P(Orders, TwoSetsInFlight, ::testing::Values(7, 8));

TEST_F(GpuFailures, ABatchIsAbandonedAtOnceAlsoWhileItsProducerIsLate) {
  Ready late[1];
  FakeStream* const producer = HoldProducer(late[0]);
  Given& given = Start(0, 7, {4}, late);
  ASSERT_TRUE(StepUntil([&] { return given.launched; }));
  Abandon(given);
  producer->Release();
  Synchronize();
}

TEST_F(GpuFailures, ResultsOfAnAbortedBatchAreNaN) {
  for (const std::vector<float>& one : Aborted({4, 4}).data) {
    for (const float value : one) EXPECT_TRUE(std::isnan(value)) << value;
  }
}

TEST_F(GpuFailures, ResultsThatNcclWroteItselfAreNaNToo) {
  for (const float value : Aborted({1000}).data[0]) ASSERT_TRUE(std::isnan(value)) << value;
}

TEST_F(GpuFailures, ResultsBeforeTheFailureStay) {
  const Given& mine = Start(0, 7, {4, 4});
  Start(1, 7, {4, 4});
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  Aborted({4, 4});
  for (const std::vector<float>& one : mine.data) EXPECT_THAT(one, ::testing::Each(3.0f));
}

TEST_F(GpuFailures, ASetIsRemovedWithoutWaitingForTheDevice) {
  plane(0).device().NewStream()->Hold();
  plane(0).device().default_stream()->Hold();
  plane(0).device().default_stream()->Enqueue("a long kernel", [] {});
  MustEnd("RemoveSet", [this] {
    const FarandoleFakeDevice* const before = farandole_fake_current_device();
    plane(0).RemoveSet(7);
    EXPECT_EQ(farandole_fake_current_device(), before) << "the caller's device was switched";
  });
}

}  // namespace
}  // namespace farandole
