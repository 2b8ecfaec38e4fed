#include "ops/gpu/rank_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

class RankDeviceTest : public ::testing::Test {
 protected:
  RankDevice& Of(int devices, int default_index = 0) {
    runtime_ = std::make_shared<FakeDeviceRuntime>(devices);
    device_ = std::make_unique<RankDevice>(
        [this]() -> Result<std::shared_ptr<DeviceRuntime>> {
          return std::shared_ptr<DeviceRuntime>(runtime_);
        },
        default_index);
    return *device_;
  }

  std::shared_ptr<FakeDeviceRuntime> runtime_;
  std::unique_ptr<RankDevice> device_;
};

TEST_F(RankDeviceTest, IsTheOneUsedFirst) {
  RankDevice& gpu = Of(4);
  EXPECT_EQ(gpu.Use(2).value(), &runtime_->fake(2));
  EXPECT_EQ(gpu.Get().value(), &runtime_->fake(2));
  EXPECT_EQ(runtime_->opened(), 1);
}

TEST_F(RankDeviceTest, RefusesAnotherOneWithTheRemedy) {
  RankDevice& gpu = Of(4);
  (void)gpu.Use(2);
  const Status refused = gpu.Use(3).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("on CUDA device 3, but this rank works on device 2"));
  EXPECT_THAT(refused.message(), HasSubstr("start one process per GPU"));
  EXPECT_EQ(runtime_->opened(), 1);
}

TEST_F(RankDeviceTest, AsksTheRuntimeNothingOnceItIsChosen) {
  RankDevice& gpu = Of(4);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(gpu.Use(1).ok());
  EXPECT_EQ(runtime_->fake(1).counts().of(FakeCall::kOpen), 1);
}

TEST_F(RankDeviceTest, IsThatOfTheLocalRankForARankWithoutATensor) {
  RankDevice& gpu = Of(4, 5);
  EXPECT_EQ(gpu.Get().value(), &runtime_->fake(1));
  EXPECT_TRUE(gpu.Use(1).ok());
  EXPECT_FALSE(gpu.Use(0).ok());
}

TEST_F(RankDeviceTest, IsNoneThatIsNotThere) {
  RankDevice& gpu = Of(2);
  EXPECT_FALSE(gpu.Use(7).ok());
  EXPECT_TRUE(gpu.Use(1).ok());
}

TEST_F(RankDeviceTest, SaysThatThereIsNoDevice) {
  EXPECT_EQ(Of(0).Get().status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace farandole
