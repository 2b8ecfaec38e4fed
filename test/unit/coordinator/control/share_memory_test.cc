#include "coordinator/control/share_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <thread>
#include <vector>

#include "coordinator/control/in_process.h"
#include "core/clock.h"

namespace farandole {
namespace {

/// What every rank comes to, each on a thread. `bells` outlives it. @param watched  By rank: whom
/// it is told to watch.
std::vector<HostGroup> ShareOnAll(const std::vector<int>& host, std::vector<FutexDoorbell>& bells,
                                  std::vector<std::vector<int>>* watched = nullptr) {
  const auto size = static_cast<int>(host.size());
  InProcessHub hub(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) transports.push_back(hub.Create(rank, nullptr));
  std::vector<HostGroup> shared(host.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < host.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const auto watch = [&](int peer, pid_t) {
        if (watched != nullptr) (*watched)[rank].push_back(peer);
      };
      shared[rank] =
          ShareMemory(*transports[rank], host, bells[rank], watch, 60 * kNsPerSecond).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return shared;
}

TEST(ShareMemory, GivesTheRanksOfAHostOneMemory) {
  std::vector<FutexDoorbell> bells(6);
  const std::vector<HostGroup> shared = ShareOnAll({0, 1, 0, 2, 1, 0}, bells);
  for (const HostGroup& one : shared) {
    EXPECT_EQ(one.group, (std::vector<int>{0, 1, 0, -1, 1, 0}));
    EXPECT_EQ(one.failure, "");
  }
  EXPECT_EQ(shared[3].memory, nullptr);
  const std::vector<int> pair = {0, 5};
  const auto mine = shared[0].memory->Join(1, pair, 0).value();
  const auto theirs = shared[5].memory->Join(1, pair, 1).value();
  *mine = std::byte{7};
  EXPECT_EQ(*theirs, std::byte{7});
  const uint32_t ticket = bells[5].Ticket();
  shared[0].memory->bell(5)->Ring();
  EXPECT_NE(bells[5].Ticket(), ticket);
}

TEST(ShareMemory, HasTheLowestRankOfAHostWatchTheOthersAndTheseTheLowest) {
  std::vector<FutexDoorbell> bells(4);
  std::vector<std::vector<int>> watched(4);
  const std::vector<HostGroup> shared = ShareOnAll({0, 1, 0, 0}, bells, &watched);
  EXPECT_EQ(watched, (std::vector<std::vector<int>>{{2, 3}, {}, {0}, {0}}));
  EXPECT_GE(shared[0].cores, 1);
}

TEST(ShareMemory, GoesWithoutWhereItCannotBeMade) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::vector<FutexDoorbell> bells(3);
  const std::vector<HostGroup> shared = ShareOnAll({0, 0, 1}, bells);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (const HostGroup& one : shared) {
    EXPECT_EQ(one.group, (std::vector<int>{-1, -1, -1}));
    EXPECT_EQ(one.memory, nullptr);
    EXPECT_EQ(one.failure, "rank 0: the size of files is limited (ulimit -f)");
  }
}

}  // namespace
}  // namespace farandole
