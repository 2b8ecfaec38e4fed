#include "ops/gpu/backend_selection.h"

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

class StubNccl final : public NcclProvider {
 public:
  Result<NcclFound> Find() override { return NcclFound{23203, "/x/libnccl.so.2"}; }
  Result<std::string> MakeUniqueId() override {
    ++ids;
    if (!failure.ok()) return failure;
    return std::string("id\0of 128 bytes", 15);
  }
  std::unique_ptr<GpuBackend> Make(LaunchQueue&, NcclSetOptions) override { return nullptr; }

  Status failure;
  int ids = 0;
};

/// Three ranks in one thread; the set is {0, 1, 2} unless a test says otherwise.
class BackendSelectionTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 3;

  BackendSelectionTest() {
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<HeapMemory>(bells);
    for (int rank = 0; rank < kRanks; ++rank) {
      planes_.push_back(std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()));
      hosts_.push_back(HostSet::Create(*planes_.back(), 7, ranks_, rank).value());
      PeerCapabilities& peer = peers_[rank];
      peer.rank = rank;
      peer.host = "a";
      peer.bus_id = std::to_string(rank);
      peer.nccl_version = 23203;
      peer.nccl = "/x/libnccl.so.2";
    }
  }

  /// Steps all ranks in turn until each is done or failed.
  void Run() {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      rendezvous_.push_back(
          std::make_unique<BackendSelection>(hosts_[at].get(), peers_[rank], nccl_[rank]));
    }
    int ended = 0;
    for (int round = 0; round < 1000 && ended < kRanks; ++round) {
      for (int rank = 0; rank < kRanks; ++rank) {
        Progress& last = last_[rank];
        if (last.state == State::kDone || last.state == State::kFailed) continue;
        last = rendezvous_[static_cast<size_t>(rank)]->Step();
        if (last.state == State::kDone || last.state == State::kFailed) ++ended;
      }
    }
    ASSERT_EQ(ended, kRanks) << "no progress";
  }

  void ExpectFailures(const std::string& text) const {
    for (const Progress& last : last_) {
      EXPECT_EQ(last.state, State::kFailed);
      EXPECT_EQ(last.status.ToString(), text);
    }
  }

  const std::vector<int> ranks_ = {0, 1, 2};
  FutexDoorbell bells_[kRanks];
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes_;
  std::vector<std::unique_ptr<HostSet>> hosts_;
  PeerCapabilities peers_[kRanks];
  StubNccl nccl_[kRanks];
  std::vector<std::unique_ptr<BackendSelection>> rendezvous_;
  Progress last_[kRanks];
};

TEST_F(BackendSelectionTest, GivesEveryMemberAllPeersTheSameChoiceAndTheIdOfTheFirst) {
  Run();
  for (int rank = 0; rank < kRanks; ++rank) {
    const BackendSelection& rendezvous = *rendezvous_[static_cast<size_t>(rank)];
    EXPECT_EQ(last_[rank].state, State::kDone);
    EXPECT_EQ(rendezvous.choice().kind, BackendChoice::Kind::kNccl);
    EXPECT_EQ(DescribeRanks(rendezvous.peers()),
              "rank 0: host a, GPU 0; rank 1: host a, GPU 1; rank 2: host a, GPU 2");
    EXPECT_EQ(rendezvous.unique_id(), std::string("id\0of 128 bytes", 15));
    EXPECT_EQ(nccl_[rank].ids, rank == 0 ? 1 : 0);
  }
}

TEST_F(BackendSelectionTest, MakesNoIdForStaging) {
  peers_[2].nccl_version = 0;
  Run();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(rendezvous_[static_cast<size_t>(rank)]->choice().kind, BackendChoice::Kind::kStaged);
    EXPECT_EQ(nccl_[rank].ids, 0);
  }
}

TEST_F(BackendSelectionTest, FailsAlikeEverywhereWhereOneRankHasNoGpu) {
  peers_[1].SetFailure(Unavailable("this process sees no CUDA device"));
  Run();
  ExpectFailures(
      "Unavailable: rank 1 (host a) cannot use its GPU: this process sees no CUDA device");
}

TEST_F(BackendSelectionTest, FailsAlikeEverywhereWhereNoIdCanBeMade) {
  nccl_[0].failure = Internal("ncclGetUniqueId: no socket interface found");
  Run();
  ExpectFailures(
      "Internal: rank 0 (host a) could not begin NCCL's set-up: ncclGetUniqueId: no socket "
      "interface found");
}

TEST_F(BackendSelectionTest, WaitsByDoorbellForAPeerAndCanBeAbandoned) {
  BackendSelection rendezvous(hosts_[0].get(), peers_[0], nccl_[0]);
  Progress progress = rendezvous.Step();
  for (int i = 0; i < 10 && progress.state == State::kMoved; ++i) progress = rendezvous.Step();
  EXPECT_EQ(progress.state, State::kWaiting);
  EXPECT_EQ(progress.poll_after_ns, kByDoorbell);
  rendezvous.Abandon();
  progress = BackendSelection(hosts_[0].get(), peers_[0], nccl_[0]).Step();
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_EQ(progress.status.code(), Code::kAborted);
}

TEST_F(BackendSelectionTest, ExchangesNothingWithOneMember) {
  BackendSelection rendezvous(nullptr, peers_[0], nccl_[0]);
  EXPECT_EQ(rendezvous.Step().state, State::kMoved);
  EXPECT_EQ(rendezvous.Step().state, State::kDone);
  EXPECT_EQ(rendezvous.choice().kind, BackendChoice::Kind::kSolo);
}

}  // namespace
}  // namespace farandole
