// How the GPU plane finds the backend of a set, and what it says about it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "test/unit/ops/gpu_plane_fixture.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(GpuPlaneTest, TouchesNothingBeforeASetsFirstBatch) {
  Open();
  EXPECT_EQ(plane(0).loads(), 0);
  EXPECT_EQ(nccl_[0]->finds, 0);
}

TEST_F(GpuPlaneTest, ARankWithoutAGpuFailsAllMembersByItsMessage) {
  Open();
  plane(1).FailLoading(Unavailable("libfarandole_cuda.so is not there"));
  Given& first = Start(0, 7);
  Given& second = Start(1, 7);
  EXPECT_TRUE(StepUntil([&] { return first.operation == nullptr && second.operation == nullptr; }));
  for (const Given* given : {&first, &second}) {
    EXPECT_EQ(given->last.state, State::kFailed);
    EXPECT_EQ(given->last.status.message(),
              "rank 1 (host here) cannot use its GPU: libfarandole_cuda.so is not there");
  }
}

TEST_F(GpuPlaneTest, SaysItsBackendOncePerSetOnTheFirstRank) {
  Open();
  Warm();
  EXPECT_THAT(
      logs_[0].lines,
      ElementsAre("info: CUDA tensors of process set 7 (2 ranks) go over NCCL 2.32.3 "
                  "(/x/libnccl.so.2, fake CUDA (host memory and threads; no GPU)): rank 0: host "
                  "here, GPU 0000:17:00.0; rank 1: host here, GPU 0000:65:00.0",
                  HasSubstr("process set 8")));
  EXPECT_THAT(logs_[1].lines, IsEmpty());
}

TEST_F(GpuPlaneTest, StagesRanksThatShareAGpuAndSaysWhy) {
  settings_[1].bus_id = settings_[0].bus_id;
  Open();
  Given& first = Start(0, 7);
  Given& second = Start(1, 7);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_EQ(first.data[0], std::vector<float>(4, 3.0f));
  EXPECT_EQ(second.data, first.data);
  EXPECT_THAT(scripts_[0].calls, IsEmpty());
  EXPECT_THAT(
      logs_[0].lines,
      ElementsAre("warning: CUDA tensors of process set 7 (2 ranks) go through host memory, which "
                  "is slower than NCCL: ranks 0 and 1 of host here share the GPU 0000:17:00.0, "
                  "which NCCL refuses. Give each rank a GPU of its own; FARANDOLE_SHARE_GPU=1 lets "
                  "NCCL 2.30.0 or newer share one."));
}

TEST_F(GpuPlaneTest, SharesAGpuOverNcclWhenAsked) {
  for (auto& [rank, settings] : settings_) {
    settings.bus_id = "0000:17:00.0";
    settings.share_gpu = true;
  }
  Open();
  Warm();
  for (const int rank : ranks_) EXPECT_TRUE(nccl_[rank]->shared_gpu);
  EXPECT_THAT(logs_[0].lines[0], HasSubstr("take turns"));
}

TEST_F(GpuPlaneTest, RefusesDifferentNcclVersionsOnAllMembers) {
  settings_[1].nccl = {22304, "/old/libnccl.so.2"};
  Open();
  Given& first = Start(0, 7);
  Given& second = Start(1, 7);
  EXPECT_TRUE(StepUntil([&] { return first.operation == nullptr && second.operation == nullptr; }));
  for (const Given* given : {&first, &second}) {
    EXPECT_EQ(given->last.status.code(), Code::kMismatch);
    EXPECT_THAT(std::string(given->last.status.message()), HasSubstr("/old/libnccl.so.2"));
  }
}

TEST_F(GpuPlaneTest, NeedsNeitherNcclNorAPeerForOneMember) {
  settings_[0].nccl.version = 0;
  Open();
  AddSet(9, {0});
  Given& given = Start(0, 9);
  while (given.operation != nullptr) Step(given);
  EXPECT_EQ(given.last.state, State::kDone);
  EXPECT_EQ(nccl_[0]->finds, 0);
}

TEST_F(GpuPlaneTest, RefusesWhatItCannotRun) {
  Open();
  Given& given = Start(0, 7);
  Batch bad = given.batch;
  bad.op = ReduceOp::kSum;
  bad.dtype = bad.wire = DType::kBool;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInvalidArgument);
  bad = given.batch;
  bad.kind = OpKind::kAllgather;  // of no parts
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInvalidArgument);
  bad = given.batch;
  bad.set = 99;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInternal);
  bad = given.batch;
  bad.my_index = 1;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInternal);
  EXPECT_EQ(plane(0).AddSet(7, ranks_, 0).code(), Code::kInvalidArgument);
  given.operation->Abandon();
}

}  // namespace
}  // namespace farandole
