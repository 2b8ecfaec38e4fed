// A data plane that stops for ever on one process set: its wait ends by the deadline, other sets go
// on until then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/planes/failing_plane.h"
#include "test/planes/stopping_plane.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

constexpr uint32_t kStoppedSet = 1;  // the first set added
constexpr int64_t kDeadlineNs = 5 * kNsPerSecond;

class StoppedPlane : public ::testing::Test {
 protected:
  StoppedPlane()
      : job_(3, Options(), [](int, std::unique_ptr<DataPlane> plane) {
          return std::make_unique<StoppingPlane>(std::move(plane), StoppingPlane::Set(kStoppedSet));
        }) {
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(job_.engine(r).AddSet({0, 1}).ok());
    job_.SettleHeld();
  }

  static EngineOptions Options() {
    EngineOptions options = SteppedJob::Stepped();
    options.progress_timeout_ns = kDeadlineNs;
    options.negotiation.stall_ns = 0;
    return options;
  }

  std::vector<std::shared_ptr<Work>> StartOn(uint32_t set, const std::string& name) {
    std::vector<std::shared_ptr<Work>> works;
    Signature signature;
    signature.tensors.push_back({"", DType::kFloat32, {4}});
    for (int r = 0; r < (set == kGlobalSet ? 3 : 2); ++r) {
      Result<Operation*> operation =
          job_.engine(r).operations().Prepare({set, OpKind::kAllreduce, name}, signature);
      EXPECT_TRUE(operation.ok()) << operation.status().message();
      const void* in = values_[r];
      void* out = values_[r];
      works.push_back(job_.engine(r).Start(*operation.value(), {&in, 1}, {&out, 1}).value());
    }
    job_.SettleHeld();
    return works;
  }

  // The engines step as often as they ask to.
  void Live(int64_t ns) {
    for (int64_t lived = 0; lived < ns; lived += kNsPerSecond / 2) {
      job_.clock().Advance(kNsPerSecond / 2);
      job_.Settle();
    }
  }

  float values_[3][4] = {};
  SteppedJob job_;
};

TEST_F(StoppedPlane, EndsItsWorkByTheDeadlineWhileOtherSetsGoOn) {
  const std::vector<std::shared_ptr<Work>> stopped = StartOn(kStoppedSet, "stopped");
  for (int64_t waited_ns = 0; waited_ns + kNsPerSecond < kDeadlineNs; waited_ns += kNsPerSecond) {
    job_.clock().Advance(kNsPerSecond);
    for (const std::shared_ptr<Work>& work : StartOn(kGlobalSet, "other")) {
      EXPECT_TRUE(work->done() && work->status().ok()) << work->status().message();
    }
    EXPECT_FALSE(stopped[0]->done());
  }
  Live(2 * kNsPerSecond);  // now past the deadline, by less than a second
  for (const std::shared_ptr<Work>& work : stopped) {
    ASSERT_TRUE(work->done());
    EXPECT_EQ(work->status().code(), Code::kTimeout);
    EXPECT_THAT(work->status().message(), ::testing::HasSubstr("stopped"));
  }
}

// SIGSTOP and SIGCONT of all ranks, or a laptop's sleep.
TEST_F(StoppedPlane, CountsOnlyTimeThatTheProcessHasLivedThrough) {
  const std::vector<std::shared_ptr<Work>> stopped = StartOn(kStoppedSet, "stopped");
  for (int suspended = 0; suspended < 3; ++suspended) {
    job_.clock().Advance(1000 * kDeadlineNs);
    job_.Settle();
    EXPECT_FALSE(stopped[0]->done()) << stopped[0]->status().message();
  }
  Live(kDeadlineNs);
  EXPECT_TRUE(stopped[0]->done());
}

TEST_F(StoppedPlane, GivesTheFirstErrorToLaterWork) {
  const std::vector<std::shared_ptr<Work>> stopped = StartOn(kStoppedSet, "stopped");
  Live(kDeadlineNs + kNsPerSecond / 2);
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, {4}});
  Result<Operation*> later =
      job_.engine(0).operations().Prepare({kGlobalSet, OpKind::kAllreduce, "later"}, signature);
  EXPECT_EQ(later.status().code(), Code::kTimeout);
  EXPECT_EQ(later.status().message(), stopped[0]->status().message());
}

// With the engine's own threads on real time: the sleep must end by itself.
TEST(StoppedPlaneInRealTime, EndsItsWorkByTheDeadlineWhetherSomebodyWaitsOrNot) {
  EngineOptions options;
  options.threads = true;
  options.progress_timeout_ns = kNsPerSecond / 2;
  options.negotiation.stall_ns = 0;
  SteppedJob job(2, options, [](int, std::unique_ptr<DataPlane> plane) {
    return std::make_unique<StoppingPlane>(std::move(plane), StoppingPlane::Set(kGlobalSet));
  });
  float values[2][4] = {};
  std::vector<std::shared_ptr<Work>> works;
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, {4}});
  for (int r = 0; r < 2; ++r) {
    Operation& operation = *job.engine(r)
                                .operations()
                                .Prepare({kGlobalSet, OpKind::kAllreduce, "stopped"}, signature)
                                .value();
    const void* in = values[r];
    void* out = values[r];
    works.push_back(job.engine(r).Start(operation, {&in, 1}, {&out, 1}).value());
  }
  const int64_t began_ns = SteadyClock().NowNs();
  EXPECT_TRUE(job.engine(0).Wait(*works[0], 30 * kNsPerSecond));
  const auto late = [&] { return SteadyClock().NowNs() - began_ns > 30 * kNsPerSecond; };
  while (!works[1]->done() && !late()) works[1]->SleepUntilDone(kNsPerMs);  // rank 1: nobody waits
  EXPECT_LT(SteadyClock().NowNs() - began_ns, options.progress_timeout_ns + kNsPerSecond);
  for (const std::shared_ptr<Work>& work : works) {
    ASSERT_TRUE(work->done());
    EXPECT_EQ(work->status().code(), Code::kTimeout) << work->status().message();
  }
}

// A plane over GPUs takes a while to give up users' memory. Meanwhile the watchdog looks several
// times.
TEST(StoppedPlaneInRealTime, EndsNoWorkBeforeThePlaneHasGivenItUp) {
  constexpr int64_t kStopped = 4;  // elements of the batch that stops, and of the one that fails
  constexpr int64_t kFailed = 8;
  std::shared_ptr<Work> work;  // on rank 1, of what stops
  std::atomic<bool> is_stopped{false};
  std::atomic<bool> was_done{false};
  const auto stops = [&](const Batch& batch) { return batch.count == kStopped; };
  EngineOptions options;
  options.threads = true;
  options.progress_timeout_ns = 30 * kNsPerSecond;
  SteppedJob job(2, options, [&](int rank, std::unique_ptr<DataPlane> plane) {
    if (rank == 0) {
      plane = std::make_unique<StoppingPlane>(std::move(plane), stops);
      return std::unique_ptr<DataPlane>(std::make_unique<FailingPlane>(
          std::move(plane), FailingPlane::Options{.fails = [](const Batch& batch) {
            return batch.count == kFailed;
          }}));
    }
    const auto notes = [&](const Batch& batch) {
      if (stops(batch)) is_stopped = true;
      return stops(batch);
    };
    return std::unique_ptr<DataPlane>(std::make_unique<StoppingPlane>(std::move(plane), notes, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      was_done = work->done();
    }));
  });
  float values[2][kFailed] = {};
  const auto start = [&](int rank, int64_t count) {
    Signature signature;
    signature.tensors.push_back({"", DType::kFloat32, {count}});
    const std::string name = std::to_string(count);
    const void* in = values[rank];
    void* out = values[rank];
    return job.engine(rank)
        .Start(*job.engine(rank)
                    .operations()
                    .Prepare({kGlobalSet, OpKind::kAllreduce, name}, signature)
                    .value(),
               {&in, 1}, {&out, 1})
        .value();
  };
  const std::shared_ptr<Work> other = start(0, kStopped);
  work = start(1, kStopped);
  while (!is_stopped) std::this_thread::yield();
  start(0, kFailed);
  start(1, kFailed);
  EXPECT_TRUE(job.engine(1).Wait(*work, 30 * kNsPerSecond));
  EXPECT_FALSE(was_done);
  EXPECT_EQ(work->status().code(), Code::kResourceExhausted) << work->status().message();
}

}  // namespace
}  // namespace farandole
