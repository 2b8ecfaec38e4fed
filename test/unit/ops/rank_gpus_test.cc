#include "ops/cuda/rank_gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

class RankGpusTest : public ::testing::Test {
 protected:
  RankGpus Of(int devices, int default_index = 0) {
    runtime_ = std::make_shared<FakeDeviceRuntime>(devices);
    return RankGpus(
        [this]() -> Result<std::shared_ptr<DeviceRuntime>> {
          return std::shared_ptr<DeviceRuntime>(runtime_);
        },
        default_index);
  }
  int IndexAt(RankGpus& gpus, int distance) { return gpus.At(distance).value()->info().index; }

  std::shared_ptr<FakeDeviceRuntime> runtime_;
};

TEST_F(RankGpusTest, CountsFromTheOneUsedFirst) {
  RankGpus gpus = Of(4);
  EXPECT_EQ(gpus.Use(2).value().distance, 0);
  EXPECT_EQ(gpus.Use(3).value().distance, 1);
  EXPECT_EQ(gpus.Use(1).value().distance, -1);
  EXPECT_EQ(gpus.Use(2).value().distance, 0);
  EXPECT_EQ(gpus.Use(3).value().device, &runtime_->fake(3));
}

TEST_F(RankGpusTest, OpensNoOtherDeviceThanThoseUsed) {
  RankGpus gpus = Of(4);
  (void)gpus.Use(2);
  EXPECT_EQ(runtime_->opened(), 1);
}

TEST_F(RankGpusTest, GivesARankWithoutATensorTheDeviceOfItsLocalRank) {
  RankGpus gpus = Of(4, 5);
  EXPECT_EQ(IndexAt(gpus, 0), 1);
  EXPECT_EQ(gpus.Use(1).value().distance, 0);
}

TEST_F(RankGpusTest, CountsRoundForDevicesThatWereNeverUsed) {
  RankGpus gpus = Of(2);
  (void)gpus.Use(1);
  EXPECT_EQ(IndexAt(gpus, 1), 0);
  EXPECT_EQ(IndexAt(gpus, -1), 0);
  EXPECT_EQ(IndexAt(gpus, -3), 0);
}

TEST_F(RankGpusTest, ChoosesNoHomeThatIsNotThere) {
  RankGpus gpus = Of(2);
  EXPECT_FALSE(gpus.Use(7).ok());
  EXPECT_EQ(gpus.Use(1).value().distance, 0);
}

TEST_F(RankGpusTest, RefusesADeviceTooFarFromHomeByName) {
  RankGpus gpus = Of(20);
  (void)gpus.Use(0);
  EXPECT_TRUE(gpus.Use(kMaxGpuOffset).ok());
  EXPECT_THAT(std::string(gpus.Use(17).status().message()),
              HasSubstr("on CUDA device 17, but this rank began on device 0"));
}

TEST_F(RankGpusTest, SaysThatThereIsNoDevice) {
  RankGpus gpus = Of(0);
  EXPECT_EQ(gpus.At(0).status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace farandole
