// The GPU plane over a whole libnccl, which is a fake: from the choice to the end of a
// communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "test/fakes/nccl/open.h"
#include "test/unit/ops/gpu_plane_fixture.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;
using State = Progress::State;

class GpuPlaneOverNccl : public GpuPlaneTest {
 protected:
  GpuPlaneOverNccl() {
    for (Settings& settings : settings_) settings.nccl_library = FARANDOLE_FAKE_NCCL;
    control().reset();
  }
  ~GpuPlaneOverNccl() override {
    EndTogether(planes_);
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    control().reset();
  }
  static const FakeNcclControl& control() {
    static const FakeNccl library(FARANDOLE_FAKE_NCCL);
    return library.control();
  }
};

TEST_F(GpuPlaneOverNccl, SumsOverTheSetsCommunicators) {
  Open();
  for (const uint32_t set : {7u, 8u}) {
    for (int rank = 0; rank < kRanks; ++rank) Start(rank, set, 1);
  }
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  for (const auto& given : given_) EXPECT_EQ(given->data, std::vector<float>(4, 3.0f));
  EXPECT_EQ(control().live_comms(), 2 * kRanks);
  for (int rank = 0; rank < kRanks; ++rank) plane(rank).RemoveSet(7);
  for (int i = 0; i < 10'000 && control().live_comms() != kRanks; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(control().live_comms(), kRanks);
}

/// NCCL reads its environment once per process.
class SharedGpuOverNccl : public GpuPlaneOverNccl {
 protected:
  SharedGpuOverNccl() {
    Forget();
    for (Settings& settings : settings_) settings.share_gpu = true;
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
  for (Settings& settings : settings_) settings.bus_id = "0000:17:00.0";
  Open();
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_EQ(given_[0]->data, std::vector<float>(4, 3.0f));
  EXPECT_EQ(control().times("ncclAllReduce"), kRanks);
  EXPECT_EQ(Blocks(), 2);
  EXPECT_EQ(std::getenv("NCCL_MAX_CTAS"), nullptr) << "that is a field of ncclConfig_t";
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
}

TEST_F(SharedGpuOverNccl, LetsNcclShareBeforeItReadsItsEnvironmentAlsoForASetThatDoesNot) {
  Open();
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_EQ(Blocks(), 0) << "NCCL's own choice";
  EXPECT_STREQ(std::getenv("NCCL_MULTI_RANK_GPU_ENABLE"), "1");
}

TEST_F(GpuPlaneOverNccl, AbandonFreesAStreamThatWaitsForAPeer) {
  Open();
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  given_.clear();
  Given& given = Start(0, 7, 2);  // rank 1 does not
  ASSERT_TRUE(StepUntil([&] { return given.last.state == State::kLaunched; }));
  StepOften();
  EXPECT_EQ(given.last.state, State::kWaiting);
  EXPECT_GE(given.last.poll_after_ns, 50'000);
  EXPECT_FALSE(plane(0).collective().Idle());
  given.operation->Abandon();
  given.operation = nullptr;
  plane(0).Synchronize();
}

TEST_F(GpuPlaneOverNccl, ReportsAPeersDeathAfterTheLaunchWithTheMap) {
  Open();
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  given_.clear();
  control().set("ERROR_AT", "2");
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 2);
  ASSERT_TRUE(StepUntil([this] { return given_[0]->last.state == State::kFailed; }));
  const Status& status = given_[0]->last.status;
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1: host here, GPU 0000:65:00.0"));
  ASSERT_TRUE(StepUntil([this] { return given_[1]->last.state == State::kFailed; }));
}

}  // namespace
}  // namespace farandole
