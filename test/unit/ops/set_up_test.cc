#include "ops/cuda/set_up.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "ops/shm/plane.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;
using State = Progress::State;

class StubNccl final : public NcclSource {
 public:
  Result<NcclFound> Find() override { return NcclFound{23203, "/x/libnccl.so.2"}; }
  void AllowSharedGpus() override {
    ++allowed;
    EXPECT_EQ(ids, 0) << "too late: NCCL has read its environment";
  }
  Result<std::string> MakeUniqueId() override {
    ++ids;
    if (!failure.ok()) return failure;
    return std::string("id\0of 128 bytes", 15);
  }
  std::unique_ptr<CudaWay> MakeWay(NcclWayOptions) override { return nullptr; }

  Status failure;
  int allowed = 0;
  int ids = 0;
};

/// Three ranks in one thread; the set is {0, 1, 2} unless a test says otherwise.
class WaySetUpTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  WaySetUpTest() {
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<SharedMemoryHub>(bells);
    for (int rank = 0; rank < kRanks; ++rank) {
      planes_.push_back(std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()));
      hosts_.push_back(HostSet::Create(*planes_.back(), 7, ranks_, rank).value());
      RankCard& card = cards_[rank];
      card.rank = rank;
      card.host = "a";
      card.bus_id = std::to_string(rank);
      card.nccl_version = 23203;
      card.nccl = "/x/libnccl.so.2";
    }
  }

  /// Steps all ranks in turn until each is done or failed.
  void Run() {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      set_ups_.push_back(std::make_unique<WaySetUp>(hosts_[at].get(), cards_[rank], nccl_[rank]));
    }
    int ended = 0;
    for (int round = 0; round < 1000 && ended < kRanks; ++round) {
      for (int rank = 0; rank < kRanks; ++rank) {
        Progress& last = last_[rank];
        if (last.state == State::kDone || last.state == State::kFailed) continue;
        last = set_ups_[static_cast<size_t>(rank)]->Step();
        if (last.state == State::kDone || last.state == State::kFailed) ++ended;
      }
    }
    ASSERT_EQ(ended, kRanks) << "no progress";
  }

  const std::vector<int> ranks_ = {0, 1, 2};
  FutexDoorbell bells_[kRanks];
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes_;
  std::vector<std::unique_ptr<HostSet>> hosts_;
  RankCard cards_[kRanks];
  StubNccl nccl_[kRanks];
  std::vector<std::unique_ptr<WaySetUp>> set_ups_;
  Progress last_[kRanks];
};

TEST_F(WaySetUpTest, GivesEveryMemberAllCardsTheSameChoiceAndTheIdOfTheFirst) {
  Run();
  for (int rank = 0; rank < kRanks; ++rank) {
    const WaySetUp& set_up = *set_ups_[static_cast<size_t>(rank)];
    EXPECT_EQ(last_[rank].state, State::kDone);
    EXPECT_EQ(set_up.choice().way, WayChoice::Way::kNccl);
    EXPECT_EQ(DescribeRanks(set_up.cards()),
              "rank 0: host a, GPU 0; rank 1: host a, GPU 1; rank 2: host a, GPU 2");
    EXPECT_EQ(set_up.unique_id(), std::string("id\0of 128 bytes", 15));
    EXPECT_EQ(nccl_[rank].ids, rank == 0 ? 1 : 0);
    EXPECT_EQ(nccl_[rank].allowed, 0);
  }
}

TEST_F(WaySetUpTest, MakesNoIdForStaging) {
  cards_[2].nccl_version = 0;
  Run();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(set_ups_[static_cast<size_t>(rank)]->choice().way, WayChoice::Way::kStaged);
    EXPECT_EQ(nccl_[rank].ids, 0);
  }
}

TEST_F(WaySetUpTest, LetsNcclShareGpusOnEveryRankBeforeTheFirstCall) {
  for (RankCard& card : cards_) {
    card.bus_id = "0";
    card.share_gpu = true;
  }
  Run();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(set_ups_[static_cast<size_t>(rank)]->choice().way, WayChoice::Way::kNcclShared);
    EXPECT_EQ(nccl_[rank].allowed, 1);
  }
}

TEST_F(WaySetUpTest, FailsAlikeEverywhereWhereOneRankHasNoGpu) {
  cards_[1].failure = Unavailable("this process sees no CUDA device");
  Run();
  for (const Progress& last : last_) {
    EXPECT_EQ(last.state, State::kFailed);
    EXPECT_EQ(last.status.code(), Code::kUnavailable);
    EXPECT_EQ(last.status.message(),
              "rank 1 (host a) cannot use its GPU: this process sees no CUDA device");
  }
}

TEST_F(WaySetUpTest, FailsAlikeEverywhereWhereNoIdCanBeMade) {
  nccl_[0].failure = Internal("ncclGetUniqueId: no socket interface found");
  Run();
  for (const Progress& last : last_) {
    EXPECT_EQ(last.state, State::kFailed);
    EXPECT_EQ(last.status.code(), Code::kInternal);
    EXPECT_EQ(last.status.message(),
              "rank 0 (host a) could not begin NCCL's set-up: ncclGetUniqueId: no socket interface "
              "found");
  }
}

TEST_F(WaySetUpTest, WaitsByDoorbellForAPeerAndCanBeAbandoned) {
  WaySetUp set_up(hosts_[0].get(), cards_[0], nccl_[0]);
  Progress progress = set_up.Step();
  for (int i = 0; i < 10 && progress.state == State::kMoved; ++i) progress = set_up.Step();
  EXPECT_EQ(progress.state, State::kWaiting);
  EXPECT_EQ(progress.poll_after_ns, kByDoorbell);
  set_up.Abandon();
  progress = WaySetUp(hosts_[0].get(), cards_[0], nccl_[0]).Step();
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_EQ(progress.status.code(), Code::kAborted);
}

TEST_F(WaySetUpTest, ExchangesNothingWithOneMember) {
  WaySetUp set_up(nullptr, cards_[0], nccl_[0]);
  EXPECT_EQ(set_up.Step().state, State::kMoved);
  EXPECT_EQ(set_up.Step().state, State::kDone);
  EXPECT_EQ(set_up.choice().way, WayChoice::Way::kSolo);
}

}  // namespace
}  // namespace farandole
