#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "ops/nccl/communicator.h"
#include "test/support/fake_clock.h"
#include "test/unit/ops/scripted_nccl.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using State = Progress::State;

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  NcclCommunicatorTest() { Make(std::string(128, 'u')); }
  void Make(const std::string& unique_id) {
    communicator_.emplace(
        NcclCommunicatorOptions{nccl_.library(), unique_id, 4, 2, "rank 0: host a", &clock_});
  }
  /// Brings it up and forgets how.
  void Connect() {
    ASSERT_EQ(communicator_->Connect().state, State::kDone);
    nccl_.calls.clear();
  }
  Status Reduce() {
    return communicator_->AllReduce(this, this, 8, NcclDataType::kFloat32, NcclRedOp::kSum,
                                    nullptr);
  }

  ScriptedNccl nccl_;
  FakeClock clock_;
  const std::vector<NcclTransfer> exchange_ = {{NcclTransfer::Kind::kSend, 1, this, nullptr, 8},
                                               {NcclTransfer::Kind::kReceive, 3, nullptr, this, 8}};
  std::optional<NcclCommunicator> communicator_;
};

TEST_F(NcclCommunicatorTest, ConnectsWithoutBlockingAndAsksUntilItIsUp) {
  nccl_.answers["CommInitRankConfig"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress, NcclResult::kInProgress};
  const Progress first = communicator_->Connect();
  EXPECT_EQ(first.state, State::kWaiting);
  EXPECT_EQ(first.poll_after_ns, 50'000);
  EXPECT_EQ(communicator_->Connect().state, State::kWaiting);
  EXPECT_EQ(communicator_->Connect().state, State::kDone);
  EXPECT_EQ(nccl_.CountOf("CommInitRankConfig"), 1);
  EXPECT_EQ(nccl_.config.blocking, 0);
  EXPECT_EQ(nccl_.config.version, 21800u);
  EXPECT_EQ(nccl_.size, 4);
  EXPECT_EQ(nccl_.index, 2);
  EXPECT_EQ(nccl_.unique_id.internal[127], 'u');
}

TEST_F(NcclCommunicatorTest, IsMadeFromAnotherThatIsAskedFirst) {
  Connect();
  NcclCommunicator child({nccl_.library(), "", 2, 1, "", &clock_, &*communicator_, {0, 3}});
  nccl_.answers["CommShrink"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress, NcclResult::kSuccess, NcclResult::kInProgress};
  EXPECT_EQ(child.Connect().state, State::kWaiting);  // for the parent
  EXPECT_FALSE(communicator_->settled());
  EXPECT_EQ(child.Connect().state, State::kWaiting);  // for the child
  EXPECT_TRUE(communicator_->settled());
  EXPECT_EQ(child.Connect().state, State::kDone);
  EXPECT_EQ(nccl_.CountOf("CommShrink"), 1);
  EXPECT_EQ(nccl_.CountOf("CommInitRankConfig"), 0);
  EXPECT_THAT(nccl_.excluded, ElementsAre(0, 3));
  EXPECT_EQ(nccl_.shrink_flags, 0);
  EXPECT_EQ(nccl_.config.blocking, 0);
}

TEST_F(NcclCommunicatorTest, FailsWithTheParentItIsMadeFrom) {
  Connect();
  NcclCommunicator child({nccl_.library(), "", 2, 1, "", &clock_, &*communicator_, {0, 3}});
  nccl_.answers["CommShrink"] = {NcclResult::kInvalidUsage};
  const Progress failed = child.Connect();
  EXPECT_EQ(failed.state, State::kFailed);
  EXPECT_THAT(failed.status.message(), StartsWith("ncclCommShrink: "));
  EXPECT_FALSE(communicator_->usable());
}

TEST_F(NcclCommunicatorTest, IsSettledOnlyWhenNcclSaysSo) {
  Connect();
  nccl_.answers["AllReduce"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  EXPECT_TRUE(Reduce().ok());
  EXPECT_FALSE(communicator_->settled());
  EXPECT_EQ(communicator_->Settle().state, State::kWaiting);
  EXPECT_EQ(communicator_->Settle().state, State::kDone);
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce", "CommGetAsyncError", "CommGetAsyncError"));
}

TEST_F(NcclCommunicatorTest, MakesOneCallOfAGroup) {
  Connect();
  nccl_.answers["Send"] = {NcclResult::kInProgress};
  nccl_.answers["GroupEnd"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  EXPECT_TRUE(communicator_->Group(exchange_, nullptr).ok());
  EXPECT_THAT(nccl_.calls, ElementsAre("GroupStart", "Send", "Recv", "GroupEnd"));
  EXPECT_EQ(communicator_->Settle().state, State::kWaiting);
  EXPECT_EQ(communicator_->Settle().state, State::kDone);
}

TEST_F(NcclCommunicatorTest, OpensNoGroupForNothing) {
  Connect();
  EXPECT_TRUE(communicator_->Group({}, nullptr).ok());
  EXPECT_EQ(communicator_->Settle().state, State::kDone);
  EXPECT_TRUE(nccl_.calls.empty());
}

TEST_F(NcclCommunicatorTest, ClosesAGroupOfWhichACallFailedAndNamesThatCall) {
  Connect();
  nccl_.answers["Send"] = {NcclResult::kInvalidArgument};
  nccl_.answers["GroupEnd"] = {NcclResult::kInvalidUsage};
  EXPECT_THAT(communicator_->Group(exchange_, nullptr).message(), StartsWith("ncclSend: "));
  EXPECT_THAT(nccl_.calls, ElementsAre("GroupStart", "Send", "GroupEnd", "CommAbort"));
}

TEST_F(NcclCommunicatorTest, SaysWhichGroupFailed) {
  Connect();
  nccl_.answers["GroupEnd"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kSystemError};
  EXPECT_TRUE(communicator_->Group(exchange_, nullptr).ok());
  EXPECT_THAT(communicator_->Settle().status.message(),
              StartsWith("ncclGroupEnd of ncclSend and ncclRecv: "));
  Make(std::string(128, 'u'));
  Connect();
  nccl_.answers["GroupEnd"] = {NcclResult::kSystemError};
  const NcclTransfer broadcast{NcclTransfer::Kind::kBroadcast, 1, this, this, 8};
  EXPECT_THAT(communicator_->Group({&broadcast, 1}, nullptr).message(),
              StartsWith("ncclGroupEnd of ncclBroadcast: "));
}

TEST_F(NcclCommunicatorTest, AsksNothingAfterACallThatWasOverAtOnce) {
  Connect();
  EXPECT_TRUE(Reduce().ok());
  EXPECT_EQ(communicator_->Settle().state, State::kDone);
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce"));
}

TEST_F(NcclCommunicatorTest, SaysCallReasonLastErrorVersionFileAndMap) {
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
  const Progress progress = communicator_->Connect();
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_THAT(progress.status.message(), HasSubstr("ncclCommInitRankConfig: "));
}

TEST_F(NcclCommunicatorTest, TellsThatAPeerIsGone) {
  Connect();
  nccl_.states = {NcclResult::kRemoteError};
  const Status status = communicator_->CheckAsync();
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("remote process exited"));
}

TEST_F(NcclCommunicatorTest, AbortsOnceAtAFailureAndCallsNothingMore) {
  Connect();
  nccl_.answers["AllReduce"] = {NcclResult::kInternalError};
  const std::string text = Reduce().message();
  EXPECT_EQ(Reduce().message(), text);
  EXPECT_EQ(communicator_->Settle().status.message(), text);
  EXPECT_EQ(communicator_->CheckAsync().message(), text);
  EXPECT_EQ(communicator_->Connect().status.message(), text);
  communicator_.reset();
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce", "CommAbort"));
}

TEST_F(NcclCommunicatorTest, AsksForErrorsAtMostTenTimesASecond) {
  Connect();
  for (int ms = 0; ms < 1000; ++ms) {
    EXPECT_TRUE(communicator_->CheckAsync().ok());
    clock_.Advance(kNsPerMs);
  }
  EXPECT_EQ(nccl_.CountOf("CommGetAsyncError"), 10);
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

TEST_F(NcclCommunicatorTest, AbortsWhatIsStillConnectingAtItsEnd) {
  nccl_.answers["CommInitRankConfig"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  EXPECT_EQ(communicator_->Connect().state, State::kWaiting);
  nccl_.calls.clear();
  communicator_.reset();
  EXPECT_THAT(nccl_.calls, ElementsAre("CommAbort"));
}

TEST_F(NcclCommunicatorTest, AnswersAbortedAfterAnAbort) {
  Connect();
  communicator_->Abort();
  communicator_->Abort();
  EXPECT_EQ(Reduce().code(), Code::kAborted);
  EXPECT_THAT(nccl_.calls, ElementsAre("CommAbort"));
}

TEST_F(NcclCommunicatorTest, SurvivesARefusedRegistration) {
  Connect();
  nccl_.answers["CommRegister"] = {NcclResult::kInvalidUsage};
  void* handle = this;
  EXPECT_THAT(communicator_->Register(this, 8, &handle).message(), HasSubstr("ncclCommRegister: "));
  EXPECT_EQ(handle, nullptr);
  EXPECT_TRUE(Reduce().ok());
}

TEST_F(NcclCommunicatorTest, RefusesAUniqueIdOfAnotherSize) {
  Make("short");
  const Progress progress = communicator_->Connect();
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_THAT(progress.status.message(), AllOf(HasSubstr("128"), EndsWith("this one 5")));
  EXPECT_EQ(nccl_.CountOf("CommInitRankConfig"), 0);
}

}  // namespace
}  // namespace farandole
