// The CUDA plane over a whole libnccl, which is a fake: from the choice to the end of a
// communicator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "test/fakes/nccl/open.h"
#include "test/unit/ops/cuda_plane_fixture.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;
using State = Progress::State;

class CudaPlaneOverNccl : public CudaPlaneTest {
 protected:
  CudaPlaneOverNccl() {
    for (Settings& settings : settings_) settings.nccl_library = FARANDOLE_FAKE_NCCL;
    control().reset();
  }
  ~CudaPlaneOverNccl() override {
    planes_.clear();
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    control().reset();
  }
  static const FakeNcclControl& control() {
    static const FakeNccl library(FARANDOLE_FAKE_NCCL);
    return library.control();
  }
};

TEST_F(CudaPlaneOverNccl, SumsOverTheSetsCommunicators) {
  Open();
  for (const uint32_t set : {7u, 8u}) {
    for (int rank = 0; rank < kRanks; ++rank) Start(rank, set, 1);
  }
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  for (const auto& given : given_) EXPECT_EQ(given->data, std::vector<float>(4, 3.0f));
  EXPECT_EQ(control().live_comms(), 2 * kRanks);
  for (int rank = 0; rank < kRanks; ++rank) plane(rank).RemoveSet(7);
  EXPECT_EQ(control().live_comms(), kRanks);
}

TEST_F(CudaPlaneOverNccl, SharesAGpuWhenAsked) {
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  setenv("NCCL_MAX_CTAS", "5", 1);  // the user's own
  for (Settings& settings : settings_) {
    settings.bus_id = "0000:17:00.0";
    settings.share_gpu = true;
  }
  Open();
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_EQ(given_[0]->data, std::vector<float>(4, 3.0f));
  EXPECT_EQ(control().times("ncclAllReduce"), kRanks);
  EXPECT_STREQ(std::getenv("NCCL_MAX_CTAS"), "5");
  EXPECT_STREQ(std::getenv("NCCL_NVLS_ENABLE"), "0");
  for (const char* name : {"NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE"}) {
    unsetenv(name);
  }
}

TEST_F(CudaPlaneOverNccl, AbandonFreesAStreamThatWaitsForAPeer) {
  Open();
  for (int rank = 0; rank < kRanks; ++rank) Start(rank, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  given_.clear();
  Given& given = Start(0, 7, 2);  // rank 1 does not
  ASSERT_TRUE(StepUntil([&] { return given.last.state == State::kLaunched; }));
  StepOften();
  EXPECT_EQ(given.last.state, State::kWaiting);
  EXPECT_EQ(given.last.poll_after_ns, 50'000);
  EXPECT_FALSE(plane(0).lane().Idle());
  given.operation->Abandon();
  given.operation = nullptr;
  plane(0).lane().Synchronize();
}

TEST_F(CudaPlaneOverNccl, ReportsAPeersDeathAfterTheLaunchWithTheMap) {
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
}

}  // namespace
}  // namespace farandole
