// Communicators of process sets over a whole libnccl, which is a fake: each from an id of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/shm/plane.h"
#include "test/fakes/nccl/open.h"
#include "test/planes/cuda_on_fake.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;

/// Three ranks with a fake GPU each, in one thread.
class SetsOverNccl : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  SetsOverNccl() {
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
    }
    AddSet(0, {0, 1, 2});
    AddSet(5, {0, 2});
  }
  ~SetsOverNccl() override {
    EndTogether(planes_);
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    control().reset();
  }

  void AddSet(uint32_t set, const std::vector<int>& ranks) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      ASSERT_TRUE(Plane(ranks[i]).AddSet(set, ranks, static_cast<int>(i)).ok());
    }
  }
  CudaOnFake& Plane(int rank) { return *planes_[static_cast<size_t>(rank)]; }

  struct Given {
    float data = 0;
    Segment segment;
    Batch batch;
    PlaneOperation* operation = nullptr;
  };

  /// Starts the sum of rank + 1 over the set's ranks.
  void Start(uint32_t set, const std::vector<int>& ranks) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      Given& given = *given_.emplace_back(std::make_unique<Given>());
      given.data = static_cast<float>(ranks[i] + 1);
      given.segment = {&given.data, &given.data, 1};
      given.batch.number = static_cast<int64_t>(given_.size());
      given.batch.set = set;
      given.batch.ranks = ranks;
      given.batch.my_index = static_cast<int>(i);
      given.batch.segments = {&given.segment, 1};
      given.batch.count = 1;
      given.batch.device = DeviceKind::kCuda;
      given.operation = Plane(ranks[i]).Start(given.batch).value();
    }
  }
  /// Steps all that was started to its end. @return What each has then.
  std::vector<float> Finish() {
    bool all_done = false;
    for (int round = 0; round < 1'000'000 && !all_done; ++round) {
      all_done = true;
      for (const auto& given : given_) all_done = StepOne(*given) && all_done;
      std::this_thread::yield();
    }
    EXPECT_TRUE(all_done);
    std::vector<float> results;
    for (const auto& given : given_) results.push_back(given->data);
    given_.clear();
    return results;
  }
  static bool StepOne(Given& given) {
    if (given.operation == nullptr) return true;
    const Progress progress = given.operation->Step();
    EXPECT_NE(progress.state, Progress::State::kFailed) << progress.status.message();
    const bool over =
        progress.state == Progress::State::kDone || progress.state == Progress::State::kFailed;
    if (over) given.operation = nullptr;
    return over;
  }
  static const FakeNcclControl& control() {
    static const FakeNccl library(FARANDOLE_FAKE_NCCL);
    return library.control();
  }

  const std::vector<int> all_ = {0, 1, 2};
  const std::vector<int> some_ = {0, 2};
  FutexDoorbell bells_[kRanks];
  std::vector<std::unique_ptr<CudaOnFake>> planes_;
  std::vector<std::unique_ptr<Given>> given_;
};

TEST_F(SetsOverNccl, HaveACommunicatorEach) {
  Start(0, all_);
  EXPECT_THAT(Finish(), ElementsAre(6, 6, 6));
  Start(5, some_);
  EXPECT_THAT(Finish(), ElementsAre(4, 4));
  EXPECT_EQ(control().times("ncclGetUniqueId"), 2);
  Start(0, all_);
  Start(5, some_);
  EXPECT_THAT(Finish(), ElementsAre(6, 6, 6, 4, 4));
}

TEST_F(SetsOverNccl, WaitUntilACallThatTakesItsTimeIsComplete) {
  control().set("BUSY_US", "3000");
  Start(0, all_);
  Start(5, some_);
  EXPECT_THAT(Finish(), ElementsAre(6, 6, 6, 4, 4));
}

TEST_F(SetsOverNccl, EndBeforeOrAfterThatOfAllRanks) {
  Start(0, all_);
  Start(5, some_);
  Finish();
  for (int rank : all_) Plane(rank).RemoveSet(0);
  Start(5, some_);
  EXPECT_THAT(Finish(), ElementsAre(4, 4));
}

TEST_F(SetsOverNccl, EndOnOneRankBeforeTheOtherWithoutHoldingUpANewSet) {
  Start(5, some_);
  Finish();
  Plane(0).RemoveSet(5);  // rank 2 still has to do so
  AddSet(6, some_);
  Start(6, some_);
  EXPECT_THAT(Finish(), ElementsAre(4, 4));
}

}  // namespace
}  // namespace farandole
