#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "ops/gpu/nccl/communicator.h"
#include "test/support/fake_clock.h"
#include "test/unit/ops/scripted_nccl.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  NcclCommunicatorTest() { Make({.unique_id = std::string(128, 'u')}); }
  void Make(NcclSetOptions options) {
    options.size = 4;
    options.index = 2;
    options.ranks_text = "rank 0: host a";
    communicator_.emplace(
        *nccl_.library(), options, [this] { return given_up_; }, clock_);
  }
  /// Brings it up and forgets how.
  void Connect() {
    ASSERT_TRUE(communicator_->Connect().ok());
    nccl_.calls.clear();
  }
  Status Reduce() {
    const NcclCall sum{.in = this, .out = this, .count = 8, .type = NcclDataType::kFloat32};
    return Run({sum});
  }
  Status Run(const std::vector<NcclCall>& calls) { return communicator_->Run(calls, nullptr); }

  ScriptedNccl nccl_;
  FakeClock clock_;
  bool given_up_ = false;
  const std::vector<NcclCall> exchange_ = {
      {.kind = NcclCall::Kind::kSend, .in = this, .count = 8, .peer = 1},
      {.kind = NcclCall::Kind::kReceive, .out = this, .count = 8, .peer = 3}};
  std::optional<NcclCommunicator> communicator_;
};

TEST_F(NcclCommunicatorTest, ConnectsWithoutBlockingAndAsksUntilItIsUp) {
  nccl_.answers["CommInitRankConfig"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress, NcclResult::kInProgress};
  EXPECT_TRUE(communicator_->Connect().ok());
  EXPECT_EQ(nccl_.CountOf("CommInitRankConfig"), 1);
  EXPECT_EQ(nccl_.CountOf("CommGetAsyncError"), 3);
  EXPECT_EQ(nccl_.config.blocking, 0);
  EXPECT_EQ(nccl_.config.version, 21800u);
  EXPECT_EQ(nccl_.config.max_ctas, kNcclUndefined) << "NCCL's own choice";
  EXPECT_EQ(nccl_.size, 4);
  EXPECT_EQ(nccl_.index, 2);
  EXPECT_EQ(nccl_.unique_id.internal[127], 'u');
}

TEST_F(NcclCommunicatorTest, LimitsItsBlocksOnASharedGpu) {
  Make({.unique_id = std::string(128, 'u'), .shared_gpu = true});
  EXPECT_TRUE(communicator_->Connect().ok());
  EXPECT_EQ(nccl_.config.max_ctas, 2);
  EXPECT_EQ(nccl_.config.min_ctas, kNcclUndefined);
}

TEST_F(NcclCommunicatorTest, ReturnsWhenWhatWasCalledIsInTheStream) {
  Connect();
  nccl_.answers["AllReduce"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  EXPECT_TRUE(Reduce().ok());
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce", "CommGetAsyncError", "CommGetAsyncError"));
}

TEST_F(NcclCommunicatorTest, AsksNothingAfterACallThatWasCompleteAtOnce) {
  Connect();
  EXPECT_TRUE(Reduce().ok());
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce"));
}

TEST_F(NcclCommunicatorTest, SleepsOnlyInACallThatTakesLongerThanALaunch) {
  Connect();
  nccl_.when_asked = [this] { clock_.Advance(10 * kNsPerUs); };
  nccl_.answers["AllReduce"] = {NcclResult::kInProgress, NcclResult::kInProgress};
  nccl_.states.assign(9, NcclResult::kInProgress);
  EXPECT_TRUE(Reduce().ok());
  EXPECT_EQ(communicator_->sleeps(), 0) << "complete after 100 us";
  nccl_.states.assign(14, NcclResult::kInProgress);
  EXPECT_TRUE(Reduce().ok());
  EXPECT_EQ(communicator_->sleeps(), 5) << "complete after 150 us";
}

TEST_F(NcclCommunicatorTest, FailsWhereMemoryCannotBeRegisteredAsOnThePeers) {
  Connect();
  nccl_.answers["CommRegister"] = {NcclResult::kSystemError};
  EXPECT_THAT(communicator_->AllocateRegistered(64).status().message(),
              StartsWith("ncclCommRegister: "));
  EXPECT_FALSE(communicator_->AllocateRegistered(64).ok());
  EXPECT_FALSE(Reduce().ok());
  EXPECT_THAT(nccl_.calls, ElementsAre("MemAlloc", "CommRegister", "MemFree"));
}

TEST_F(NcclCommunicatorTest, WaitsForPeersNoLongerOnceItIsGivenUp) {
  nccl_.answers["CommInitRankConfig"] = {NcclResult::kInProgress};
  nccl_.states.assign(1000, NcclResult::kInProgress);
  nccl_.when_asked = [this] { given_up_ = nccl_.CountOf("CommGetAsyncError") == 5; };
  EXPECT_EQ(communicator_->Connect().code(), Code::kAborted);
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 0) << "that is the launch queue's, for all of its GPU";
  communicator_->Abort();
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
}

TEST_F(NcclCommunicatorTest, MakesOneCallOfAGroup) {
  Connect();
  nccl_.answers["GroupEnd"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  EXPECT_TRUE(Run(exchange_).ok());
  EXPECT_THAT(nccl_.calls, ElementsAre("GroupStart", "Send", "Recv", "GroupEnd",
                                       "CommGetAsyncError", "CommGetAsyncError"));
}

TEST_F(NcclCommunicatorTest, OpensNoGroupForNothingOrOneCall) {
  Connect();
  EXPECT_TRUE(Run({}).ok());
  EXPECT_TRUE(nccl_.calls.empty());
  EXPECT_TRUE(Run({exchange_.front()}).ok());
  EXPECT_THAT(nccl_.calls, ElementsAre("Send"));
}

TEST_F(NcclCommunicatorTest, ClosesAGroupOfWhichACallFailedAndNamesThatCall) {
  Connect();
  nccl_.answers["Send"] = {NcclResult::kInvalidArgument};
  nccl_.answers["GroupEnd"] = {NcclResult::kInvalidUsage};
  EXPECT_THAT(Run(exchange_).message(), StartsWith("ncclSend: "));
  EXPECT_THAT(nccl_.calls, ElementsAre("GroupStart", "Send", "GroupEnd"));
}

TEST_F(NcclCommunicatorTest, SaysWhichGroupFailed) {
  Connect();
  nccl_.answers["GroupEnd"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kSystemError};
  EXPECT_THAT(Run(exchange_).message(), StartsWith("ncclGroupEnd of ncclSend and ncclRecv: "));
  Make({.unique_id = std::string(128, 'u')});
  Connect();
  nccl_.answers["GroupEnd"] = {NcclResult::kSystemError};
  const NcclCall broadcast{
      .kind = NcclCall::Kind::kBroadcast, .in = this, .out = this, .count = 8, .peer = 1};
  EXPECT_THAT(Run({broadcast, broadcast}).message(), StartsWith("ncclGroupEnd of ncclBroadcast: "));
}

TEST_F(NcclCommunicatorTest, SaysCallReasonLastErrorVersionFileAndRanks) {
  Connect();
  nccl_.last_error = "socketPoll failed";
  nccl_.answers["AllReduce"] = {NcclResult::kSystemError};
  const Status status = Reduce();
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_EQ(status.message(),
            "ncclAllReduce: unhandled error; socketPoll failed; NCCL 2.32.3 "
            "(/somewhere/libnccl.so.2); rank 0: host a");
}

TEST_F(NcclCommunicatorTest, NamesTheCallThatFailsLater) {
  nccl_.answers["CommInitRankConfig"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInvalidUsage};
  EXPECT_THAT(communicator_->Connect().message(), HasSubstr("ncclCommInitRankConfig: "));
}

TEST_F(NcclCommunicatorTest, ReportsThatAPeerIsGone) {
  Connect();
  nccl_.states = {NcclResult::kRemoteError};
  const Status status = communicator_->CheckAsync();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("remote process exited"));
}

TEST_F(NcclCommunicatorTest, CallsNothingAfterAFailureButTheAbortAtItsEnd) {
  Connect();
  nccl_.answers["AllReduce"] = {NcclResult::kInternalError};
  const std::string text = Reduce().message();
  EXPECT_EQ(Reduce().message(), text);
  EXPECT_EQ(communicator_->CheckAsync().message(), text);
  communicator_.reset();
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce", "CommAbort"));
}

TEST_F(NcclCommunicatorTest, TakesAnOperationInProgressForNoError) {
  Connect();
  nccl_.states = {NcclResult::kInProgress};
  EXPECT_TRUE(communicator_->CheckAsync().ok());
}

TEST_F(NcclCommunicatorTest, FinalizesThenDestroys) {
  Connect();
  nccl_.answers["CommFinalize"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  communicator_.reset();
  EXPECT_THAT(nccl_.calls,
              ElementsAre("CommFinalize", "CommGetAsyncError", "CommGetAsyncError", "CommDestroy"));
}

TEST_F(NcclCommunicatorTest, AbortsWhenTheOthersDoNotFinalizeInTime) {
  Connect();
  nccl_.answers["CommFinalize"] = {NcclResult::kInProgress};
  nccl_.states.assign(100, NcclResult::kInProgress);
  nccl_.when_asked = [this] { clock_.Advance(kNsPerSecond); };
  communicator_.reset();
  EXPECT_THAT(nccl_.calls,
              ElementsAre("CommFinalize", "CommGetAsyncError", "CommGetAsyncError", "CommAbort"));
}

TEST_F(NcclCommunicatorTest, IsAbortedOnce) {
  Connect();
  communicator_->Abort();
  communicator_->Abort();
  EXPECT_EQ(Reduce().code(), Code::kAborted);
  communicator_.reset();
  EXPECT_THAT(nccl_.calls, ElementsAre("CommAbort"));
}

TEST_F(NcclCommunicatorTest, RefusesAUniqueIdOfAnotherSize) {
  Make({.unique_id = "short"});
  EXPECT_THAT(communicator_->Connect().message(), AllOf(HasSubstr("128"), EndsWith("this one 5")));
  EXPECT_EQ(nccl_.CountOf("CommInitRankConfig"), 0);
}

}  // namespace
}  // namespace farandole
