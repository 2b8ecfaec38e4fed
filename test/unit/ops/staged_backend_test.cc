// Batches through host memory: what the conformance suite does not see of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/gpu/backend.h"
#include "ops/shm/plane.h"
#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

using State = Progress::State;

/// A host plane that can be made to fail, and that shows when it is asked to reduce.
class HostPlane final : public DataPlane {
 public:
  explicit HostPlane(std::unique_ptr<DataPlane> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return "host"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override {
    return inner_->AddSet(set, ranks, my_index);
  }
  void RemoveSet(uint32_t set) override { inner_->RemoveSet(set); }
  Result<PlaneOperation*> Start(const Batch& batch) override {
    if (!failure.ok()) return failure;
    numbers.push_back(batch.number);
    return inner_->Start(batch);
  }

  Status failure;
  std::vector<int64_t> numbers;

 private:
  const std::unique_ptr<DataPlane> inner_;
};

/// Two ranks in one thread, each with a fake GPU; slots of 64 floats.
class StagedBackendTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;
  static constexpr int64_t kSlotFloats = 64;

  struct Rank {
    std::unique_ptr<HostPlane> plane;
    std::unique_ptr<HostSet> host;
    std::shared_ptr<StagingBuffers> buffers;
    std::unique_ptr<GpuBackend> backend;
    std::shared_ptr<LaunchTask> task;
    std::vector<FakeStream*>
        streams;  // also when they are destroyed, while they run what they hold
    std::vector<float> data;
    Segment segment;
    Batch batch;
    Counters counters;
  };

  StagedBackendTest() {
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<HeapMemory>(bells);
    for (int r = 0; r < kRanks; ++r) {
      Rank& rank = rank_[r];
      rank.plane = std::make_unique<HostPlane>(
          std::make_unique<SharedMemoryPlane>(hub, r, BestCpuKernels()));
      rank.host = HostSet::Create(*rank.plane, 7, members_, r).value();
      rank.buffers =
          MakeStagingBuffers(device(r), &rank.counters, kSlotFloats * int64_t{sizeof(float)})
              .value();
      rank.backend = MakeStagedBackend(*rank.host, rank.buffers);
      rank.streams = device(r).streams();
    }
  }
  ~StagedBackendTest() override {
    for (int r = 0; r < kRanks; ++r) {  // what streams still hold uses the tensors
      if (rank_[r].backend != nullptr) {
        EXPECT_EQ(device(r).counts().host_waits, 0);
      }
      device(r).ReleaseStreams();
      Synchronize(r);
      End(r);
      if (rank_[r].counters.Get(Counter::kQuarantinedBytes) > 0) device(r).FreeAll();
    }
  }

  FakeDevice& device(int r) { return runtime_.fake(r); }
  FakeStream& h2d(int r) { return *device(r).streams().at(1); }
  void Synchronize(int r) {
    for (int round = 0; round < 2; ++round) {
      for (FakeStream* stream : rank_[r].streams) stream->Synchronize();
    }
  }
  void End(int r) {
    rank_[r].backend = nullptr;
    rank_[r].buffers = nullptr;
  }

  /// Begins a sum of `count` floats on a rank: r + 1 everywhere.
  Rank& Begin(int r, int64_t count, std::span<const int> absent = {}) {
    Rank& rank = rank_[r];
    rank.data.assign(static_cast<size_t>(count), static_cast<float>(r + 1));
    rank.segment = {rank.data.data(), rank.data.data(), count};
    rank.batch = Batch();
    rank.batch.set = 7;
    rank.batch.ranks = members_;
    rank.batch.my_index = r;
    rank.batch.segments = {&rank.segment, 1};
    rank.batch.count = count;
    rank.batch.absent = absent;
    if (IsAbsent(rank.batch, r)) rank.segment.in = nullptr;
    rank.task = rank.backend->Begin(rank.batch).value();
    return rank;
  }

  /// Steps a rank as often as it takes to come to rest, its stream included.
  Progress Settle(int r) {
    Progress last;
    for (int quiet = 0; quiet < 20;) {
      last = rank_[r].backend->Step();
      if (last.state == State::kDone || last.state == State::kFailed) return last;
      quiet = last.state == State::kMoved ? 0 : quiet + 1;
      if (!holds_) Synchronize(r);
    }
    return last;
  }

  /// Both until launched.
  void Finish() {
    bool over[kRanks] = {};
    for (int round = 0; round < 10'000 && !(over[0] && over[1]); ++round) {
      bool moved = false;
      for (int r = 0; r < kRanks; ++r) {
        if (over[r]) continue;
        const Progress progress = rank_[r].backend->Step();
        ASSERT_NE(progress.state, State::kFailed) << progress.status.ToString();
        over[r] = progress.state == State::kDone;
        moved = moved || progress.state != State::kWaiting;
      }
      for (int r = 0; r < kRanks && !moved; ++r) Synchronize(r);
    }
    ASSERT_TRUE(over[0] && over[1]);
    for (int r = 0; r < kRanks; ++r) Synchronize(r);
  }

  const std::vector<int> members_ = {0, 1};
  FakeDeviceRuntime runtime_{kRanks};
  FutexDoorbell bells_[kRanks];
  Rank rank_[kRanks];
  bool holds_ = false;
};

TEST_F(StagedBackendTest, CopiesFurtherSlicesWhileOneIsReduced) {
  Begin(0, 10 * kSlotFloats);
  const Progress progress = Settle(0);  // the peer has not come
  EXPECT_EQ(progress.state, State::kWaiting);
  EXPECT_EQ(progress.poll_after_ns, kByDoorbell);
  EXPECT_EQ(device(0).counts().copied_bytes, kStagingSlots * kSlotFloats * int64_t{sizeof(float)});
}

TEST_F(StagedBackendTest, UsesTheSameFewSlotsForAllSlicesAndBatches) {
  for (int batch = 0; batch < 3; ++batch) {
    for (int r = 0; r < kRanks; ++r) Begin(r, 10 * kSlotFloats + 5);
    Finish();
    for (const Rank& rank : rank_) {
      EXPECT_EQ(rank.data, std::vector<float>(10 * kSlotFloats + 5, 3.0f));
    }
  }
  EXPECT_EQ(device(0).counts().live_blocks, kStagingSlots);
  EXPECT_EQ(device(0).counts().live_pinned, kStagingSlots);
}

TEST_F(StagedBackendTest, StartsHostBatchesInOrderNumberedAcrossBatches) {
  for (int batch = 0; batch < 2; ++batch) {
    for (int r = 0; r < kRanks; ++r) Begin(r, 4 * kSlotFloats);
    Finish();
  }
  EXPECT_THAT(rank_[0].plane->numbers, ::testing::ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST_F(StagedBackendTest, TakesNoMoreSlotsThanASmallBatchNeeds) {
  for (int r = 0; r < kRanks; ++r) Begin(r, 3);
  Finish();
  EXPECT_EQ(device(0).counts().live_pinned, 1);
}

TEST_F(StagedBackendTest, CopiesALoneTensorStraightWithoutAKernel) {
  for (int r = 0; r < kRanks; ++r) Begin(r, 4 * kSlotFloats);
  Finish();
  EXPECT_EQ(device(0).counts().launches, 0);
}

TEST_F(StagedBackendTest, StagesOtherKindsWholeInOneSlotThatGrows) {
  for (const int64_t count : {3 * kSlotFloats, 9 * kSlotFloats, kSlotFloats}) {
    const std::vector<int64_t> splits = {count, count - 1};
    std::vector<float> gathered[kRanks];
    for (int r = 0; r < kRanks; ++r) {
      Rank& rank = Begin(r, splits[static_cast<size_t>(r)]);
      gathered[r].resize(static_cast<size_t>(2 * count - 1));
      rank.batch.kind = OpKind::kAllgather;
      rank.batch.splits = splits;
      rank.batch.count = rank.segment.count = 2 * count - 1;
      rank.segment.out = gathered[r].data();
      rank.task = rank.backend->Begin(rank.batch).value();
    }
    Finish();
    std::vector<float> expected(static_cast<size_t>(count), 1.0f);
    expected.resize(static_cast<size_t>(2 * count - 1), 2.0f);
    for (const std::vector<float>& one : gathered) EXPECT_EQ(one, expected);
  }
  EXPECT_THAT(rank_[0].plane->numbers, ::testing::ElementsAre(0, 1, 2)) << "a host batch each";
  EXPECT_EQ(device(0).counts().live_pinned, 2) << "the larger one replaced the smaller";
  EXPECT_EQ(device(0).counts().live_blocks, 0) << "nothing is cast";
  End(0);
  EXPECT_EQ(device(0).counts().live_pinned, 0);
}

TEST_F(StagedBackendTest, ReadsWhatALateProducerWrites) {
  FakeStream* producer = device(0).NewStream();
  producer->Hold();
  Rank& late = Begin(0, 3 * kSlotFloats);
  producer->Enqueue("a late write", [&late] { late.data.assign(late.data.size(), 40.0f); });
  const std::shared_ptr<DeviceEvent> ready = device(0).CreateEvent().value();
  ASSERT_TRUE(ready->Record(producer->handle()).ok());
  const std::shared_ptr<DeviceEvent> events[] = {ready};
  late.batch.ready = events;
  holds_ = true;
  const Progress progress = Settle(0);
  EXPECT_EQ(progress.state, State::kWaiting);
  EXPECT_TRUE(progress.for_inputs);
  EXPECT_EQ(progress.poll_after_ns, 50'000);
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  for (FakeStream* stream : device(0).streams()) {
    EXPECT_FALSE(stream->Idle()) << stream->name() << " does not wait for the producer";
  }
  producer->Release();
  Begin(1, 3 * kSlotFloats);
  Finish();
  EXPECT_EQ(rank_[1].data, std::vector<float>(3 * kSlotFloats, 42.0f));
  EXPECT_EQ(rank_[0].data, rank_[1].data);
}

// A rank without a contribution copies nothing to the host, so nothing but the slot's event holds
// it back.
TEST_F(StagedBackendTest, ReducesIntoASlotOnlyOnceItsLastResultIsOnTheGpu) {
  const int absent[] = {1};
  h2d(1).SlowDown(500);
  for (int r = 0; r < kRanks; ++r) {
    Begin(r, 12 * kSlotFloats, absent);
  }
  for (size_t i = 0; i < rank_[0].data.size(); ++i) rank_[0].data[i] = static_cast<float>(i);
  Finish();
  EXPECT_EQ(rank_[1].data, rank_[0].data);
  EXPECT_EQ(rank_[1].data.back(), static_cast<float>(12 * kSlotFloats - 1));
}

TEST_F(StagedBackendTest, CopiesToTheHostWhileResultsAreCopiedBack) {
  for (int r = 0; r < kRanks; ++r) Begin(r, 2 * kSlotFloats);
  Finish();
  h2d(0).Hold();  // results of the next batch stay where they are
  holds_ = true;
  for (int r = 0; r < kRanks; ++r) Begin(r, 2 * kSlotFloats);
  for (int i = 0; i < 100; ++i) {
    for (int r = 0; r < kRanks; ++r) {
      if (!rank_[r].task->launched()) (void)rank_[r].backend->Step();
    }
    device(0).streams().at(0)->Synchronize();
    Synchronize(1);
  }
  EXPECT_TRUE(rank_[0].task->launched()) << "both slices were copied to the host, and reduced";
  EXPECT_FALSE(rank_[0].task->end->IsComplete().value());
  h2d(0).Release();
  Synchronize(0);
  EXPECT_EQ(rank_[0].data, std::vector<float>(2 * kSlotFloats, 3.0f));
}

TEST_F(StagedBackendTest, ReportsAFailureOfTheHostPlane) {
  Begin(0, kSlotFloats);
  rank_[0].plane->failure = Unavailable("rank 1 is gone");
  const Progress progress = Settle(0);
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_EQ(progress.status.ToString(), Unavailable("rank 1 is gone").ToString());
}

TEST_F(StagedBackendTest, ReportsMemoryThatCannotBeHad) {
  device(0).FailCall(FakeCall::kAllocatePinned, 1);
  Begin(0, kSlotFloats);
  const Progress progress = Settle(0);
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_EQ(progress.status.code(), Code::kResourceExhausted);
}

TEST_F(StagedBackendTest, ReportsACopyThatFails) {
  device(0).FailCall(FakeCall::kCopy, 2);
  Begin(0, 3 * kSlotFloats);
  const Progress progress = Settle(0);
  EXPECT_EQ(progress.state, State::kFailed);
  EXPECT_EQ(progress.status.code(), Code::kInternal);
}

TEST_F(StagedBackendTest, GivesUpASlotWhoseLastCommandsFailed) {
  for (int r = 0; r < kRanks; ++r) {
    Begin(r, kSlotFloats);
    rank_[r].batch.wire = DType::kFloat16;
    ASSERT_TRUE(rank_[r].backend->Begin(rank_[r].batch).ok());
  }
  Settle(0);                               // to the host by a first kernel
  device(0).FailCall(FakeCall::kCast, 1);  // the one after the copy to the GPU
  Settle(1);
  EXPECT_EQ(Settle(0).state, State::kFailed);
  End(0);
  EXPECT_EQ(rank_[0].counters.Get(Counter::kQuarantinedBytes),
            2 * kSlotFloats * int64_t{sizeof(float)});
}

TEST_F(StagedBackendTest, FreesItsMemoryAfterAnAbandonOnceTheStreamIsIdle) {
  Begin(0, 10 * kSlotFloats);
  Settle(0);
  rank_[0].backend->Abandon();
  End(0);
  EXPECT_EQ(device(0).counts().live_blocks, 0);
  EXPECT_EQ(device(0).counts().live_pinned, 0);
  EXPECT_EQ(rank_[0].counters.Get(Counter::kQuarantinedBytes), 0);
}

TEST_F(StagedBackendTest, GivesUpMemoryThatTheStreamMayStillTouchWithoutWaiting) {
  for (FakeStream* stream : device(0).streams()) stream->Hold();
  holds_ = true;
  Begin(0, 2 * kSlotFloats);
  Settle(0);
  rank_[0].backend->Abandon();
  End(0);
  EXPECT_EQ(device(0).counts().host_waits, 0);
  EXPECT_EQ(rank_[0].counters.Get(Counter::kQuarantinedBytes),
            2 * 2 * kSlotFloats * int64_t{sizeof(float)});
  device(0).ReleaseStreams();
  Synchronize(0);  // AddressSanitizer would report a use of freed memory
}

}  // namespace
}  // namespace farandole
