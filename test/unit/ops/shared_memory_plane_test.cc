#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/shm/collective.h"
#include "ops/shm/plane.h"
#include "test/support/count_allocations.h"
#include "test/support/fake_clock.h"
#include "test/support/forwarded_kernels.h"

namespace farandole {
namespace {

class CountingBell final : public Doorbell {
 public:
  void Ring() override { ++rings; }
  int rings = 0;
};

/// The best kernels on a machine whose cores share no cache: copying a chunk into a slot takes 4 us
/// through the cache and 1 us past it, by a clock that nothing else moves.
class MeasuredKernels final : public ForwardedKernels {
 public:
  void Pack(void* dst, DType wire, const void* src, DType dtype, int64_t count,
            double prescale) const override {
    clock.Advance(4'000);
    ForwardedKernels::Pack(dst, wire, src, dtype, count, prescale);
  }
  void Stream(void* dst, const void* src, int64_t size_bytes) const override {
    clock.Advance(1'000);
    ForwardedKernels::Stream(dst, src, size_bytes);
  }

  mutable FakeClock clock;
};

/// Two ranks in one thread, both in set 0.
class SharedMemoryPlaneTest : public ::testing::Test {
 protected:
  SharedMemoryPlaneTest() {
    Doorbell* bells[] = {&bells_[0], &bells_[1]};
    HeapMemory::Options options;
    options.slot_bytes = 32 * 1024;
    hub_ = std::make_shared<HeapMemory>(bells, options);
    for (int rank : {0, 1}) {
      planes_.push_back(
          std::make_unique<SharedMemoryPlane>(hub_, rank, BestCpuKernels(), &counters_[rank]));
      EXPECT_TRUE(planes_.back()->AddSet(0, members_, rank).ok());
      data_[rank].assign(kCount, static_cast<float>(rank + 1));
      segment_[rank] = {data_[rank].data(), data_[rank].data(), kCount};
    }
  }

  /// Runs a batch of each rank in a new set, in which what passes the cache is faster.
  StorePolicy PolicyAfter(SharedMemoryFactory& make, std::span<const Batch, 2> batches) {
    const MeasuredKernels kernels;
    const uint32_t set = ++next_set_;
    std::vector<std::unique_ptr<SharedMemorySet>> sets;
    for (int rank : {0, 1}) {
      sets.push_back(std::make_unique<SharedMemorySet>(set, members_, rank, kernels, nullptr, *hub_,
                                                       kernels.clock));
      EXPECT_TRUE(sets.back()->Join().ok());
    }
    CpuCollective::Pool pool;
    CpuCollective* const started[] = {pool.Take(make), pool.Take(make)};
    for (size_t rank = 0; rank < 2; ++rank) {
      started[rank]->Enqueue(batches[rank], *sets[rank], pool);
    }
    Finish(started[0], started[1]);
    return sets[0]->slots->store_policy();
  }

  Batch BatchOf(int rank, int64_t number = 1) {
    Batch batch;
    batch.number = number;
    batch.ranks = members_;
    batch.my_index = rank;
    batch.segments = {&segment_[rank], 1};
    batch.count = segment_[rank].count;
    return batch;
  }
  PlaneOperation* Start(int rank, const Batch& batch) {
    return planes_[static_cast<size_t>(rank)]->Start(batch).value();
  }
  /// Gives the rank's tensor a buffer.
  float* PutIntoBuffer(int rank) {
    buffers_[rank] = hub_->Allocate(kCount * sizeof(float)).value();
    auto* const data = reinterpret_cast<float*>(buffers_[rank].get());
    std::copy(data_[rank].begin(), data_[rank].end(), data);
    segment_[rank] = {data, data, kCount};
    return data;
  }
  int64_t InPlaceBytes(int rank) const { return counters_[rank].Get(Counter::kInPlaceBytes); }
  /// Steps both until both are done.
  static void Finish(PlaneOperation* a, PlaneOperation* b) {
    while (a != nullptr || b != nullptr) {
      for (PlaneOperation** operation : {&a, &b}) {
        if (*operation == nullptr) continue;
        const Progress::State state = (*operation)->Step().state;
        ASSERT_NE(state, Progress::State::kFailed);
        if (state == Progress::State::kDone) *operation = nullptr;
      }
    }
  }

  static constexpr int64_t kCount = 100'000;
  const std::vector<int> members_ = {0, 1};
  CountingBell bells_[2];
  std::shared_ptr<HeapMemory> hub_;
  std::vector<std::unique_ptr<SharedMemoryPlane>> planes_;
  Counters counters_[2];
  std::vector<float> data_[2];
  std::shared_ptr<std::byte> buffers_[2];
  Segment segment_[2];
  uint32_t next_set_ = 10;
};

TEST_F(SharedMemoryPlaneTest, AllocatesNothingInSteadyState) {
  const Batch batches[] = {BatchOf(0), BatchOf(1)};
  const auto round = [&] {
    PlaneOperation* first[] = {Start(0, batches[0]), Start(1, batches[1])};
    PlaneOperation* second[] = {Start(0, batches[0]), Start(1, batches[1])};
    Finish(first[0], first[1]);
    Finish(second[0], second[1]);
  };
  round();
  const CountAllocations allocations;
  for (int i = 0; i < 10; ++i) round();
  EXPECT_EQ(allocations.count(), 0);
}

TEST_F(SharedMemoryPlaneTest, ReducesTensorsInBuffersWhereTheyLie) {
  float* const tensors[] = {PutIntoBuffer(0), PutIntoBuffer(1)};
  const Batch batches[] = {BatchOf(0), BatchOf(1)};
  const auto round = [&] { Finish(Start(0, batches[0]), Start(1, batches[1])); };
  round();
  const CountAllocations allocations;
  round();
  EXPECT_EQ(allocations.count(), 0);
  for (int rank : {0, 1}) {
    EXPECT_EQ(tensors[rank][0], 6.0f);
    EXPECT_EQ(tensors[rank][kCount - 1], 6.0f);
    EXPECT_EQ(InPlaceBytes(rank), 2 * kCount * 4);
  }
}

TEST_F(SharedMemoryPlaneTest, CopiesWhereATensorLiesElsewhereOrHasAFactor) {
  const float* const tensor = PutIntoBuffer(1);
  Batch batches[] = {BatchOf(0), BatchOf(1)};
  Finish(Start(0, batches[0]), Start(1, batches[1]));
  EXPECT_EQ(tensor[kCount - 1], 3.0f);
  EXPECT_EQ(data_[0][kCount - 1], 3.0f);
  PutIntoBuffer(0);
  for (int rank : {0, 1}) batches[rank] = BatchOf(rank);
  batches[1].prescale = 2;  // the other rank's own is 1
  Finish(Start(0, batches[0]), Start(1, batches[1]));
  EXPECT_EQ(tensor[kCount - 1], 9.0f);
  EXPECT_EQ(InPlaceBytes(0), 0);
  batches[1].prescale = 1;
  Finish(Start(0, batches[0]), Start(1, batches[1]));
  EXPECT_EQ(tensor[kCount - 1], 18.0f);
  EXPECT_EQ(InPlaceBytes(0), kCount * 4);
}

TEST_F(SharedMemoryPlaneTest, KeepsABufferThatAPeerMayWriteToAfterAbandon) {
  PutIntoBuffer(0);
  PutIntoBuffer(1);
  const Batch batches[] = {BatchOf(0), BatchOf(1)};
  PlaneOperation* mine = Start(0, batches[0]);
  PlaneOperation* peers = Start(1, batches[1]);
  (void)mine->Step();  // announces its tensor
  mine->Abandon();
  const std::byte* const abandoned = buffers_[0].get();
  buffers_[0].reset();
  EXPECT_NE(hub_->Allocate(kCount * sizeof(float)).value().get(), abandoned);
  EXPECT_GE(counters_[0].Get(Counter::kQuarantinedBytes), 2 * kCount * 4);
  // The peer writes to it, which AddressSanitizer would report, and waits for its shard.
  for (int i = 0; i < 100; ++i) (void)peers->Step();
  EXPECT_EQ(peers->Step().state, Progress::State::kWaiting);
  peers->Abandon();
}

TEST_F(SharedMemoryPlaneTest, WaitsByDoorbellForAPeerAndIsRungWhenItArrives) {
  const Batch batches[] = {BatchOf(0), BatchOf(1)};
  PlaneOperation* first = Start(0, batches[0]);
  Progress progress = first->Step();
  while (progress.state == Progress::State::kMoved) progress = first->Step();
  EXPECT_EQ(progress.state, Progress::State::kWaiting);
  EXPECT_EQ(progress.poll_after_ns, kByDoorbell);
  bells_[0].rings = 0;
  PlaneOperation* second = Start(1, batches[1]);
  EXPECT_EQ(second->Step().state, Progress::State::kMoved);
  EXPECT_GE(bells_[0].rings, 1);
  Finish(first, second);
}

TEST_F(SharedMemoryPlaneTest, RunsQueuedBatchesOfASetInOrder) {
  const Batch batches[] = {BatchOf(0, 1), BatchOf(1, 1)};
  const Batch later[] = {BatchOf(0, 2), BatchOf(1, 2)};
  PlaneOperation* first[] = {Start(0, batches[0]), Start(1, batches[1])};
  PlaneOperation* second[] = {Start(0, later[0]), Start(1, later[1])};
  EXPECT_EQ(second[0]->Step().state, Progress::State::kWaiting);
  bells_[0].rings = 0;
  Finish(first[0], first[1]);
  EXPECT_GE(bells_[0].rings, 1);  // the one that returned kWaiting may proceed
  Finish(second[0], second[1]);
  EXPECT_EQ(data_[0][kCount - 1], 6.0f);  // (1 + 2) summed twice
}

TEST_F(SharedMemoryPlaneTest, LeavesTheTensorAloneAfterAbandon) {
  const Batch batches[] = {BatchOf(0), BatchOf(1)};
  PlaneOperation* mine = Start(0, batches[0]);
  PlaneOperation* peers = Start(1, batches[1]);
  (void)mine->Step();  // packs its first chunks
  mine->Abandon();
  std::vector<float>().swap(data_[0]);  // a use of it would be reported by AddressSanitizer
  for (int i = 0; i < 100; ++i) (void)peers->Step();
  EXPECT_EQ(peers->Step().state, Progress::State::kWaiting);
  peers->Abandon();
}

TEST_F(SharedMemoryPlaneTest, FailsQueuedAndLaterBatchesOfASetWithAnAbandonedOne) {
  const Batch batch = BatchOf(0);
  PlaneOperation* first = Start(0, batch);
  PlaneOperation* second = Start(0, batch);
  first->Abandon();
  const Progress progress = second->Step();
  EXPECT_EQ(progress.state, Progress::State::kFailed);
  EXPECT_EQ(progress.status.code(), Code::kAborted);
  EXPECT_EQ(planes_[0]->Start(batch).status().code(), Code::kAborted);
}

TEST_F(SharedMemoryPlaneTest, FailsTheReceiverOfUnlikeSplitsAndNamesThem) {
  std::vector<float> in(kCount, 1), out(kCount, -1);
  for (const auto& [sent, expected] : {std::pair<int64_t, int64_t>{8, 0}, {0, 8}, {kCount, 9}}) {
    const uint32_t set = ++next_set_;
    const int64_t to_one[] = {0, sent}, from_zero[] = {expected, 0}, none[] = {0, 0};
    Batch batches[] = {BatchOf(0), BatchOf(1)};
    for (int rank : {0, 1}) {
      ASSERT_TRUE(planes_[static_cast<size_t>(rank)]->AddSet(set, members_, rank).ok());
      segment_[rank] = {in.data(), out.data(), std::max(sent, expected)};
      batches[rank] = BatchOf(rank);
      batches[rank].set = set;
      batches[rank].kind = OpKind::kAlltoall;
      batches[rank].sends = rank == 0 ? to_one : none;
      batches[rank].receives = rank == 1 ? from_zero : none;
    }
    PlaneOperation* sender = Start(0, batches[0]);
    PlaneOperation* receiver = Start(1, batches[1]);
    Progress progress = receiver->Step();
    EXPECT_EQ(progress.state, Progress::State::kMoved);
    const Progress::State senders = sender->Step().state;
    while (progress.state == Progress::State::kMoved) progress = receiver->Step();
    ASSERT_EQ(progress.state, Progress::State::kFailed);
    EXPECT_EQ(progress.status.message(), "alltoall: rank 0 sends rank 1 " +
                                             std::to_string(4 * sent) + " bytes, rank 1 expects " +
                                             std::to_string(4 * expected));
    EXPECT_EQ(planes_[1]->Start(batches[1]).status().code(), Code::kAborted);
    if (senders != Progress::State::kDone) sender->Abandon();
  }
  EXPECT_EQ(out, std::vector<float>(kCount, -1));
}

TEST_F(SharedMemoryPlaneTest, RunsOtherSetsWhileOneIsStopped) {
  for (int rank : {0, 1}) {
    EXPECT_TRUE(planes_[static_cast<size_t>(rank)]->AddSet(7, members_, rank).ok());
  }
  const Batch stopped = BatchOf(0);
  PlaneOperation* waits = Start(0, stopped);  // rank 1 never starts it
  while (waits->Step().state == Progress::State::kMoved) {
  }
  std::vector<float> small[2] = {{1, 2}, {3, 4}};
  Segment segments[2];
  Batch batches[2];
  for (int rank : {0, 1}) {
    segments[rank] = {small[rank].data(), small[rank].data(), 2};
    batches[rank] = BatchOf(rank);
    batches[rank].set = 7;
    batches[rank].segments = {&segments[rank], 1};
    batches[rank].count = 2;
  }
  Finish(Start(0, batches[0]), Start(1, batches[1]));
  EXPECT_EQ(small[0], (std::vector<float>{4, 6}));
  EXPECT_EQ(small[1], small[0]);
  waits->Abandon();
}

TEST_F(SharedMemoryPlaneTest, LetsAMemberGoOnReadingAfterItsPeerRemovedTheSet) {
  segment_[0].count = segment_[1].count = 10;
  Batch batches[] = {BatchOf(0), BatchOf(1)};
  batches[0].kind = batches[1].kind = OpKind::kBroadcast;
  PlaneOperation* root = Start(0, batches[0]);
  EXPECT_EQ(root->Step().state, Progress::State::kDone);
  planes_[0].reset();  // root and its set are gone before the other one looks
  EXPECT_EQ(Start(1, batches[1])->Step().state, Progress::State::kDone);
  EXPECT_EQ(data_[1][9], 1.0f);
}

TEST_F(SharedMemoryPlaneTest, BroadcastsPastTheCacheWhereThatIsFaster) {
  for (const int root : {0, 1}) {
    Batch batches[2];
    std::vector<float> tensors[2];
    for (int rank : {0, 1}) {
      tensors[rank].assign(10 * kCount, static_cast<float>(rank));
      segment_[rank] = {tensors[rank].data(), tensors[rank].data(), 10 * kCount};
      batches[rank] = BatchOf(rank);
      batches[rank].kind = OpKind::kBroadcast;
      batches[rank].root_index = root;
    }
    EXPECT_EQ(PolicyAfter(MakeSharedMemoryBroadcast, batches), StorePolicy::kStreamed)
        << "from rank " << root;
    EXPECT_EQ(tensors[1 - root], tensors[root]);
  }
}

TEST_F(SharedMemoryPlaneTest, GathersPastTheCacheWhereThatIsFaster) {
  constexpr int64_t kEach = 10 * kCount;
  const std::vector<int64_t> splits(2, kEach);
  Batch batches[2];
  std::vector<float> in[2], out[2];
  for (int rank : {0, 1}) {
    in[rank].assign(kEach, static_cast<float>(rank));
    out[rank].resize(2 * kEach);
    segment_[rank] = {in[rank].data(), out[rank].data(), 2 * kEach};
    batches[rank] = BatchOf(rank);
    batches[rank].kind = OpKind::kAllgather;
    batches[rank].splits = splits;
  }
  EXPECT_EQ(PolicyAfter(MakeSharedMemoryAllgather, batches), StorePolicy::kStreamed);
  EXPECT_EQ(out[0][2 * kEach - 1], 1.0f);
  EXPECT_EQ(out[1], out[0]);
}

TEST_F(SharedMemoryPlaneTest, RefusesABadBatchAndAnUnknownSet) {
  Batch batch = BatchOf(0);
  batch.prescale = std::numeric_limits<double>::infinity();
  EXPECT_EQ(planes_[0]->Start(batch).status().code(), Code::kInvalidArgument);
  batch = BatchOf(0);
  batch.set = 99;
  EXPECT_EQ(planes_[0]->Start(batch).status().code(), Code::kInternal);
}

TEST_F(SharedMemoryPlaneTest, RefusesSetsThatDoNotFit) {
  EXPECT_EQ(planes_[0]->AddSet(0, members_, 0).code(), Code::kInvalidArgument);  // again
  EXPECT_EQ(planes_[0]->AddSet(3, members_, 1).code(), Code::kInvalidArgument);  // not this rank
  const std::vector<int> unknown = {0, 2};
  EXPECT_EQ(planes_[0]->AddSet(4, unknown, 0).code(), Code::kInvalidArgument);
  EXPECT_TRUE(planes_[0]->AddSet(5, members_, 0).ok());
  const std::vector<int> reversed = {1, 0};
  EXPECT_EQ(planes_[1]->AddSet(5, reversed, 0).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace farandole
