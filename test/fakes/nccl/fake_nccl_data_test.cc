// What the fake NCCL computes, and where it puts it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
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

void Put(std::vector<char>& memory, size_t i, double value, ncclDataType_t type) {
  const auto put = [&](auto element) {
    std::memcpy(&memory[i * sizeof element], &element, sizeof element);
  };
  switch (type) {
    case ncclInt8:
      return put(static_cast<int8_t>(value));
    case ncclUint8:
      return put(static_cast<uint8_t>(value));
    case ncclInt32:
      return put(static_cast<int32_t>(value));
    case ncclUint32:
      return put(static_cast<uint32_t>(value));
    case ncclInt64:
      return put(static_cast<int64_t>(value));
    case ncclUint64:
      return put(static_cast<uint64_t>(value));
    case ncclFloat16:
      return put(ToFloat16(static_cast<float>(value)));
    case ncclBfloat16:
      return put(ToBfloat16(static_cast<float>(value)));
    case ncclFloat32:
      return put(static_cast<float>(value));
    case ncclFloat64:
      return put(value);
  }
}

/// Of 1, 3, 8 and of 2, 4, 6: exact in every type but for the averages of floats.
double Expected(ncclRedOp_t op, bool odd, bool is_float) {
  switch (op) {
    case ncclSum:
      return 12;
    case ncclProd:
      return odd ? 48 : 24;
    case ncclMax:
      return odd ? 6 : 8;
    case ncclMin:
      return odd ? 2 : 1;
    case ncclAvg:
      return is_float ? 12 * 0.25 : 3;
    default:
      return 0;
  }
}

TEST_F(FakeNcclDataTest, ReducesEveryTypeWithEveryOperator) {
  constexpr double kValues[2][4] = {{1, 3, 8, 0}, {2, 4, 6, 0}};
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  constexpr size_t kCount = 7;
  for (int size : {3, 4}) {
    FakeNcclJob job(runtime_, size);
    for (int type = 0; type < 10; ++type) {
      for (int op = 0; op < 5; ++op) {
        // Averages over four, the rest over three: no rounding anywhere.
        if ((op == ncclAvg) != (size == 4)) continue;
        const auto data_type = static_cast<ncclDataType_t>(type);
        std::vector<std::vector<char>> memory(
            4, std::vector<char>(kCount * kSizes[static_cast<size_t>(type)]));
        std::vector<char> expected = memory[0];
        for (size_t i = 0; i < kCount; ++i) {
          for (size_t rank = 0; rank < 4; ++rank) {
            Put(memory[rank], i, kValues[i % 2][rank], data_type);
          }
          Put(expected, i, Expected(static_cast<ncclRedOp_t>(op), i % 2 == 1, type >= 6),
              data_type);
        }
        for (int rank = 0; rank < size; ++rank) {
          void* in_place = memory[static_cast<size_t>(rank)].data();
          ASSERT_EQ(job.AllReduce(rank, in_place, in_place, kCount, data_type,
                                  static_cast<ncclRedOp_t>(op)),
                    ncclSuccess);
        }
        job.Synchronize();
        for (int rank = 0; rank < size; ++rank) {
          ASSERT_EQ(memory[static_cast<size_t>(rank)], expected) << "type " << type << " op " << op;
        }
      }
    }
  }
}

TEST_F(FakeNcclDataTest, ReducesMoreThanASlotHolds) {
  constexpr size_t kCount = 100003;
  FakeNcclJob job(runtime_, 2);
  std::vector<float> a(kCount), b(kCount, 0.5f), sum(kCount);
  for (size_t i = 0; i < kCount; ++i) a[i] = static_cast<float>(i);
  ASSERT_EQ(job.AllReduce(0, a.data(), sum.data(), kCount), ncclSuccess);
  ASSERT_EQ(job.AllReduce(1, b.data(), b.data(), kCount), ncclSuccess);
  job.Synchronize();
  EXPECT_EQ(sum, b);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(b[i], static_cast<float>(i) + 0.5f) << i;
}

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

pid_t StartRank(const ncclUniqueId& id, const char* rank) {
  std::string program = FARANDOLE_FAKE_NCCL_RANK, text = id.internal, number = rank;
  char* arguments[] = {program.data(), text.data(), number.data(), nullptr};
  pid_t child = -1;
  EXPECT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ), 0);
  return child;
}

TEST_F(FakeNcclDataTest, TwoProcessesReduce) {
  const ncclUniqueId id = FakeNcclJob::NewId();
  for (const pid_t child : {StartRank(id, "0"), StartRank(id, "1")}) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace farandole
