#include "coordinator/control/host_transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/control/in_process.h"
#include "coordinator/control/rendezvous.h"
#include "coordinator/liveness/table.h"
#include "core/clock.h"

namespace farandole {
namespace {

using Bytes = std::vector<std::byte>;

/// The ranks of the first of two hosts, or of the only one, stepped by hand. In place of MPI they
/// have the in-process transport.
class HostTransportTest : public ::testing::Test {
 protected:
  /// @param liveness  Of rank 0.
  void Make(size_t first_size, size_t size, const Liveness* liveness = nullptr) {
    const int total = static_cast<int>(size);
    hub_ = std::make_unique<InProcessHub>(total);
    std::vector<int> here;
    std::vector<int> host;
    for (int r = 0; r < total; ++r) host.push_back(r < static_cast<int>(first_size) ? 0 : 1);
    for (int r = 0; r < static_cast<int>(first_size); ++r) here.push_back(r);
    bells_ = std::vector<FutexDoorbell>(first_size);
    std::string address;
    for (const int rank : here) {
      const HostMemory::User user{rank, here, MailboxBytes(first_size)};
      memory_.push_back(
          (rank == 0 ? HostMemory::Create(user) : HostMemory::Open(address, user)).value());
      if (rank == 0) address = memory_.back()->address();
      memory_.back()->UseBell(bells_[static_cast<size_t>(rank)]);
    }
    const std::vector<int> parent = MakeTree(host);
    for (const int rank : here) {
      const auto r = static_cast<size_t>(rank);
      ranks_.push_back(MakeHostTransport(hub_->Create(rank, &bells_[r]), memory_[r],
                                         rank == 0 ? liveness : nullptr));
      ranks_.back()->SetNeighbours(Neighbours(parent, rank));
    }
  }

  std::optional<Transport::Incoming> Next(size_t rank) { return ranks_[rank]->Poll().value(); }

  std::unique_ptr<InProcessHub> hub_;
  std::vector<FutexDoorbell> bells_;
  std::vector<std::shared_ptr<HostMemory>> memory_;
  std::vector<std::unique_ptr<Transport>> ranks_;
};

TEST(MailboxBytes, AndTheSlotsOfAllRanksFitIntoMemoryThatAHostCanSpare) {
  HostMemory::Options options;
  options.cache_bytes = int64_t{1} << 30;
  const auto all = HostMemory::Create({0, {0}}, options).value();
  const auto memory = [&](size_t n) { return MailboxBytes(n) + all->LayoutOf(n).Bytes(); };
  constexpr size_t kMiB = 1024 * 1024;
  EXPECT_LE(memory(2), 3 * kMiB);
  EXPECT_LE(memory(8), 12 * kMiB);
  EXPECT_LE(memory(64), 64 * kMiB);
}

Bytes Message(size_t size) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 % 253);
  return bytes;
}

TEST_F(HostTransportTest, RingsTheReceiverForAMessage) {
  Make(2, 2);
  const uint32_t ticket = bells_[0].Ticket();
  ASSERT_TRUE(ranks_[1]->Send(0, Message(10)).ok());
  EXPECT_NE(bells_[0].Ticket(), ticket);
  EXPECT_TRUE(ranks_[1]->Drained()) << "it lies in the memory of both";
  const auto incoming = Next(0);
  ASSERT_TRUE(incoming.has_value());
  EXPECT_EQ(incoming->from, 1);
  EXPECT_EQ(Bytes(incoming->data.begin(), incoming->data.end()), Message(10));
  EXPECT_FALSE(Next(0).has_value());
}

TEST_F(HostTransportTest, SendsWhatARingCannotTakeSliceBySliceWhenItIsRung) {
  Make(2, 2);
  const Bytes large = Message(300'000);
  ASSERT_TRUE(ranks_[1]->Send(0, large).ok());
  ASSERT_TRUE(ranks_[1]->Send(0, Message(3)).ok());
  EXPECT_FALSE(ranks_[1]->Drained());
  std::optional<Transport::Incoming> incoming;
  for (int slices = 0;; ++slices) {
    ASSERT_LT(slices, 10);
    const uint32_t ticket = bells_[1].Ticket();
    incoming = Next(0);
    if (incoming.has_value()) break;
    EXPECT_NE(bells_[1].Ticket(), ticket) << "there is room: the sender is rung";
    EXPECT_FALSE(Next(1).has_value());  // moves the next slice
  }
  EXPECT_EQ(Bytes(incoming->data.begin(), incoming->data.end()), large);
  while (!ranks_[1]->Drained()) EXPECT_FALSE(Next(1).has_value());
  incoming = Next(0);
  ASSERT_TRUE(incoming.has_value());
  EXPECT_EQ(Bytes(incoming->data.begin(), incoming->data.end()), Message(3));
}

TEST_F(HostTransportTest, RefusesALengthThatNobodySends) {
  Make(2, 2);
  const Bytes message = Message(40);
  ASSERT_TRUE(ranks_[1]->Send(0, message).ok());
  const std::span<std::byte> shared(memory_[0]->mailboxes(), MailboxBytes(2));
  const auto body = std::search(shared.begin(), shared.end(), message.begin(), message.end());
  ASSERT_NE(body, shared.end());
  std::memset(&*body - sizeof(uint32_t), 0xff, sizeof(uint32_t));
  EXPECT_EQ(ranks_[0]->Poll().status().ToString(),
            Internal("control message from rank 1: 4294967295 bytes").ToString());
}

TEST_F(HostTransportTest, NeedsNoPollsOnceAllRanksOfTheOnlyHostHaveStarted) {
  Make(2, 2);
  for (const auto& rank : ranks_) {
    EXPECT_EQ(rank->PollAfterNs(true, 0), kByDoorbell);
    EXPECT_EQ(rank->PollAfterNs(false, kNsPerSecond), kByDoorbell);
  }
}

TEST_F(HostTransportTest, OnSeveralHostsWhoIsNoLeaderPollsOnlyWhileItWaits) {
  Make(2, 3);
  EXPECT_EQ(ranks_[1]->PollAfterNs(false, kNsPerSecond), kByDoorbell);
  EXPECT_EQ(ranks_[1]->PollAfterNs(true, 0), 100 * kNsPerMs);
  ASSERT_TRUE(hub_->Create(2, nullptr)->Send(1, Message(5)).ok());
  EXPECT_EQ(Next(1)->from, 2) << "messages from other hosts arrive";
}

TEST_F(HostTransportTest, ReadsAllOfAProcessThatHasEndedAndSendsItNothing) {
  LivenessTable table;
  Make(2, 2, &table);
  ASSERT_TRUE(ranks_[1]->Send(0, Message(10)).ok());
  ASSERT_TRUE(ranks_[1]->Send(0, Message(300'000)).ok());  // of this one a part arrives
  ASSERT_TRUE(ranks_[0]->Send(1, Message(300'000)).ok());
  EXPECT_FALSE(ranks_[0]->Drained());
  table.NoteEnd(1);
  EXPECT_EQ(Next(0)->data.size(), 10u);
  EXPECT_FALSE(Next(0).has_value());
  EXPECT_TRUE(ranks_[0]->Send(1, Message(300'000)).ok());
  EXPECT_TRUE(ranks_[0]->Drained());
}

TEST(MailboxBytes, OfARankGrowNoFasterThanItsPeers) {
  const auto without_flights = [](size_t ranks) {
    return MailboxBytes(ranks) - ranks * sizeof(FlightRing);
  };
  EXPECT_LT(without_flights(2), 2u * 140'000);
  EXPECT_LT(without_flights(64), 64u * 160'000);
  EXPECT_LT(without_flights(256), 256u * 256 * 1'200);
}

}  // namespace
}  // namespace farandole
