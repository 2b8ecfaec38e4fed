// One rank's final error ends the work of all ranks, whatever they wait for, and names its cause.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/gradients/gradient_round.h"
#include "test/planes/failing_plane.h"
#include "test/planes/late_plane.h"
#include "test/planes/stopping_plane.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int kRanks = 4;
constexpr uint32_t kPair = 1;  // the first set added, of ranks 2 and 3

Signature Floats() {
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, {4}});
  return signature;
}

EngineOptions Quiet(bool threads = false) {
  EngineOptions options;
  options.threads = threads;
  options.negotiation.stall_ns = 0;
  return options;
}

EngineOptions AtOnce() {
  EngineOptions options = Quiet();
  options.linger_ns = 0;
  return options;
}

// Four ranks; the last fails in the set of ranks 2 and 3.
class FinalError : public ::testing::Test {
 protected:
  using Wrap = SteppedJob::WrapPlane;

  void Open(const EngineOptions& options, const Wrap& wrap) {
    job_ = std::make_unique<SteppedJob>(kRanks, options, wrap);
  }
  static Wrap LastFails(FailingPlane::Options options) {
    return [options](int rank, std::unique_ptr<DataPlane> plane) -> std::unique_ptr<DataPlane> {
      if (rank != kRanks - 1) return plane;
      return std::make_unique<FailingPlane>(std::move(plane), options);
    };
  }
  static bool InPair(const Batch& batch) { return batch.set == kPair; }

  std::vector<std::shared_ptr<Work>> AddPair() {
    std::vector<std::shared_ptr<Work>> works;
    for (int r = 0; r < kRanks; ++r) works.push_back(job_->engine(r).AddSet({2, 3}).value());
    return works;
  }
  Status TryStart(int rank, const KeyName& name, const Signature& signature = Floats()) {
    Result<Operation*> operation = job_->engine(rank).operations().Prepare(name, signature);
    if (!operation.ok()) return operation.status();
    const std::vector<const void*> in(signature.tensors.size(), values_[rank]);
    const std::vector<void*> out(signature.tensors.size(), values_[rank]);
    Result<std::shared_ptr<Work>> work = job_->engine(rank).Start(*operation.value(), in, out);
    if (!work.ok()) return work.status();
    works_[static_cast<size_t>(rank)] = work.value();
    return {};
  }
  void Start(int rank, const KeyName& name, const Signature& signature = Floats()) {
    const Status started = TryStart(rank, name, signature);
    ASSERT_TRUE(started.ok()) << started.message();
  }
  void StartOnPair() {
    for (int r : {2, 3}) Start(r, {kPair, OpKind::kAllreduce, "pair"});
  }
  // The other two never vote.
  void StartWhatNeverCompletes(int rank) { Start(rank, {kGlobalSet, OpKind::kAllreduce, "never"}); }

  void ExpectEnd(int rank, Code code, const std::string& begin) {
    const std::shared_ptr<Work>& work = works_[static_cast<size_t>(rank)];
    ASSERT_TRUE(work->done()) << "rank " << rank << " still waits";
    EXPECT_EQ(work->status().code(), code) << work->status().message();
    EXPECT_THAT(work->status().message(), StartsWith(begin)) << "rank " << rank;
  }

  float values_[kRanks][4] = {};
  std::unique_ptr<SteppedJob> job_;
  std::vector<std::shared_ptr<Work>> works_ = std::vector<std::shared_ptr<Work>>(kRanks);
};

TEST_F(FinalError, OfAPlaneReachesPeersAndRanksThatWaitForAVote) {
  Open(Quiet(), LastFails({.fails = InPair}));
  (void)AddPair();
  job_->SettleHeld();
  StartWhatNeverCompletes(0);
  StartWhatNeverCompletes(1);
  StartOnPair();
  job_->SettleHeld();
  ExpectEnd(3, Code::kResourceExhausted, "no memory");
  for (int r : {0, 1, 2}) ExpectEnd(r, Code::kResourceExhausted, "rank 3 failed: no memory");
  for (const std::shared_ptr<Work>& work : works_) {
    EXPECT_THAT(work->status().facts().ranks, ElementsAre(3));
    EXPECT_THAT(work->status().facts().cause, StartsWith("no memory"));
  }
}

TEST_F(FinalError, OfALostPeerNamesThePeerOnAllRanks) {
  Open(Quiet(), nullptr);
  for (int r = 0; r < 3; ++r) StartWhatNeverCompletes(r);
  job_->SettleHeld();
  job_->hub().Disconnect(3, Unavailable("rank 3 is lost"));
  job_->SettleHeld();
  for (int r = 0; r < 3; ++r) {
    const std::shared_ptr<Work>& work = works_[static_cast<size_t>(r)];
    ASSERT_TRUE(work->done()) << "rank " << r;
    EXPECT_EQ(work->status().code(), Code::kUnavailable);
    EXPECT_THAT(work->status().message(), HasSubstr("rank 3 is lost"));
    EXPECT_THAT(work->status().facts().ranks, ElementsAre(3)) << "rank " << r;
    EXPECT_EQ(work->status().facts().cause, "rank 3 is lost") << "rank " << r;
  }
}

TEST_F(FinalError, RefusesLaterWorkOnRanksThatHadNoneToDo) {
  Open(Quiet(), LastFails({.fails = InPair}));
  (void)AddPair();
  job_->SettleHeld();
  StartOnPair();
  job_->SettleHeld();
  for (int r : {0, 1}) {
    const Status later = TryStart(r, {kGlobalSet, OpKind::kAllreduce, "later"});
    EXPECT_THAT(later.message(), StartsWith("rank 3 failed: no memory")) << "rank " << r;
  }
}

TEST_F(FinalError, OfASetThatCannotBeAddedReachesAllRanks) {
  Open(Quiet(), LastFails({.refused_set = kPair}));
  (void)AddPair();
  job_->SettleHeld();
  for (int r : {0, 1, 2}) {
    EXPECT_THAT(job_->engine(r).lifecycle().final_error().message(),
                StartsWith("rank 3 failed: no memory"));
  }
}

TEST_F(FinalError, OfAWrongCallIsNoWrongCallOfTheOthers) {
  Open(Quiet(), LastFails({.fails = InPair, .error = InvalidArgument("wrong here")}));
  (void)AddPair();
  job_->SettleHeld();
  StartWhatNeverCompletes(0);
  StartOnPair();
  job_->SettleHeld();
  ExpectEnd(3, Code::kInvalidArgument, "wrong here");
  ExpectEnd(0, Code::kAborted, "rank 3 failed: wrong here");
}

// Ranks 2 and 3 train in their set. Rank 3 runs another round in the step that rank 2 has ended and
// left for another collective; the others are not members and wait in their own.
TEST_F(FinalError, OfStepsThatDifferIsOneOnAllRanks) {
  Open(Quiet(), [](int, std::unique_ptr<DataPlane> plane) { return plane; });
  (void)AddPair();
  job_->SettleHeld();
  for (int r : {0, 1, 2}) StartWhatNeverCompletes(r);
  for (int r : {2, 3}) {
    const StepCount step = r == 2 ? StepCount{8, 0, 0, 1, 0} : StepCount{7, 2, 0, 1, 0};
    ASSERT_TRUE(job_->engine(r).AnnounceStep(kPair, "gradients.0.", step).ok());
  }
  job_->SettleHeld();
  const std::string begin =
      "optimizer step \"gradients.0.\" (process set 1): in step 7 rank 2 ran 1 backward pass and "
      "called step(), rank 3 ran 2; all ranks must";
  for (int r : {0, 1, 2}) ExpectEnd(r, Code::kMismatch, begin);
  const Status later = TryStart(3, {kGlobalSet, OpKind::kAllreduce, "later"});
  EXPECT_EQ(later.code(), Code::kMismatch);
  EXPECT_THAT(later.message(), StartsWith(begin));
}

TEST_F(FinalError, OfStepsThatDifferComesBeforeThatAPeerHasLeft) {
  Open(AtOnce(), [](int, std::unique_ptr<DataPlane> plane) { return plane; });
  (void)AddPair();
  job_->SettleHeld();
  for (int r : {2, 3}) {
    ASSERT_TRUE(job_->engine(r).AnnounceStep(kPair, "gradients.0.", {10 - r, 1, 0, 1, 0}).ok());
  }
  Start(3, {kPair, OpKind::kAllreduce, "gradients.0.w"});
  (void)job_->engine(2).Leave();
  job_->SettleHeld();
  ExpectEnd(3, Code::kMismatch, "optimizer step \"gradients.0.\"");
}

// An optimizer follows another one under the same name. The ranks pair their announcements by
// number, however late one of them is.
TEST_F(FinalError, IsNoneWhereAnnouncementsOfStepsWaitForOneAnother) {
  Open(AtOnce(), [](int, std::unique_ptr<DataPlane> plane) { return plane; });
  const std::vector<int64_t> steps = {1, 2, 3, 1, 2, 1};
  for (int r = 0; r < kRanks; ++r) {
    for (const int64_t step : steps) {
      ASSERT_TRUE(
          job_->engine(r).AnnounceStep(kGlobalSet, "gradients.0.", {step, 0, 0, 0, 0}).ok());
    }
    job_->SettleHeld();
  }
  for (int r = 0; r < kRanks; ++r) EXPECT_TRUE(job_->engine(r).lifecycle().final_error().ok());
  EXPECT_EQ(job_->engine(0).counters().Get(Counter::kDecisions),
            static_cast<int64_t>(steps.size()));
}

// The announcements that waited when rank 3 joined are refused one by one.
TEST_F(FinalError, OfStepsThatDifferIsFoundAfterAJoin) {
  Open(AtOnce(), [](int, std::unique_ptr<DataPlane> plane) { return plane; });
  const auto announce = [&](int r, int64_t step) {
    ASSERT_TRUE(job_->engine(r).AnnounceStep(kGlobalSet, "gradients.0.", {step, 0, 0, 0, 0}).ok());
  };
  for (const int64_t step : {1, 2, 3, 4}) announce(3, step);
  std::vector<std::shared_ptr<Work>> joins = {job_->engine(3).Join().value()};
  job_->SettleHeld();
  for (int r : {0, 1, 2}) announce(r, 1);
  job_->SettleHeld();
  for (int r : {0, 1, 2}) joins.push_back(job_->engine(r).Join().value());
  job_->SettleHeld();
  for (const std::shared_ptr<Work>& join : joins) ASSERT_TRUE(join->done() && join->status().ok());
  for (int r = 0; r < kRanks; ++r) announce(r, r < 3 ? 5 : 6);
  job_->SettleHeld();
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(job_->engine(r).lifecycle().final_error().code(), Code::kMismatch) << "rank " << r;
  }
}

TEST_F(FinalError, IsNoneWhereStepsAgree) {
  Open(Quiet(), [](int, std::unique_ptr<DataPlane> plane) { return plane; });
  for (int step = 1; step <= 5; ++step) {
    for (int r = 0; r < kRanks; ++r) {
      const StepCount count{step, r, 0, 1, 0};  // rounds compare the passes
      ASSERT_TRUE(job_->engine(r).AnnounceStep(kGlobalSet, "gradients.0.", count).ok());
    }
    job_->SettleHeld();
  }
  for (int r = 0; r < kRanks; ++r) EXPECT_TRUE(job_->engine(r).lifecycle().final_error().ok());
  EXPECT_EQ(job_->engine(0).counters().Get(Counter::kDecisions), 5);
}

TEST_F(FinalError, EndsJoinAndLeave) {
  Open(Quiet(), LastFails({.fails = InPair}));
  (void)AddPair();
  job_->SettleHeld();
  const std::shared_ptr<Work> joined = job_->engine(0).Join().value();
  const std::shared_ptr<Work> left = job_->engine(1).Leave();
  StartOnPair();
  job_->SettleHeld();
  for (const std::shared_ptr<Work>& work : {joined, left}) {
    ASSERT_TRUE(work->done());
    EXPECT_FALSE(work->status().ok());
  }
  EXPECT_THAT(left->status().message(), StartsWith("rank 3 failed: no memory"));
}

// Rank 0 is every other rank's parent in the tree.
TEST_F(FinalError, GoesAroundALeaderThatHasStopped) {
  EngineOptions options = Quiet();
  options.progress_timeout_ns = kNsPerSecond;
  Open(options, [](int, std::unique_ptr<DataPlane> plane) {
    return std::make_unique<StoppingPlane>(std::move(plane), StoppingPlane::Set(kPair));
  });
  (void)AddPair();
  job_->SettleHeld();
  StartWhatNeverCompletes(1);
  StartOnPair();
  job_->SettleHeld();
  for (int i = 0; i < 20; ++i) {
    job_->clock().Advance(kNsPerSecond / 10);
    for (int r : {3, 2, 1}) (void)job_->engine(r).RunOnce();
  }
  ExpectEnd(1, Code::kTimeout, "rank 3 failed: allreduce batch");
  ExpectEnd(2, Code::kTimeout, "rank 3 failed: allreduce batch");
  ExpectEnd(3, Code::kTimeout, "rank 3: allreduce batch");
}

TEST_F(FinalError, WhenAllHaveLeftSpoilsNobodysExit) {
  Open(Quiet(), nullptr);
  std::vector<std::shared_ptr<Work>> leaving;
  for (int r = 0; r < kRanks; ++r) leaving.push_back(job_->engine(r).Leave());
  for (int i = 0; i < 3; ++i) {
    for (int r : {3, 2, 1, 0}) (void)job_->engine(r).RunOnce();
    if (job_->engine(0).ShutDownCleanly()) break;
  }
  ASSERT_TRUE(job_->engine(0).ShutDownCleanly());
  ASSERT_FALSE(job_->engine(1).ShutDownCleanly());
  job_->hub().Disconnect(0, Unavailable("rank 0 is lost"));
  job_->Settle();
  for (const std::shared_ptr<Work>& work : leaving) {
    ASSERT_TRUE(work->done());
    EXPECT_TRUE(work->status().ok()) << work->status().message();
  }
}

// With the engines' own threads on real time.
TEST_F(FinalError, WakesBlockedCallersAndEnginesThatSleep) {
  Open(Quiet(true), [](int rank, std::unique_ptr<DataPlane> plane) -> std::unique_ptr<DataPlane> {
    plane = std::make_unique<LatePlane>(std::move(plane), LatePlane::Options{.seed = 7});
    return LastFails({.fails = InPair})(rank, std::move(plane));
  });
  const std::vector<std::shared_ptr<Work>> adding = AddPair();
  const auto wait = [&](int rank, const Work& work) {
    return job_->engine(rank).Wait(work, 10 * kNsPerSecond);
  };
  for (int r = 0; r < kRanks; ++r) ASSERT_TRUE(wait(r, *adding[static_cast<size_t>(r)]));
  StartWhatNeverCompletes(0);
  StartWhatNeverCompletes(1);
  StartOnPair();
  EXPECT_TRUE(wait(0, *works_[0]));  // holds the engine lock and sleeps
  const int64_t until_ns = SteadyClock().NowNs() + 10 * kNsPerSecond;
  const auto late = [&] { return SteadyClock().NowNs() > until_ns; };
  for (int r : {1, 2, 3}) {  // nobody waits for these
    while (!works_[static_cast<size_t>(r)]->done() && !late())
      works_[static_cast<size_t>(r)]->SleepUntilDone(kNsPerMs);
  }
  for (int r : {0, 1, 2}) ExpectEnd(r, Code::kResourceExhausted, "rank 3 failed: no memory");
}

}  // namespace
}  // namespace farandole
