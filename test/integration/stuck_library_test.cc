// A library call that does not return: stopping and joining end in time, and memory released is
// not touched when the call returns after all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "test/planes/blocking_plane.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using Where = BlockingPlane::Where;

constexpr size_t kCount = 1 << 18;  // several chunks
constexpr int64_t kStopNs = kNsPerSecond / 2;
constexpr int64_t kPatienceNs = 20 * kNsPerSecond;

bool Eventually(const std::function<bool()>& condition) {
  const int64_t until_ns = SteadyClock().NowNs() + kPatienceNs;
  while (!condition() && SteadyClock().NowNs() < until_ns) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

auto ThreadsOfProcess() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}

/// Two ranks on real time; rank 0's plane can block. What a stuck engine may touch outlives it.
class StuckLibrary : public ::testing::Test {
 protected:
  ~StuckLibrary() override {
    plane_->Open();
    // A thread that was left behind ends by itself, and only then the engine may go.
    EXPECT_TRUE(Eventually([&] { return !plane_->stuck(); }));
    EXPECT_TRUE(!left_behind_ || Eventually([&] { return ThreadsOfProcess() <= threads_after_; }));
    job_.reset();
  }

  void Begin(BlockingPlane::Predicate blocks, EngineOptions options = {}) {
    options.threads = true;
    options.negotiation.stall_ns = 0;
    job_ = std::make_unique<SteppedJob>(
        2, options,
        [&](int rank, std::unique_ptr<DataPlane> plane) -> std::unique_ptr<DataPlane> {
          if (rank != 0) return plane;
          auto blocking = std::make_unique<BlockingPlane>(std::move(plane), memory_, blocks);
          plane_ = blocking.get();
          return blocking;
        },
        nullptr, [&](int rank) { return rank == 0 ? &memory_ : nullptr; });
  }

  std::shared_ptr<Work> Start(int rank, bool notify = true) {
    Signature signature;
    signature.tensors.push_back({"", DType::kFloat32, {kCount}});
    Operation& operation = *job_->engine(rank)
                                .operations()
                                .Prepare({kGlobalSet, OpKind::kAllreduce, "t"}, signature)
                                .value();
    const void* in = tensors_[rank].data();
    void* out = tensors_[rank].data();
    return job_->engine(rank).Start(operation, {&in, 1}, {&out, 1}, {}, notify).value();
  }

  /// Rank 0's tensor is its user's again: from now on nobody else may touch it.
  void UseTensorAgain() {
    std::fill(tensors_[0].begin(), tensors_[0].end(), 7.0f);
    ASAN_POISON_MEMORY_REGION(tensors_[0].data(), kCount * sizeof(float));
  }

  void ExpectUntouched() {
    ASAN_UNPOISON_MEMORY_REGION(tensors_[0].data(), kCount * sizeof(float));
    EXPECT_EQ(std::count(tensors_[0].begin(), tensors_[0].end(), 7.0f), kCount);
  }

  /// Stops rank 0, whose engine is stuck, and then lets the call return.
  void ExpectStopLeavesItBehind(const std::shared_ptr<Work>& work) {
    const int64_t began_ns = SteadyClock().NowNs();
    const std::shared_ptr<Work> left = job_->engine(0).Leave();
    EXPECT_FALSE(job_->engine(0).Stop(kStopNs));
    EXPECT_LT(SteadyClock().NowNs() - began_ns, kPatienceNs / 2);
    ASSERT_TRUE(work->done() && left->done());
    EXPECT_EQ(work->status().code(), Code::kTimeout);
    EXPECT_THAT(work->status().message(), ::testing::HasSubstr("stuck inside a library call"));
    EXPECT_FALSE(job_->engine(0).Stop(kStopNs));
    UseTensorAgain();
    left_behind_ = true;
    job_->engine(1).Stop();
    plane_->Open();
    EXPECT_TRUE(Eventually([&] { return ThreadsOfProcess() <= threads_after_; }));
    ExpectUntouched();
  }

  const int64_t threads_after_ = ThreadsOfProcess();
  std::vector<float> tensors_[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  BorrowedMemory memory_;
  BlockingPlane* plane_ = nullptr;  // rank 0's
  std::unique_ptr<SteppedJob> job_;
  bool left_behind_ = false;
};

/// Blocks the n-th call of Step on: before packing, reducing, and writing the results.
class StuckInAStep : public StuckLibrary, public ::testing::WithParamInterface<int> {};

TEST_P(StuckInAStep, StopLeavesTheEngineThreadBehind) {
  int steps = 0;
  Begin([&](Where where) { return where == Where::kStep && ++steps >= GetParam(); });
  const std::shared_ptr<Work> work = Start(0);
  (void)Start(1);
  ASSERT_TRUE(Eventually([&] { return plane_->stuck(); }));
  ExpectStopLeavesItBehind(work);
}

INSTANTIATE_TEST_SUITE_P(FromStep, StuckInAStep, ::testing::Values(1, 4, 10));

TEST_F(StuckLibrary, StopLeavesAnEngineThreadBehindThatIsStuckInAStart) {
  Begin([](Where where) { return where == Where::kStart; });
  const std::shared_ptr<Work> work = Start(0);
  (void)Start(1);
  ASSERT_TRUE(Eventually([&] { return plane_->stuck(); }));
  ExpectStopLeavesItBehind(work);
}

TEST_F(StuckLibrary, StopLeavesAWaitingCallerBehindThatRunsTheEngine) {
  std::atomic<std::thread::id> caller{};
  Begin([&](Where) { return std::this_thread::get_id() == caller.load(); });
  std::shared_ptr<Work> last;
  std::thread user([&] {
    caller.store(std::this_thread::get_id());
    // Until this thread, and not the engine's, is the one that meets the plane.
    do {
      last = Start(0, false);
    } while (job_->engine(0).Wait(*last, -1) && last->status().ok());
  });
  std::thread peer([&] {
    for (std::shared_ptr<Work> work = Start(1);; work = Start(1)) {
      if (!job_->engine(1).Wait(*work, -1) || !work->status().ok()) return;
    }
  });
  ASSERT_TRUE(Eventually([&] { return plane_->stuck(); }));
  EXPECT_FALSE(job_->engine(0).Stop(kStopNs));
  UseTensorAgain();
  job_->engine(1).Stop();
  peer.join();
  plane_->Open();
  user.join();
  EXPECT_THAT(last->status().message(), ::testing::HasSubstr("stuck inside a library call"));
  ExpectUntouched();
}

TEST_F(StuckLibrary, JoinEndsByTheShutdownTimeoutAndTheLateCallTouchesNothing) {
  EngineOptions options;
  options.shutdown_timeout_ns = kStopNs;
  Begin([](Where where) { return where == Where::kStep; }, options);
  const std::shared_ptr<Work> work = Start(0);
  (void)Start(1);
  ASSERT_TRUE(Eventually([&] { return plane_->stuck(); }));
  const std::shared_ptr<Work> joined = job_->engine(0).Join().value();
  EXPECT_TRUE(joined->SleepUntilDoneFor(kPatienceNs));
  EXPECT_THAT(joined->status().message(), ::testing::HasSubstr("inside one library call"));
  EXPECT_TRUE(Eventually([&] { return work->done(); }));
  UseTensorAgain();
  plane_->Open();
  EXPECT_TRUE(job_->engine(0).Stop());
  job_->engine(1).Stop();
  ExpectUntouched();
}

TEST_F(StuckLibrary, ACallThatReturnsInTimeChangesNothing) {
  Begin([](Where where) { return where == Where::kStep; });
  std::fill(tensors_[0].begin(), tensors_[0].end(), 3.0f);
  const std::shared_ptr<Work> works[] = {Start(0), Start(1)};
  ASSERT_TRUE(Eventually([&] { return plane_->stuck(); }));
  plane_->Open();
  for (const std::shared_ptr<Work>& work : works) {
    ASSERT_TRUE(work->SleepUntilDoneFor(kPatienceNs));
    EXPECT_TRUE(work->status().ok()) << work->status().message();
  }
  EXPECT_EQ(tensors_[1], std::vector<float>(kCount, 3.0f));
}

}  // namespace
}  // namespace farandole
