// The GPU plane over a whole libnccl, which is a fake: from the choice to the end of communicators,
// each of which has an id of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "test/unit/ops/gpu_plane_fixture.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(GpuPlaneOverNccl, SumsOverTheSetsCommunicators) {
  Open();
  for (const uint32_t set : {7u, 8u}) StartAll(set);
  EXPECT_THAT(Finish(), ElementsAre(3, 3, 3, 3));
  EXPECT_EQ(control().live_comms(), 4);
  for (const int rank : ranks_) plane(rank).RemoveSet(7);
  for (int i = 0; i < 10'000 && control().live_comms() != 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(control().live_comms(), 2);
}

/// NCCL reads its environment once per process.
class SharedGpuOverNccl : public GpuPlaneOverNccl {
 protected:
  SharedGpuOverNccl() {
    Forget();
    for (auto& [rank, settings] : settings_) settings.share_gpu = true;
  }
  ~SharedGpuOverNccl() override { Forget(); }
  static void Forget() {
    for (const char* name : {"NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE"}) unsetenv(name);
  }
  int Blocks() {
    for (size_t i = 0; i < control().calls(); ++i) {
      const FakeNcclCall call = control().call(i);
      if (std::string(call.name) == "ncclCommInitRankConfig") return call.op;
    }
    return -1;
  }
};

TEST_F(SharedGpuOverNccl, SharesAGpuWhenAskedWithFewBlocksForEachKernel) {
  for (auto& [rank, settings] : settings_) settings.bus_id = "0000:17:00.0";
  Open();
  StartAll(7);
  EXPECT_THAT(Finish(), ElementsAre(3, 3));
  EXPECT_EQ(control().times("ncclAllReduce"), 2);
  EXPECT_EQ(Blocks(), 2);
  EXPECT_EQ(std::getenv("NCCL_MAX_CTAS"), nullptr) << "that is a field of ncclConfig_t";
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

TEST_F(SharedGpuOverNccl, LetsNcclShareBeforeItReadsItsEnvironmentAlsoForASetThatDoesNot) {
  Open();
  StartAll(7);
  Finish();
  EXPECT_EQ(Blocks(), 0) << "NCCL's own choice";
  EXPECT_STREQ(std::getenv("NCCL_MULTI_RANK_GPU_ENABLE"), "1");
}

TEST_F(GpuPlaneOverNccl, AbandonFreesAStreamThatWaitsForAPeer) {
  Open();
  StartAll(7);
  Finish();
  Given& given = Start(0, 7);  // rank 1 does not
  ASSERT_TRUE(StepUntil([&] { return given.launched; }));
  StepOften();
  EXPECT_EQ(given.last.state, State::kWaiting);
  EXPECT_GE(given.last.poll_after_ns, 50'000);
  EXPECT_FALSE(plane(0).collective().Idle());
  Abandon(given);
  Synchronize();
}

TEST_F(GpuPlaneOverNccl, ReportsAPeersDeathAfterTheLaunchWithTheMap) {
  Open();
  StartAll(7);
  Finish();
  control().set("ERROR_AT", "2");
  StartAll(7);
  ASSERT_TRUE(StepUntil([this] { return given_[0]->last.state == State::kFailed; }));
  const Status& status = given_[0]->last.status;
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1: host here, GPU 0000:65:00.0"));
  ASSERT_TRUE(StepUntil([this] { return given_[1]->last.state == State::kFailed; }));
}

/// Three ranks; set 0 is of all, set 5 of two of them.
class SetsOverNccl : public GpuPlaneOverNccl {
 protected:
  SetsOverNccl() : GpuPlaneOverNccl(3) {
    Open();
    AddSet(0, {0, 1, 2});
    AddSet(5, {0, 2});
  }
};

TEST_F(SetsOverNccl, HaveACommunicatorEach) {
  StartAll(0);
  EXPECT_THAT(Finish(), ElementsAre(6, 6, 6));
  StartAll(5);
  EXPECT_THAT(Finish(), ElementsAre(4, 4));
  EXPECT_EQ(control().times("ncclGetUniqueId"), 2);
}

TEST_F(SetsOverNccl, WaitUntilACallThatTakesItsTimeIsComplete) {
  control().set("BUSY_US", "3000");
  for (const uint32_t set : {0u, 5u}) StartAll(set);
  EXPECT_THAT(Finish(), ElementsAre(6, 6, 6, 4, 4));
}

TEST_F(SetsOverNccl, EndBeforeOrAfterThatOfAllRanks) {
  for (const uint32_t set : {0u, 5u}) StartAll(set);
  EXPECT_THAT(Finish(), ElementsAre(6, 6, 6, 4, 4));
  for (const int rank : ranks_) plane(rank).RemoveSet(0);
  StartAll(5);
  EXPECT_THAT(Finish(), ElementsAre(4, 4));
}

TEST_F(SetsOverNccl, EndOnOneRankBeforeTheOtherWithoutHoldingUpANewSet) {
  StartAll(5);
  Finish();
  plane(0).RemoveSet(5);  // rank 2 still has to do so
  AddSet(6, {0, 2});
  StartAll(6);
  EXPECT_THAT(Finish(), ElementsAre(4, 4));
}

}  // namespace
}  // namespace farandole
