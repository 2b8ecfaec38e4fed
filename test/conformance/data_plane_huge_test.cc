// Counts beyond 2^31, which need 4.3 GB of memory and some seconds.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/shm/plane.h"
#include "test/conformance/data_plane_harness.h"

namespace farandole {
namespace {

constexpr int64_t kHuge = (int64_t{1} << 31) + 4099;

/// Element i of rank r; neighbouring elements differ.
uint8_t Element(int rank, int64_t i) {
  return static_cast<uint8_t>(static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15u >> 56) +
         static_cast<uint8_t>(rank * 3);
}

void SumHuge(SharedMemoryPlane& plane, FutexDoorbell& bell, const std::vector<int>& ranks,
             int rank) {
  ASSERT_TRUE(plane.AddSet(0, ranks, rank).ok());
  const auto tensor = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(kHuge));
  for (int64_t i = 0; i < kHuge; ++i) tensor[static_cast<size_t>(i)] = Element(rank, i);
  const Segment segment{tensor.get(), tensor.get(), kHuge};
  Batch batch;
  batch.ranks = ranks;
  batch.my_index = rank;
  batch.dtype = batch.wire = DType::kUint8;
  batch.segments = {&segment, 1};
  batch.count = kHuge;
  PlaneOperation* operation = plane.Start(batch).value();
  for (Progress progress; progress.state != Progress::State::kDone;) {
    const uint32_t ticket = bell.Ticket();
    progress = operation->Step();
    ASSERT_NE(progress.state, Progress::State::kFailed);
    if (progress.state != Progress::State::kWaiting) continue;
    bell.Sleep(FutexDoorbell::Listener::kEngine, ticket, -1);
  }
  int64_t wrong = 0;
  for (int64_t i = 0; i < kHuge; ++i) {
    const uint8_t expected = static_cast<uint8_t>(Element(0, i) + Element(1, i));
    wrong += tensor[static_cast<size_t>(i)] != expected;
  }
  EXPECT_EQ(wrong, 0);
}

/// --gtest_also_run_disabled_tests.
TEST(DataPlane, DISABLED_SumsMoreThanTwoToThe31Elements) {
  FutexDoorbell bells[2];
  Doorbell* bell_list[] = {&bells[0], &bells[1]};
  const auto hub = std::make_shared<HeapMemory>(bell_list);
  OnEveryRank(2, [&](int rank) {
    SharedMemoryPlane plane(hub, rank, BestCpuKernels());
    SumHuge(plane, bells[rank], {0, 1}, rank);
  });
}

}  // namespace
}  // namespace farandole
