// Operations on a GPU as the engine sees them: a fake device, and a plane that launches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/engine/engine.h"
#include "coordinator/gradients/gradient_round.h"
#include "test/fakes/fake_device.h"
#include "test/planes/launching_plane.h"
#include "test/support/stepped_job.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;

Signature InMemory(int64_t count) {
  Signature signature;
  signature.tensors.push_back({"", DType::kFloat32, {count}});
  return signature;
}

Signature OnGpu(int64_t count) {
  Signature signature = InMemory(count);
  signature.device = DeviceKind::kCuda;
  return signature;
}

/// Notes which batches are followed by another one of their decision.
class NotingPlane final : public DataPlane {
 public:
  NotingPlane(std::unique_ptr<DataPlane> inner, std::vector<bool>& followed)
      : inner_(std::move(inner)), followed_(followed) {}
  const char* name() const override { return inner_->name(); }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return inner_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { inner_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override {
    followed_.push_back(batch.is_followed);
    return inner_->Start(batch);
  }

 private:
  const std::unique_ptr<DataPlane> inner_;
  std::vector<bool>& followed_;
};

/// Ranks on one fake GPU; batches end in `lane`, users work in `user`.
class EngineOnGpu : public ::testing::Test {
 protected:
  void Open(int size, EngineOptions options = SteppedJob::Stepped()) {
    for (int r = 0; r < size; ++r) {
      gpus_.push_back(std::make_unique<RankDevice>(
          [this]() -> Result<std::shared_ptr<DeviceRuntime>> {
            return std::shared_ptr<DeviceRuntime>(runtime_);
          },
          r));
    }
    const auto wrap = [this](int, std::unique_ptr<DataPlane> plane) -> std::unique_ptr<DataPlane> {
      return std::make_unique<LaunchingPlane>(
          std::make_unique<NotingPlane>(std::move(plane), followed_), runtime_->fake(0),
          lane_->handle());
    };
    job_ = std::make_unique<SteppedJob>(
        size, options, wrap, [this](int r) { return gpus_[static_cast<size_t>(r)].get(); });
  }

  Result<std::shared_ptr<Work>> Start(int rank, const std::string& name, std::vector<float>& data,
                                      const ProducerStream& stream) {
    Operation& operation =
        *job_->engine(rank)
             .operations()
             .Prepare({0, OpKind::kAllreduce, name}, OnGpu(static_cast<int64_t>(data.size())))
             .value();
    const void* in = data.data();
    void* out = data.data();
    return job_->engine(rank).Start(operation, {&in, 1}, {&out, 1}, {}, true, {&stream, 1});
  }

  /// Rank 0's `data_`, until it is launched.
  std::shared_ptr<Work> Launch() {
    const Result<std::shared_ptr<Work>> work = Start(0, "t", data_, here_);
    EXPECT_TRUE(work.ok()) << work.status().message();
    SettleUntil([&] { return work.value()->done(); });
    return work.value();
  }

  /// Rank 0's, of one tensor of four floats.
  GradientRound OneGradient() {
    GradientRound::Options options;
    options.common.device = DeviceKind::kCuda;
    options.prefix = "grad ";
    return GradientRound(job_->engine(0), options, {{"a", DType::kFloat32, {4}}});
  }

  // What a stream does, it does on a thread of its own.
  void SettleUntil(const std::function<bool()>& reached) {
    for (int i = 0; i < 1'000'000 && !reached(); ++i) {
      job_->SettleHeld();
      std::this_thread::yield();
    }
    ASSERT_TRUE(reached());
  }

  std::shared_ptr<FakeDeviceRuntime> runtime_ = std::make_shared<FakeDeviceRuntime>(2);
  FakeStream* user_ = runtime_->fake(0).NewStream();
  FakeStream* lane_ = runtime_->fake(0).NewStream();
  ProducerStream here_{0, user_->handle()};
  std::vector<float> data_ = std::vector<float>(4, 1.0f);
  std::vector<bool> followed_;  // batch by batch
  std::vector<std::unique_ptr<RankDevice>> gpus_;
  std::unique_ptr<SteppedJob> job_;
};

TEST_F(EngineOnGpu, IsDoneWhenLaunchedAndOverWhenItsEndHasPassed) {
  Open(2);
  std::vector<std::vector<float>> data(2, std::vector<float>(8, 1.0f));
  lane_->Hold();
  auto first = Start(0, "t", data[0], here_);
  auto second = Start(1, "t", data[1], here_);
  ASSERT_TRUE(first.ok() && second.ok());
  SettleUntil([&] { return first.value()->done() && second.value()->done(); });
  EXPECT_TRUE(first.value()->status().ok());
  ASSERT_NE(first.value()->end(), nullptr);
  EXPECT_FALSE(first.value()->end()->IsComplete().value());
  lane_->Release();
  SettleUntil([&] { return first.value()->end()->IsComplete().value(); });
  EXPECT_EQ(data[0], std::vector<float>(8, 2.0f));
}

TEST_F(EngineOnGpu, TheHostRunsAheadOfTheGpuByMoreBatchesThanTheWindow) {
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.window = 1;
  Open(1, options);
  std::vector<std::vector<float>> data(20, std::vector<float>(4, 1.0f));
  std::vector<std::shared_ptr<Work>> works;
  lane_->Hold();
  for (size_t i = 0; i < data.size(); ++i) {
    works.push_back(Start(0, "t" + std::to_string(i), data[i], here_).value());
    for (int k = 0; k < 100'000 && !works.back()->done(); ++k) {
      job_->SettleHeld();
      std::this_thread::yield();
    }
    EXPECT_TRUE(works.back()->done()) << i << " batches are launched";
    if (!works.back()->done()) break;
  }
  EXPECT_FALSE(works.front()->end()->IsComplete().value());
  lane_->Release();
  SettleUntil([&] { return works.back()->done(); });
}

TEST_F(EngineOnGpu, ButNotByMoreBytesThanTheGpuMayHaveBefore) {
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.window = 1;
  options.launched_bytes = 40;
  Open(1, options);
  std::vector<std::vector<float>> data(4, std::vector<float>(4, 1.0f));  // of 16 bytes
  std::vector<std::shared_ptr<Work>> works;
  lane_->Hold();
  for (size_t i = 0; i < data.size(); ++i) {
    works.push_back(Start(0, "t" + std::to_string(i), data[i], here_).value());
    if (i < 3) SettleUntil([&] { return works[i]->done(); });
  }
  user_->Synchronize();
  for (int i = 0; i < 1000; ++i) job_->SettleHeld();
  EXPECT_FALSE(works[3]->done()) << "two batches fit, and the window has room for one";
  lane_->Release();
  SettleUntil([&] { return works[3]->done(); });
}

TEST_F(EngineOnGpu, MayStartAgainOnceLaunched) {
  Open(1);
  lane_->Hold();
  auto first = Start(0, "t", data_, here_);
  EXPECT_THAT(std::string(Start(0, "t", data_, here_).status().message()),
              HasSubstr("already in flight"));
  SettleUntil([&] { return first.value()->done(); });
  EXPECT_TRUE(Start(0, "t", data_, here_).ok());
  lane_->Release();
}

TEST_F(EngineOnGpu, IsNotEndedByItsLastStart) {
  Open(1);
  lane_->Hold();
  const std::shared_ptr<Work> first = Launch();
  user_->Hold();
  auto second = Start(0, "t", data_, here_);
  job_->SettleHeld();
  lane_->Release();
  SettleUntil([&] { return first->end()->IsComplete().value(); });
  job_->SettleHeld();
  EXPECT_FALSE(second.value()->done());
  user_->Release();
  SettleUntil([&] { return second.value()->done(); });
}

TEST_F(EngineOnGpu, WaitsForALateProducerBeyondTheDeadline) {
  EngineOptions options = SteppedJob::Stepped();
  options.cuda_progress_timeout_ns = kNsPerSecond;
  Open(1, options);
  user_->Hold();
  auto work = Start(0, "t", data_, here_);
  for (int i = 0; i < 10; ++i) {
    job_->clock().Advance(kNsPerSecond);
    job_->Settle();
  }
  EXPECT_FALSE(work.value()->done());
  user_->Release();
  SettleUntil([&] { return work.value()->done(); });
  EXPECT_TRUE(work.value()->status().ok()) << work.value()->status().message();
}

TEST_F(EngineOnGpu, IsNotKeptFromItsDeadlineByBatchesInHostMemory) {
  EngineOptions options = SteppedJob::Stepped();
  options.cuda_progress_timeout_ns = kNsPerSecond;
  Open(1, options);
  lane_->Hold();
  const std::shared_ptr<Work> work = Launch();
  Operation& on_host =
      *job_->engine(0).operations().Prepare({0, OpKind::kAllreduce, "h"}, InMemory(4)).value();
  std::vector<float> values(4, 1.0f);
  const void* in = values.data();
  void* out = values.data();
  for (int i = 0; i < 10 && job_->engine(0).lifecycle().final_error().ok(); ++i) {
    auto beside = job_->engine(0).Start(on_host, {&in, 1}, {&out, 1}, {}, true, {});
    job_->clock().Advance(kNsPerSecond / 2);
    job_->SettleHeld();
    EXPECT_TRUE(!beside.ok() || beside.value()->done());
  }
  EXPECT_EQ(job_->engine(0).lifecycle().final_error().code(), Code::kTimeout);
  lane_->Release();
}

TEST_F(EngineOnGpu, MakesAStreamWaitForTheEnd) {
  Open(1);
  lane_->Hold();
  const std::shared_ptr<Work> work = Launch();
  FakeStream* later = runtime_->fake(0).NewStream();
  ASSERT_TRUE(job_->engine(0).MakeWait(work->end(), {0, later->handle()}).ok());
  later->Enqueue("a read", [] {});
  EXPECT_FALSE(later->Idle());
  lane_->Release();
  later->Synchronize();
  EXPECT_TRUE(work->end()->IsComplete().value());
}

TEST_F(EngineOnGpu, RefusesStreamsOfOtherKindsByNameAndGoesOn) {
  Open(1);
  Engine& engine = job_->engine(0);
  const ProducerStream elsewhere{1, runtime_->fake(1).NewStream()->handle()};
  const auto start = [&](const char* name, std::vector<ProducerStream> streams,
                         const Signature& signature) {
    Operation& operation =
        *engine.operations().Prepare({0, OpKind::kAllreduce, name}, signature).value();
    const void* in = data_.data();
    void* out = data_.data();
    return engine.Start(operation, {&in, 1}, {&out, 1}, {}, true, streams).status();
  };
  const auto expect = [](const Status& refused, const char* text) {
    EXPECT_EQ(refused.code(), Code::kInvalidArgument);
    EXPECT_THAT(refused.message(), HasSubstr(text));
  };
  user_->BeginCapture();
  expect(start("t", {here_}, OnGpu(4)), "\"t\": its stream is being captured");
  (void)user_->EndCapture();
  const std::shared_ptr<Work> work = Launch();
  expect(start("t", {elsewhere}, OnGpu(4)),
         "\"t\": a tensor is on CUDA device 1, but this rank works on device 0; a rank has one "
         "GPU, so start one process per GPU");
  expect(start("t", {here_, elsewhere}, OnGpu(4)),
         "\"t\": a tensor is on CUDA device 1, but this rank works on device 0");
  expect(start("g", {}, OnGpu(4)), "need the stream");
  expect(start("c", {here_}, InMemory(4)), "tensors on the CPU");
  user_->BeginCapture();
  expect(engine.MakeWait(work->end(), here_), "the stream that is to wait is being captured");
  (void)user_->EndCapture();
  expect(engine.MakeWait(work->end(), {1, nullptr}), "on CUDA device 0; expected a stream of it");
  for (int i = 0; i < 5; ++i) (void)Launch();
  EXPECT_EQ(runtime_->fake(0).counts().of(FakeCall::kOpen), 1) << "asked for its device once";
}

TEST_F(EngineOnGpu, FusesUpToTheThresholdOfItsOwn) {
  EngineOptions options = SteppedJob::Stepped();
  options.negotiation.cuda_fusion_threshold_bytes = 32;
  Open(1, options);
  Signature group = OnGpu(4);
  for (int i = 0; i < 3; ++i) group.tensors.push_back(group.tensors.front());
  std::vector<std::vector<float>> data(4, std::vector<float>(4, 1.0f));
  std::vector<const void*> in;
  std::vector<void*> out;
  for (std::vector<float>& one : data) {
    in.push_back(one.data());
    out.push_back(one.data());
  }
  Operation& operation =
      *job_->engine(0).operations().Prepare({0, OpKind::kAllreduce, "g"}, group).value();
  auto work = job_->engine(0).Start(operation, in, out, {}, true, {&here_, 1});
  SettleUntil([&] { return work.value()->done(); });
  EXPECT_EQ(job_->counters(0).Get(Counter::kBatches), 2);
  EXPECT_EQ(followed_, (std::vector<bool>{true, false}));
}

TEST_F(EngineOnGpu, OrdersAStreamAfterARoundOfGradients) {
  Open(1);
  GradientRound gradients = OneGradient();
  lane_->Hold();
  ASSERT_TRUE(gradients.Mark(0, data_.data(), data_.data(), GradientVote::kPresent, &here_).ok());
  ASSERT_TRUE(gradients.End({}).ok());
  Status outcome = Internal("not told");
  SettleUntil([&] { return !gradients.InFlight(); });
  ASSERT_TRUE(gradients.Wait(0, &outcome));
  EXPECT_TRUE(outcome.ok()) << outcome.message();
  EXPECT_EQ(gradients.rounds(), 1);
  EXPECT_EQ(gradients.CompletedRounds().value(), 0);
  user_->Synchronize();
  ASSERT_TRUE(gradients.MakeWait(here_).ok());
  user_->Enqueue("the optimizer's step", [] {});
  EXPECT_FALSE(user_->Idle());
  lane_->Release();
  user_->Synchronize();
  EXPECT_EQ(gradients.CompletedRounds().value(), 1);
}

TEST_F(EngineOnGpu, KnowsWhichRoundsAreOverThoughALaterOneRanNothing) {
  Open(1);
  GradientRound gradients = OneGradient();
  lane_->Hold();
  for (GradientVote vote : {GradientVote::kPresent, GradientVote::kAbsent}) {
    ASSERT_TRUE(gradients.Mark(0, data_.data(), data_.data(), vote, &here_).ok());
    ASSERT_TRUE(gradients.End({}).ok());
    SettleUntil([&] { return !gradients.InFlight(); });
    Status outcome;
    ASSERT_TRUE(gradients.Wait(0, &outcome));
  }
  EXPECT_EQ(gradients.rounds(), 2);
  EXPECT_EQ(gradients.CompletedRounds().value(), 0);
  lane_->Release();
  lane_->Synchronize();
  EXPECT_EQ(gradients.CompletedRounds().value(), 2);
}

TEST_F(EngineOnGpu, IsShutDownOnceWhatIsLaunchedIsOver) {
  Open(1);
  lane_->Hold();
  const std::shared_ptr<Work> work = Launch();
  std::shared_ptr<Work> left = job_->engine(0).Leave();
  for (int i = 0; i < 100; ++i) job_->SettleHeld();
  EXPECT_FALSE(left->done());
  lane_->Release();
  SettleUntil([&] { return left->done(); });
  EXPECT_TRUE(left->status().ok());
}

TEST_F(EngineOnGpu, NeedsNoStreamToFailARound) {
  Open(1);
  GradientRound gradients = OneGradient();
  ASSERT_TRUE(gradients.End("the backward raised").ok());
  Status outcome;
  SettleUntil([&] { return !gradients.InFlight(); });
  ASSERT_TRUE(gradients.Wait(0, &outcome));
  EXPECT_THAT(outcome.message(), HasSubstr("the backward raised"));
}

TEST(EngineWithoutGpu, SaysSo) {
  SteppedJob job(1);
  std::vector<float> data(4, 1.0f);
  const void* in = data.data();
  void* out = data.data();
  const ProducerStream stream{0, nullptr};
  Operation& operation =
      *job.engine(0).operations().Prepare({0, OpKind::kAllreduce, "t"}, OnGpu(4)).value();
  const Status refused =
      job.engine(0).Start(operation, {&in, 1}, {&out, 1}, {}, true, {&stream, 1}).status();
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_THAT(refused.message(), HasSubstr("\"t\": this context has no GPUs"));
}

}  // namespace
}  // namespace farandole
