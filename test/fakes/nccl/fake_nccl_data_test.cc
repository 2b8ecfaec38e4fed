// What the fake NCCL computes, and where it puts it. NcclResultsTest compares it in every type and
// operator with the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "core/half.h"
#include "test/fakes/nccl/fake_nccl_job.h"

namespace farandole {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

class FakeNcclDataTest : public ::testing::Test {
 protected:
  FakeNcclDataTest() { FakeNcclJob::control().reset(); }
  ~FakeNcclDataTest() override { EXPECT_STREQ(FakeNcclJob::control().take_misuses(), ""); }

  FakeDeviceRuntime runtime_{4};
};

TEST_F(FakeNcclDataTest, RoundsToTheTypeAfterEveryStep) {
  FakeNcclJob job(runtime_, 3);
  // 2048 + 1 is no half: added one by one nothing happens, added at once it does.
  Float16 values[3] = {ToFloat16(2048), ToFloat16(1), ToFloat16(1)}, sums[3];
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(job.AllReduce(rank, &values[rank], &sums[rank], 1, ncclFloat16), ncclSuccess);
  }
  job.Synchronize();
  EXPECT_EQ(sums[0].bits, sums[1].bits);
  EXPECT_EQ(sums[0].bits, sums[2].bits);
  EXPECT_THAT(ToFloat(sums[0]), ::testing::AnyOf(2048.0f, 2050.0f));
}

TEST_F(FakeNcclDataTest, BroadcastsGathersAndScatters) {
  constexpr size_t kCount = 40000;  // more than a slot
  FakeNcclJob job(runtime_, 3);
  std::vector<std::vector<int>> memory(3), gathered(3), shards(3);
  for (int rank = 0; rank < 3; ++rank) {
    const auto r = static_cast<size_t>(rank);
    memory[r].assign(kCount, rank + 1);
    gathered[r].assign(3 * kCount, -1);
    shards[r].assign(kCount, -1);
    job.Use(rank);
    EXPECT_EQ(
        FARANDOLE_FAKE_NCCL_RUN(job, rank, ncclAllGather, memory[r].data(), gathered[r].data(),
                                kCount, ncclInt32, job.comm(rank), job.handle(rank)),
        ncclSuccess);
    EXPECT_EQ(
        FARANDOLE_FAKE_NCCL_RUN(job, rank, ncclReduceScatter, gathered[r].data(), shards[r].data(),
                                kCount, ncclInt32, ncclSum, job.comm(rank), job.handle(rank)),
        ncclSuccess);
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_RUN(job, rank, ncclBroadcast,
                                      rank == 1 ? memory[r].data() : nullptr, memory[r].data(),
                                      kCount, ncclInt32, 1, job.comm(rank), job.handle(rank)),
              ncclSuccess);
  }
  job.Synchronize();
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(memory[rank], Each(2));
    EXPECT_THAT(shards[rank], Each(3 * (static_cast<int>(rank) + 1)));
    EXPECT_EQ(gathered[rank].front(), 1);
    EXPECT_EQ(gathered[rank][kCount], 2);
    EXPECT_EQ(gathered[rank].back(), 3);
  }
}

TEST_F(FakeNcclDataTest, ExchangesInOneGroup) {
  constexpr size_t kCount = 9000;  // more than a channel
  FakeNcclJob job(runtime_, 3);
  std::vector<std::vector<int>> in(3), out(3, std::vector<int>(3 * kCount));
  for (int rank = 0; rank < 3; ++rank) {
    const auto r = static_cast<size_t>(rank);
    job.Use(rank);
    EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclGroupStart), ncclSuccess);
    for (int peer = 0; peer < 3; ++peer) in[r].insert(in[r].end(), kCount, 10 * rank + peer);
    for (int peer = 0; peer < 3; ++peer) {
      const size_t offset = static_cast<size_t>(peer) * kCount;
      EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclSend, &in[r][offset], kCount, ncclInt32, peer,
                                         job.comm(rank), job.handle(rank)),
                ncclSuccess);
      EXPECT_EQ(FARANDOLE_FAKE_NCCL_CALL(ncclRecv, &out[r][offset], kCount, ncclInt32, peer,
                                         job.comm(rank), job.handle(rank)),
                ncclSuccess);
    }
    EXPECT_EQ(job.Completed(rank, FARANDOLE_FAKE_NCCL_CALL(ncclGroupEnd)), ncclSuccess);
  }
  job.Synchronize();
  for (int rank = 0; rank < 3; ++rank) {
    const std::vector<int>& mine = out[static_cast<size_t>(rank)];
    EXPECT_THAT((std::vector<int>{mine[0], mine[kCount], mine.back()}),
                ElementsAre(rank, 10 + rank, 20 + rank));
  }
}

TEST_F(FakeNcclDataTest, RunsInTheOrderOfTheStream) {
  FakeNcclJob job(runtime_, 2);
  float values[2] = {0, 0}, sums[2] = {-1, -1};
  job.stream(0).Hold();
  job.stream(0).Enqueue("a late write", [&values] { values[0] = 7; });
  for (int rank : {0, 1}) {
    ASSERT_EQ(job.AllReduce(rank, &values[rank], &sums[rank], 1), ncclSuccess);
  }
  EXPECT_FALSE(job.stream(1).Idle()) << "it waits for its peer";
  job.stream(0).Release();
  job.Synchronize();
  EXPECT_THAT(sums, Each(7.0f));
}

}  // namespace
}  // namespace farandole
