// What becomes of batches that are launched when a rank gives up: nobody hangs, and no step of the
// optimizer applies what an aborted collective leaves. Over a libnccl that behaves as NCCL's
// sources say, and is a fake.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "ops/shm/plane.h"
#include "test/fakes/driver.h"
#include "test/fakes/nccl/open.h"
#include "test/planes/cuda_on_fake.h"

namespace farandole {
namespace {

using Ready = std::shared_ptr<DeviceEvent>;
using State = Progress::State;

/// Runs `body` on a thread of its own; a test whose body hangs ends the program.
void MustEnd(const char* what, const std::function<void()>& body) {
  std::atomic<bool> ended{false};
  std::thread thread([&] {
    body();
    ended = true;
  });
  for (int i = 0; i < 2000 && !ended; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!ended) {
    std::fprintf(stderr, "%s does not end\n", what);
    std::_Exit(1);
  }
  thread.join();
}

/// Two ranks in one thread, each with a fake GPU; process sets 7 and 8 of both are connected.
class GpuFailures : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;

  struct Given {
    std::vector<std::vector<float>> data;
    std::vector<Segment> segments;
    Batch batch;
    PlaneOperation* operation = nullptr;
    Progress last;
  };

  GpuFailures() {
    control().reset();
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<HeapMemory>(bells);
    for (int rank = 0; rank < kRanks; ++rank) {
      CudaOnFake::Options options;
      options.bus_id = "0000:1" + std::to_string(rank) + ":00.0";
      options.nccl = nullptr;
      options.nccl_library = FARANDOLE_FAKE_NCCL;
      planes_.push_back(std::make_unique<CudaOnFake>(
          std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()), std::move(options)));
      for (const uint32_t set : {7u, 8u}) {
        EXPECT_TRUE(plane(rank).AddSet(set, ranks_, rank).ok());
      }
    }
    for (const uint32_t set : {7u, 8u}) {
      for (int rank = 0; rank < kRanks; ++rank) Start(rank, set, {4});
    }
    StepUntil([this] { return AllAre(State::kDone); });
    given_.clear();
  }
  ~GpuFailures() override {
    for (int rank = 0; rank < kRanks; ++rank) plane(rank).device().ReleaseStreams();
    MustEnd("the end of the planes", [this] { EndTogether(planes_); });
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    control().reset();
  }

  CudaOnFake& plane(int rank) { return *planes_[static_cast<size_t>(rank)]; }
  static const FakeNcclControl& control() {
    static const FakeNccl library(FARANDOLE_FAKE_NCCL);
    return library.control();
  }

  /// A sum of float tensors of value rank + 1, in place.
  Given& Start(int rank, uint32_t set, const std::vector<int64_t>& counts,
               std::span<const Ready> ready = {}) {
    Given& given = *given_.emplace_back(std::make_unique<Given>());
    for (const int64_t count : counts) {
      given.data.emplace_back(static_cast<size_t>(count), static_cast<float>(rank + 1));
      given.batch.count += count;
    }
    for (auto& one : given.data) {
      given.segments.push_back({one.data(), one.data(), static_cast<int64_t>(one.size())});
    }
    given.batch.number = ++number_;
    given.batch.set = set;
    given.batch.ranks = ranks_;
    given.batch.my_index = rank;
    given.batch.segments = given.segments;
    given.batch.device = DeviceKind::kCuda;
    given.batch.ready = ready;
    given.operation = plane(rank).Start(given.batch).value();
    return given;
  }
  void StepUntil(const std::function<bool()>& reached) {
    for (int round = 0; round < 1'000'000 && !reached(); ++round) {
      for (const auto& given : given_) StepOne(*given);
      std::this_thread::yield();
    }
    ASSERT_TRUE(reached());
  }
  static void StepOne(Given& given) {
    if (given.operation == nullptr) return;
    const Progress progress = given.operation->Step();
    if (progress.state == State::kWaiting || progress.state == State::kMoved) return;
    given.last = progress;
    if (progress.state != State::kLaunched) given.operation = nullptr;
  }
  bool AllAre(State state) const {
    for (const auto& given : given_) {
      if (given->last.state != state) return false;
    }
    return true;
  }
  /// All that rank 0's streams hold runs.
  void Synchronize() {
    MustEnd("what the streams hold", [this] { plane(0).Synchronize(); });
  }
  void Abandon(Given& given) {
    MustEnd("Abandon", [&] { given.operation->Abandon(); });
    given.operation = nullptr;
  }

  const std::vector<int> ranks_ = {0, 1};
  int64_t number_ = 0;
  FutexDoorbell bells_[kRanks];
  std::vector<std::unique_ptr<CudaOnFake>> planes_;
  std::vector<std::unique_ptr<Given>> given_;
};

/// Which of two sets is aborted first is not said: both orders of their kernels must do.
class TwoSetsInFlight : public GpuFailures, public ::testing::WithParamInterface<bool> {};

TEST_P(TwoSetsInFlight, EndWhenOneOfThemIsAbandoned) {
  const uint32_t first = GetParam() ? 7 : 8;
  Given& one = Start(0, first, {4, 4});
  Given& other = Start(0, 15 - first, {4, 4});  // rank 1 starts neither
  StepUntil([&] { return AllAre(State::kLaunched); });
  Abandon(one);
  StepUntil([&] { return other.last.state == State::kFailed; });
  Synchronize();
}

INSTANTIATE_TEST_SUITE_P(Orders, TwoSetsInFlight, ::testing::Values(true, false));

TEST_F(GpuFailures, ABatchIsAbandonedAtOnceAlsoWhileItsProducerIsLate) {
  FakeStream* const producer = plane(0).device().NewStream();
  const std::shared_ptr<DeviceEvent> written = plane(0).device().CreateEvent().value();
  producer->Hold();
  producer->Enqueue("a late write", [] {});
  ASSERT_TRUE(written->Record(producer->handle()).ok());
  const Ready late[] = {written};
  Given& given = Start(0, 7, {4}, late);
  StepUntil([&] { return given.last.state == State::kLaunched; });
  Abandon(given);
  producer->Release();
  Synchronize();
}

TEST_F(GpuFailures, ResultsOfAnAbortedBatchAreNaN) {
  Given& fused = Start(0, 7, {4, 4});
  StepUntil([&] { return fused.last.state == State::kLaunched; });
  Abandon(fused);
  Synchronize();
  for (const std::vector<float>& one : fused.data) {
    for (const float value : one) EXPECT_TRUE(std::isnan(value)) << value;
  }
}

TEST_F(GpuFailures, ResultsThatNcclWroteItselfAreNaNToo) {
  Given& straight = Start(0, 7, {1000});
  StepUntil([&] { return straight.last.state == State::kLaunched; });
  Abandon(straight);
  Synchronize();
  for (const float value : straight.data[0]) ASSERT_TRUE(std::isnan(value)) << value;
}

TEST_F(GpuFailures, ResultsBeforeTheFailureStay) {
  Given& mine = Start(0, 7, {4, 4});
  Start(1, 7, {4, 4});
  StepUntil([&] { return AllAre(State::kDone); });
  Given& aborted = Start(0, 7, {4, 4});
  StepUntil([&] { return aborted.last.state == State::kLaunched; });
  Abandon(aborted);
  Synchronize();
  for (const std::vector<float>& one : mine.data) EXPECT_THAT(one, ::testing::Each(3.0f));
}

TEST_F(GpuFailures, ASetIsRemovedWithoutWaitingForTheDevice) {
  plane(0).device().NewStream()->Hold();
  plane(0).device().default_stream()->Hold();
  plane(0).device().default_stream()->Enqueue("a long kernel", [] {});
  MustEnd("RemoveSet", [this] {
    const FarandoleFakeDevice* const before = farandole_fake_current_device();
    plane(0).RemoveSet(7);
    EXPECT_EQ(farandole_fake_current_device(), before) << "the caller's device was switched";
  });
}

}  // namespace
}  // namespace farandole
