// What an allreduce of many ranks in a host costs, counted with a thread for each rank: locked
// operations, bytes and wake-ups. Load does not change these, as it changes times.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/doorbell.h"
#include "ops/shm/plane.h"
#include "test/support/forwarded_kernels.h"

namespace farandole {
namespace {

/// Counts how often a peer looks whether it has to ring.
class CountedBell final : public Doorbell {
 public:
  void Ring() override { bell.Ring(); }
  void RingIfAsleep() override {
    looks.fetch_add(1, std::memory_order_relaxed);
    bell.RingIfAsleep();
  }
  FutexDoorbell bell;  // whose ticket counts its rings
  std::atomic<int64_t> looks{0};
};

class CountingKernels final : public ForwardedKernels {
 public:
  void Pack(void* dst, DType wire, const void* src, DType dtype, int64_t count,
            double prescale) const override {
    packed.fetch_add(count * SizeOf(wire), std::memory_order_relaxed);
    ForwardedKernels::Pack(dst, wire, src, dtype, count, prescale);
  }
  void Reduce(void* dst, std::span<const void* const> sources, int64_t count,
              const ReduceSpec& spec) const override {
    const auto inputs = static_cast<int64_t>(sources.size());
    reduced.fetch_add(inputs * count * SizeOf(spec.wire), std::memory_order_relaxed);
    ForwardedKernels::Reduce(dst, sources, count, spec);
  }
  void Unpack(void* dst, DType dtype, const void* src, DType wire, int64_t count) const override {
    unpacked.fetch_add(count * SizeOf(wire), std::memory_order_relaxed);
    ForwardedKernels::Unpack(dst, dtype, src, wire, count);
  }

  mutable std::atomic<int64_t> packed{0};
  mutable std::atomic<int64_t> reduced{0};  // read to be reduced
  mutable std::atomic<int64_t> unpacked{0};
};

/// What engines do while they wait.
enum class Waits {
  kSpinning,     // say that they are up, and never sleep
  kAsleep,       // sleep as soon as they have looked twice
  kUnannounced,  // spin, but have never said so: are rung each time, as all once were
};

/// Ranks of a host in threads of one process.
class Ranks {
 public:
  Ranks(int ranks, Waits waits) : waits_(waits), bells_(static_cast<size_t>(ranks)) {
    std::vector<Doorbell*> bells;
    for (int rank = 0; rank < ranks; ++rank) {
      members_.push_back(rank);
      bells.push_back(&bells_[static_cast<size_t>(rank)]);
      if (waits != Waits::kUnannounced) bells_[static_cast<size_t>(rank)].bell.StayAwake();
    }
    HeapMemory::Options options;
    options.store_policy = StorePolicy::kCached;
    options.cache_bytes = 32 * 1024 * 1024;
    const auto memory = std::make_shared<HeapMemory>(bells, options);
    layout = memory->LayoutOf(members_.size());
    for (const int rank : members_) {
      planes_.push_back(std::make_unique<SharedMemoryPlane>(memory, rank, kernels));
      EXPECT_TRUE(planes_.back()->AddSet(0, members_, rank).ok());
    }
  }

  /// Sums `count` floats of all ranks, `times` in a row, and compares.
  void Sum(int64_t count, int times) {
    std::vector<std::thread> threads;
    for (const int rank : members_) {
      threads.emplace_back([=, this] {
        for (int i = 0; i < times; ++i) SumAs(rank, count);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  int64_t looks() const {
    return Total([](const CountedBell& one) { return one.looks.load(); });
  }
  int64_t rings() const {
    return Total([](const CountedBell& one) { return one.bell.Ticket(); });
  }
  int64_t wakes() const {
    return Total([](const CountedBell& one) { return one.bell.wakes(); });
  }
  /// Each ring is two; each publication is a fence, after which all peers are looked at.
  int64_t locked() const {
    return looks() / static_cast<int64_t>(members_.size() - 1) + 2 * rings();
  }

  CountingKernels kernels;
  SlotLayout layout;

 private:
  template <class Count>
  int64_t Total(Count count) const {
    int64_t total = 0;
    for (const CountedBell& one : bells_) total += static_cast<int64_t>(count(one));
    return total;
  }

  void SumAs(int rank, int64_t count) {
    std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank + 1));
    const Segment segment{data.data(), data.data(), count};
    Batch batch;
    batch.ranks = members_;
    batch.my_index = rank;
    batch.segments = {&segment, 1};
    batch.count = count;
    Finish(*planes_[static_cast<size_t>(rank)]->Start(batch).value(),
           bells_[static_cast<size_t>(rank)].bell);
    const auto ranks = static_cast<int64_t>(members_.size());
    const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
    EXPECT_EQ(std::ranges::count(data, sum), count) << "rank " << rank;
  }

  /// As an engine does.
  void Finish(PlaneOperation& operation, FutexDoorbell& bell) const {
    for (;;) {
      const uint32_t ticket = bell.Ticket();
      const Progress progress = operation.Step();
      if (progress.state == Progress::State::kDone) return;
      ASSERT_NE(progress.state, Progress::State::kFailed);
      if (waits_ != Waits::kAsleep) {
        std::this_thread::yield();
      } else if (progress.state == Progress::State::kMoved) {
        bell.StayAwake();
      } else if (bell.MaySleep()) {
        bell.Sleep(FutexDoorbell::Listener::kEngine, ticket, -1);
      }
    }
  }

  const Waits waits_;
  std::vector<int> members_;
  std::vector<CountedBell> bells_;
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes_;
};

class SharedMemoryCounts : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int kTimes = 2;
  static constexpr int64_t kChunks = 8;
  /// So many chunks of a whole slot.
  static int64_t CountOf(const Ranks& ranks) { return kChunks * ranks.layout.slot_bytes / 4; }
};

TEST_P(SharedMemoryCounts, OfAChunkAreThreeFencesOfEachRankWhileAllAreUp) {
  const int64_t members = GetParam();
  Ranks ranks(GetParam(), Waits::kSpinning);
  ranks.Sum(CountOf(ranks), kTimes);
  EXPECT_EQ(ranks.locked(), kTimes * kChunks * 3 * members);
  EXPECT_EQ(ranks.rings(), 0);
  EXPECT_EQ(ranks.wakes(), 0);
}

// Against which the above is measured: two locked operations more for each peer.
TEST_P(SharedMemoryCounts, AreTwoMoreForEachPeerThatDoesNotSayItIsUp) {
  const int64_t members = GetParam();
  Ranks ranks(GetParam(), Waits::kUnannounced);
  ranks.Sum(CountOf(ranks), kTimes);
  EXPECT_EQ(ranks.locked(), kTimes * kChunks * 3 * members * (1 + 2 * (members - 1)));
}

TEST_P(SharedMemoryCounts, OfWakeUpsAreThoseOfSleepersAndNoneIsLost) {
  Ranks ranks(GetParam(), Waits::kAsleep);
  ranks.Sum(CountOf(ranks), kTimes);  // hangs, and the test times out, if one is lost
  EXPECT_LE(ranks.rings(), ranks.looks());
  EXPECT_LE(ranks.wakes(), ranks.rings());
}

// Of n bytes of a chunk a rank writes all but its shard to its slot, reads its shard of all slots,
// and writes all of the result.
TEST_P(SharedMemoryCounts, OfBytesAreThoseOfTheChunks) {
  const int64_t members = GetParam();
  Ranks ranks(GetParam(), Waits::kSpinning);
  ranks.Sum(CountOf(ranks), 1);
  const int64_t bytes = kChunks * ranks.layout.slot_bytes;
  EXPECT_EQ(ranks.kernels.packed.load(), (members - 1) * bytes);
  EXPECT_EQ(ranks.kernels.reduced.load(), members * bytes);
  EXPECT_EQ(ranks.kernels.unpacked.load(), members * bytes);
}

// What nobody shares is written and read once: one round trip, as long as a rank does not read more
// than 64 KiB of its peers.
TEST_P(SharedMemoryCounts, OfASmallBatchAreTwoFences) {
  const int64_t members = GetParam();
  const int64_t most = 64 * 1024 / (members - 1) / 4;
  for (const int64_t count : {int64_t{1}, most, most + 1}) {
    Ranks ranks(GetParam(), Waits::kSpinning);
    ranks.Sum(count, 1);
    const bool is_small = count <= most;
    EXPECT_EQ(ranks.kernels.reduced.load() == members * members * count * 4, is_small) << count;
    if (is_small) {
      EXPECT_EQ(ranks.locked(), 2 * members) << count;
    }
  }
}

// Two members pack one chunk while they reduce another; more would wait more than that gains.
TEST_P(SharedMemoryCounts, OfAMediumBatchAreThoseOfSeveralChunksOnlyWithFewMembers) {
  const int64_t members = GetParam();
  Ranks ranks(GetParam(), Waits::kSpinning);
  constexpr int64_t kBytes = 256 * 1024;
  ranks.Sum(kBytes / 4, 1);
  const int64_t chunks = members <= 4 ? 2 : kBytes / ranks.layout.slot_bytes;
  EXPECT_EQ(ranks.locked(), chunks * 3 * members);
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedMemoryCounts, ::testing::Values(2, 8, 16, 64));

TEST(SlotLayout, FollowsTheNumberOfRanksAndTheCache) {
  const auto slot_kib = [](size_t ranks, int64_t cache_mib) {
    HeapMemory::Options options;
    options.cache_bytes = cache_mib * 1024 * 1024;
    return HeapMemory({}, options).LayoutOf(ranks).slot_bytes / 1024;
  };
  for (size_t ranks = 1; ranks <= 32; ranks *= 2) EXPECT_EQ(slot_kib(ranks, 32), 256) << ranks;
  EXPECT_EQ(slot_kib(64, 32), 128);
  EXPECT_EQ(slot_kib(64, 1024), 128) << "at most 32 MiB together";
  EXPECT_EQ(slot_kib(2, 8), 256);
  EXPECT_EQ(slot_kib(8, 4), 128);
  EXPECT_EQ(slot_kib(64, 8), 32);
  EXPECT_EQ(slot_kib(64, 1), 16) << "at least";
  EXPECT_EQ(slot_kib(1024, 32), 64) << "a line for each member";
}

TEST(LastLevelCacheBytes, IsThatOfTheHighestLevelThatIsKnown) {
  const std::filesystem::path folder = ::testing::TempDir() + "/farandole_caches";
  const auto cache = [&](int index, const std::string& size) {
    const auto path = folder / ("index" + std::to_string(index));
    std::filesystem::create_directories(path);
    std::ofstream(path / "size") << size << '\n';
    return LastLevelCacheBytes(folder);
  };
  EXPECT_EQ(LastLevelCacheBytes(folder), 32 * 1024 * 1024) << "nothing is known";
  EXPECT_EQ(cache(1, "48K"), 48 * 1024);
  EXPECT_EQ(cache(3, "16M"), 16 * 1024 * 1024);
  EXPECT_EQ(cache(4, "unknown"), 16 * 1024 * 1024);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace farandole
