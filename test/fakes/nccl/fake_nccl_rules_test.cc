// How the fake NCCL comes up, fails, ends, and notices wrong use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "test/fakes/nccl/fake_nccl_job.h"

namespace farandole {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

class FakeNcclRulesTest : public ::testing::Test {
 protected:
  FakeNcclRulesTest() { control().reset(); }
  ~FakeNcclRulesTest() override {
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    control().reset();
  }
  static const FakeNcclControl& control() { return FakeNcclJob::control(); }
  static std::string Misuses() { return control().take_misuses(); }
  static std::string LastError() { return FARANDOLE_FAKE_NCCL_CALL(ncclGetLastError, nullptr); }

  FakeDeviceRuntime runtime_{2};
  float values_[2] = {1, 2};
};

TEST_F(FakeNcclRulesTest, ConnectsWhenAllRanksAreThere) {
  const ncclUniqueId id = FakeNcclJob::NewId();
  ncclComm_t first = nullptr, second = nullptr;
  ncclResult_t state = ncclSuccess;
  ASSERT_TRUE(runtime_.fake(0).MakeCurrent().ok());
  EXPECT_EQ(FakeNcclJob::Start(&first, 2, id, 0), ncclInProgress);
  FARANDOLE_FAKE_NCCL_CALL(ncclCommGetAsyncError, first, &state);
  EXPECT_EQ(state, ncclInProgress);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclAllReduce, values_, values_, 1, ncclFloat32, ncclSum,
                                     first, nullptr),
            ncclInvalidArgument);
  EXPECT_THAT(Misuses(), HasSubstr("not connected yet"));
  ASSERT_TRUE(runtime_.fake(1).MakeCurrent().ok());
  EXPECT_EQ(FakeNcclJob::Start(&second, 2, id, 1), ncclInProgress);
  FARANDOLE_FAKE_NCCL_CALL(ncclCommGetAsyncError, first, &state);
  EXPECT_EQ(state, ncclSuccess);
  for (ncclComm_t comm : {first, second}) FARANDOLE_FAKE_NCCL_CALL(ncclCommAbort, comm);
}

/// Two ranks on one GPU; what comes of their init.
ncclResult_t ShareAGpu(FakeDeviceRuntime& runtime) {
  const ncclUniqueId id = FakeNcclJob::NewId();
  ncclComm_t comms[2];
  ncclResult_t state = ncclSuccess;
  EXPECT_TRUE(runtime.fake(0).MakeCurrent().ok());
  for (int rank : {0, 1}) EXPECT_EQ(FakeNcclJob::Start(&comms[rank], 2, id, rank), ncclInProgress);
  FARANDOLE_FAKE_NCCL_CALL(ncclCommGetAsyncError, comms[0], &state);
  for (ncclComm_t comm : comms) FARANDOLE_FAKE_NCCL_CALL(ncclCommAbort, comm);
  return state;
}

TEST_F(FakeNcclRulesTest, RefusesTwoRanksOnOneGpuUnlessAllowedWhenItFirstReadItsEnvironment) {
  EXPECT_EQ(ShareAGpu(runtime_), ncclInvalidUsage);
  EXPECT_THAT(LastError(), HasSubstr("Duplicate GPU detected: rank 0 and rank 1"));
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  setenv("NCCL_MAX_CTAS", "2", 1);
  EXPECT_EQ(ShareAGpu(runtime_), ncclInvalidUsage) << "too late";
  control().reset();  // as a process of its own
  EXPECT_EQ(ShareAGpu(runtime_), ncclSuccess);
  control().set("VERSION", "22907");
  EXPECT_EQ(ShareAGpu(runtime_), ncclInvalidUsage);
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  unsetenv("NCCL_MAX_CTAS");
}

TEST_F(FakeNcclRulesTest, HangsWhereKernelsOfASharedGpuMayNotAllFit) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  EXPECT_EQ(ShareAGpu(runtime_), ncclInProgress);
  EXPECT_THAT(Misuses(), HasSubstr("have no limit of blocks"));
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

TEST_F(FakeNcclRulesTest, WhatIsUsedFirstIsInProgressUntilThePeersHaveCalledIt) {
  std::vector<float> large(300'000), other(300'000);
  const auto check = [](FakeNcclJob& job, const char* what, auto start) {
    SCOPED_TRACE(what);
    EXPECT_EQ(start(0), ncclInProgress);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(job.Look(0), ncclInProgress);
    EXPECT_EQ(start(1), ncclInProgress);
    for (int rank : {0, 1}) EXPECT_EQ(job.Complete(rank), ncclSuccess);
    job.Synchronize();
  };
  FakeNcclJob fresh(runtime_, 2, /*meets=*/false), job(runtime_, 2);
  control().set("BUSY_US", "0");
  const auto sum = [&](int rank) {
    return fresh.StartAllReduce(rank, &values_[rank], &values_[rank], 1);
  };
  check(fresh, "a collective", sum);
  EXPECT_EQ(sum(0), ncclInProgress);
  EXPECT_EQ(fresh.Complete(0), ncclSuccess) << "the next one waits for nobody";
  EXPECT_EQ(fresh.Completed(1, sum(1)), ncclSuccess);
  check(fresh, "a transfer", [&](int rank) {
    return rank == 0 ? fresh.StartSend(0, values_, 1, 1) : fresh.StartReceive(1, values_ + 1, 1, 0);
  });
  check(job, "another algorithm", [&](int rank) {
    float* const data = rank == 0 ? large.data() : other.data();
    return job.StartAllReduce(rank, data, data, large.size());
  });
}

TEST_F(FakeNcclRulesTest, DestroyWaitsUntilItsPeersFinalizeOrAbort) {
  for (const bool aborts : {false, true}) {
    FakeNcclJob job(runtime_, 2);
    std::atomic<bool> ended{false};
    std::thread destroy([&] {
      job.Use(0);
      job.Destroy(0);
      ended = true;
    });
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    EXPECT_FALSE(ended);
    job.Use(1);
    if (aborts) {
      job.Abort(1);
    } else {
      EXPECT_EQ(FARANDOLE_FAKE_NCCL_RUN(job, 1, ncclCommFinalize, job.comm(1)), ncclSuccess);
    }
    destroy.join();
  }
}

TEST_F(FakeNcclRulesTest, FinalizeAndADestroyWithoutConnectionsWaitForNobody) {
  FakeNcclJob connected(runtime_, 2), fresh(runtime_, 2, /*meets=*/false);
  connected.Use(0);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_RUN(connected, 0, ncclCommFinalize, connected.comm(0)),
            ncclSuccess);
  fresh.Destroy(0);
}

TEST_F(FakeNcclRulesTest, AnAbortWaitsForWhatTheStreamHoldsBeforeTheKernel) {
  FakeNcclJob job(runtime_, 2);
  job.stream(0).Hold();
  job.stream(0).Enqueue("a late write", [] {});
  EXPECT_EQ(job.AllReduce(0, values_, values_, 1), ncclSuccess);
  std::atomic<bool> ended{false};
  std::thread abort([&] {
    job.Use(0);
    job.Abort(0);
    ended = true;
  });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  EXPECT_FALSE(ended);
  job.stream(0).Release();
  abort.join();
}

TEST_F(FakeNcclRulesTest, AbortsOfAGroupEndTogether) {
  FakeNcclJob first(runtime_, 2), second(runtime_, 2);
  ncclComm_t behind = second.comm(0);
  EXPECT_EQ(first.AllReduce(0, values_, values_, 1), ncclSuccess);
  // In the same stream, so that this one's kernel does not run before the other's has ended.
  EXPECT_EQ(
      second.Completed(0, FARANDOLE_FAKE_NCCL_CALL(ncclAllReduce, values_, values_, 1, ncclFloat32,
                                                   ncclSum, behind, first.handle(0))),
      ncclSuccess);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclGroupStart), ncclSuccess);
  second.Abort(0);
  first.Abort(0);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclGroupEnd), ncclSuccess);
}

TEST_F(FakeNcclRulesTest, WhatAnAbortedKernelLeavesIsUndefinedAndTheStreamGoesOn) {
  FakeNcclJob job(runtime_, 2);
  float result = 0;
  EXPECT_EQ(job.AllReduce(0, values_, &result, 1), ncclSuccess);
  bool later = false;
  job.stream(0).Enqueue("a later kernel", [&later] { later = true; });
  job.Abort(0);
  job.stream(0).Synchronize();
  EXPECT_TRUE(later);
  EXPECT_NE(result, 0);
}

TEST_F(FakeNcclRulesTest, AnErrorComesWithTheChosenCollective) {
  FakeNcclJob job(runtime_, 2);
  const int transfers = 2 * job.size();
  control().set("ERROR_AT", std::to_string(FakeNcclJob::kFirstUses + transfers + 2).c_str());
  control().set("ERROR_TEXT", "socket closed by rank 1");
  control().set("RANK", "0");
  for (int rank : {0, 1}) {
    float& mine = values_[rank];
    EXPECT_EQ(job.AllReduce(rank, &mine, &mine, 1), ncclSuccess);
  }
  job.Synchronize();
  EXPECT_THAT(values_, Each(3.0f));
  EXPECT_EQ(job.Look(0), ncclSuccess);
  EXPECT_EQ(job.AllReduce(0, values_, values_, 1), ncclRemoteError);
  EXPECT_EQ(job.Look(0), ncclRemoteError);
  EXPECT_EQ(LastError(), "socket closed by rank 1");
  EXPECT_EQ(job.AllReduce(0, values_, values_, 1), ncclRemoteError);
  EXPECT_EQ(job.Look(1), ncclSuccess);
  EXPECT_FALSE(job.stream(0).Idle());
  job.Abort(0);
  job.Synchronize();
}

TEST_F(FakeNcclRulesTest, ACallIsInTheStreamOnlyWhenItIsComplete) {
  FakeNcclJob job(runtime_, 2);
  control().set("BUSY_US", "50000");
  EXPECT_EQ(job.StartAllReduce(0, values_, values_, 1), ncclInProgress);
  EXPECT_TRUE(job.stream(0).Idle());
  EXPECT_EQ(job.StartAllReduce(0, values_, values_, 1), ncclInvalidArgument);
  EXPECT_THAT(Misuses(), HasSubstr("still ncclInProgress"));
  EXPECT_EQ(job.Complete(0), ncclSuccess);
  EXPECT_FALSE(job.stream(0).Idle());
}

TEST_F(FakeNcclRulesTest, FinalizesWhenItsStreamIsThrough) {
  FakeNcclJob job(runtime_, 1);
  job.stream(0).Hold();
  EXPECT_EQ(job.AllReduce(0, values_, values_, 1), ncclSuccess);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclCommFinalize, job.comm(0)), ncclInProgress);
  EXPECT_EQ(job.Look(0), ncclInProgress);
  job.stream(0).Release();
  while (job.Look(0) == ncclInProgress) continue;
  EXPECT_EQ(job.Look(0), ncclSuccess);
  EXPECT_EQ(job.AllReduce(0, values_, values_, 1), ncclInvalidUsage);
  EXPECT_THAT(Misuses(), HasSubstr("finalized before"));
}

TEST_F(FakeNcclRulesTest, NoticesWrongUse) {
  FakeNcclJob job(runtime_, 2);
  job.Use(1);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclAllReduce, values_, values_, 1, ncclFloat32, ncclSum,
                                     job.comm(0), nullptr),
            ncclInvalidUsage);
  EXPECT_THAT(Misuses(), HasSubstr("current device is not the communicator's"));
  EXPECT_EQ(job.AllReduce(0, nullptr, values_, 1), ncclInvalidArgument);
  EXPECT_THAT(LastError(), HasSubstr("a buffer is null"));
  ncclComm_t aborted = job.comm(0);
  job.Abort(0);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclCommAbort, aborted), ncclInvalidArgument);
  EXPECT_THAT(Misuses(), HasSubstr("ncclCommAbort: the communicator was destroyed or aborted"));
  job.Use(0);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclCommDestroy, aborted), ncclInvalidArgument);
  EXPECT_THAT(Misuses(), HasSubstr("ncclCommDestroy: the communicator was destroyed or aborted"));
}

/// What two ranks start that hangs, until it is noticed. @return What is said.
std::string Noticed(FakeNcclJob& job) {
  std::string misuses;
  while (misuses.empty()) misuses = FakeNcclJob::control().take_misuses();
  for (int rank : {0, 1}) job.Abort(rank);
  job.Synchronize();
  FakeNcclJob::control().take_misuses();  // of the other rank
  return misuses;
}

TEST_F(FakeNcclRulesTest, NoticesThatRanksRunDifferentCollectives) {
  FakeNcclJob job(runtime_, 2);
  float out[4];
  EXPECT_EQ(job.AllReduce(0, values_, out, 1), ncclSuccess);
  EXPECT_EQ(job.AllReduce(1, values_, out + 2, 2), ncclSuccess);
  EXPECT_THAT(Noticed(job), HasSubstr("run different collectives"));
}

TEST_F(FakeNcclRulesTest, NoticesASendAndAReceiveOfDifferentSizes) {
  FakeNcclJob job(runtime_, 2);
  EXPECT_EQ(job.Completed(0, job.StartSend(0, values_, 2, 1)), ncclSuccess);
  EXPECT_EQ(job.Completed(1, job.StartReceive(1, values_, 1, 0)), ncclSuccess);
  EXPECT_THAT(Noticed(job),
              HasSubstr("rank 0 sends 2 elements of type 7 to rank 1, which receives 1"));
}

TEST_F(FakeNcclRulesTest, ASendWaitsForTheReceiveOfItsPeer) {
  FakeNcclJob job(runtime_, 2);
  EXPECT_EQ(job.Completed(0, job.StartSend(0, values_, 1, 1)), ncclSuccess);
  const auto sent = job.stream(0).Mark();
  EXPECT_EQ(job.Completed(1, job.StartReceive(1, values_ + 1, 1, 1)), ncclSuccess);  // another's
  EXPECT_FALSE(sent->passed());
  for (int rank : {0, 1}) job.Abort(rank);
  job.Synchronize();
}

TEST_F(FakeNcclRulesTest, NoticesGroupsThatDiffer) {
  FakeNcclJob job(runtime_, 2);
  for (int rank : {0, 1}) {
    job.Use(rank);
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclGroupStart), ncclSuccess);
    for (int root : {rank, 1 - rank}) {  // each in its own order
      EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclBroadcast, &values_[rank], &values_[rank], 1,
                                         ncclFloat32, root, job.comm(rank), job.handle(rank)),
                ncclSuccess);
    }
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclGroupEnd), ncclInProgress);
  }
  EXPECT_THAT(Noticed(job), HasSubstr("run different collectives"));
}

TEST_F(FakeNcclRulesTest, NoticesBuffersThatOverlap) {
  FakeNcclJob job(runtime_, 2);
  float memory[6] = {};
  const auto gather = [&](float* in, float* out) {
    return FARANDOLE_FAKE_NCCL_RUN(job, 1, ncclAllGather, in, out, 2, ncclFloat32, job.comm(1),
                                   job.handle(1));
  };
  job.Use(1);
  EXPECT_EQ(gather(memory + 2, memory), ncclSuccess);  // in place
  EXPECT_EQ(gather(memory, memory), ncclInvalidArgument);
  EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclReduceScatter, memory, memory + 1, 2, ncclFloat32, ncclSum,
                                     job.comm(1), job.handle(1)),
            ncclInvalidArgument);
  EXPECT_THAT(Misuses(), HasSubstr("buffers overlap and are not in place"));
  for (int rank : {0, 1}) job.Abort(rank);
  job.Synchronize();
}

TEST_F(FakeNcclRulesTest, KeepsALogOfCalls) {
  FakeNcclJob job(runtime_, 1);
  const size_t before = control().calls();
  job.AllReduce(0, values_, values_, 2, ncclFloat32, ncclMax);
  ASSERT_EQ(control().calls(), before + 1);
  const FakeNcclCall call = control().call(before);
  EXPECT_STREQ(call.name, "ncclAllReduce");
  EXPECT_EQ(call.comm, job.comm(0));
  EXPECT_EQ(call.stream, job.handle(0));
  EXPECT_EQ(call.count, 2);
  EXPECT_EQ(call.datatype, ncclFloat32);
  EXPECT_EQ(call.op, ncclMax);
  EXPECT_EQ(call.rank, 0);
  EXPECT_EQ(call.result, ncclSuccess);
}

}  // namespace
}  // namespace farandole
