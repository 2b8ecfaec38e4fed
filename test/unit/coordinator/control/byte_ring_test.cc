#include "coordinator/control/byte_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace farandole {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kCapacity = 64;

class ByteRingTest : public ::testing::Test {
 protected:
  Bytes Read(size_t most) {
    Bytes bytes(most);
    bytes.resize(reader_.Read(bytes));
    return bytes;
  }

  struct alignas(64) Memory {
    std::byte bytes[128 + kCapacity] = {};
  };
  Memory memory_;
  ByteRing writer_{memory_.bytes, kCapacity};
  ByteRing reader_{memory_.bytes, kCapacity};
};

/// The stream's byte at each position differs from those a ring's length away.
std::byte At(size_t position) { return static_cast<std::byte>(position * 31 % 251); }

Bytes Stream(size_t begin, size_t count) {
  Bytes bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = At(begin + i);
  return bytes;
}

TEST_F(ByteRingTest, GivesWhatWasWrittenWhereverTheRingEnds) {
  ASSERT_EQ(ByteRing::Bytes(kCapacity), sizeof(Memory));
  size_t at = 0;
  for (size_t count = 0; count <= kCapacity; ++count) {
    const size_t head = count / 3;
    EXPECT_EQ(writer_.Write(Stream(at, head), Stream(at + head, count - head)), count);
    EXPECT_EQ(Read(kCapacity), Stream(at, count));
    at += count;
  }
}

TEST_F(ByteRingTest, TakesWhatItHasRoomFor) {
  EXPECT_EQ(writer_.Write(Stream(0, 60), {}), 60u);
  EXPECT_EQ(writer_.Write(Stream(60, 3), Stream(63, 10)), 4u);
  EXPECT_EQ(writer_.Write(Stream(64, 3), Stream(67, 10)), 0u);
  EXPECT_EQ(Read(5), Stream(0, 5));
  EXPECT_EQ(writer_.Write(Stream(64, 3), Stream(67, 10)), 5u);
  EXPECT_EQ(Read(100), Stream(5, 64));
  EXPECT_EQ(Read(100), Bytes());
}

TEST_F(ByteRingTest, KeepsTheRequestForRoomUntilItIsTaken) {
  EXPECT_FALSE(reader_.TakeRequest());
  EXPECT_FALSE(writer_.AskForRoom()) << "there is room";
  EXPECT_TRUE(reader_.TakeRequest());
  EXPECT_EQ(writer_.Write(Stream(0, kCapacity), {}), kCapacity);
  EXPECT_TRUE(writer_.AskForRoom());
  EXPECT_TRUE(reader_.TakeRequest());
  EXPECT_FALSE(reader_.TakeRequest());
}

TEST_F(ByteRingTest, CarriesAStreamFromThreadToThread) {
  constexpr size_t kTotal = 200'000;
  std::thread writing([&] {
    std::mt19937 random(1);
    const Bytes all = Stream(0, kTotal);
    for (size_t at = 0; at < kTotal;) {
      const size_t count = std::min<size_t>(random() % 200, kTotal - at);
      const size_t head = std::min<size_t>(random() % 8, count);
      const std::span<const std::byte> rest = std::span(all).subspan(at, count);
      at += writer_.Write(rest.first(head), rest.subspan(head));
      std::this_thread::yield();
    }
  });
  std::mt19937 random(2);
  Bytes all;
  while (all.size() < kTotal) {
    const Bytes some = Read(random() % 100);
    all.insert(all.end(), some.begin(), some.end());
    if (some.empty()) std::this_thread::yield();
  }
  writing.join();
  EXPECT_EQ(all, Stream(0, kTotal));
}

/// The writer sleeps as an engine would, and is rung only if it has asked.
TEST_F(ByteRingTest, LosesNoRequestForRoom) {
  constexpr size_t kTotal = 100'000;
  std::atomic<int> rings{0};
  std::thread writing([&] {
    const Bytes all = Stream(0, kTotal);
    for (size_t at = 0; at < kTotal;) {
      const int before = rings.load();
      at += writer_.Write({}, std::span(all).subspan(at));
      if (at == kTotal || !writer_.AskForRoom()) continue;
      while (rings.load() == before) std::this_thread::yield();  // hangs if a request is lost
    }
  });
  for (size_t at = 0; at < kTotal;) {
    at += Read(1 + at % kCapacity).size();
    if (reader_.TakeRequest()) rings.fetch_add(1);
  }
  writing.join();
}

// Whatever a peer that has gone wrong wrote there, nothing beyond the ring is accessed.
TEST_F(ByteRingTest, BelievesNoCountBeyondItsCapacity) {
  constexpr uint64_t kFar = uint64_t{1} << 40;
  std::memcpy(memory_.bytes, &kFar, sizeof kFar);  // written
  EXPECT_EQ(Read(10 * kCapacity).size(), kCapacity);
  EXPECT_EQ(writer_.Write(Stream(0, 10 * kCapacity), {}), 0u);
}

}  // namespace
}  // namespace farandole
