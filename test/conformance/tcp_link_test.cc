// The link over TCP on real sockets of the loopback interface, moved by one thread.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"
#include "ops/p2p/plane.h"
#include "ops/p2p/tcp/link.h"
#include "ops/p2p/tcp/stream.h"
#include "test/support/loopback_streams.h"

namespace farandole {
namespace {

using Round = P2pLink::Round;
using Group = P2pLink::Group;
using Bytes = std::vector<std::byte>;

constexpr int64_t kPatienceNs = 20 * kNsPerSecond;

Bytes Pattern(size_t size, int seed) {
  Bytes bytes(size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<size_t>(seed));
  }
  return bytes;
}

/// Two ranks, and their links of some sets.
class TcpLinkTest : public ::testing::Test {
 protected:
  void Open(const LoopbackOptions& options = {}) {
    streams_ = MakeLoopbackStreams({&bells_[0], &bells_[1]}, options);
    for (size_t rank = 0; rank < 2; ++rank) {
      LinkOptions link;
      link.doorbell = &bells_[rank];
      factories_.push_back(MakeTcpLinks(*streams_[rank], 0, link));
    }
  }
  P2pLink& Link(size_t rank, uint32_t uid) {
    static constexpr int kRanks[] = {0, 1};
    links_[rank].push_back(factories_[rank](uid, kRanks));
    return *links_[rank].back();
  }
  /// Ends all that rank 1 has.
  void EndPeer() {
    links_[1].clear();
    factories_.pop_back();
  }
  void MoveAll() {
    for (auto& links : links_) {
      for (auto& link : links) (void)link->PollAfterNs();
    }
  }
  bool Await(const std::function<bool()>& condition) {
    const int64_t deadline = SteadyClock().NowNs() + kPatienceNs;
    while (!condition()) {
      if (SteadyClock().NowNs() > deadline) return false;
      MoveAll();
    }
    return true;
  }
  bool AwaitAll(P2pLink& link, int slot, Group group) {
    return Await([&] {
      const Result<bool> complete = link.AllComplete(slot, group);
      EXPECT_TRUE(complete.ok()) << complete.status().ToString();
      return !complete.ok() || complete.value();
    });
  }
  Status AwaitFailure(P2pLink& link) {
    Status failure;
    EXPECT_TRUE(Await([&] {
      failure = link.AllComplete(0, Group::kContributions).status();
      return !failure.ok();
    }));
    return failure;
  }
  /// The socket of rank 1, in the place of a link.
  int TakePeer() {
    std::optional<int> socket;
    EXPECT_TRUE(Await([&] {
      Result<std::optional<int>> taken = streams_[1]->Take({0, 0, 0});
      if (taken.ok() && taken.value()) socket = taken.value();
      return socket.has_value();
    }));
    return socket.value_or(-1);
  }

  FutexDoorbell bells_[2];
  std::vector<std::unique_ptr<DataStreams>> streams_;
  std::vector<P2pLinkFactory> factories_;
  std::vector<std::unique_ptr<P2pLink>> links_[2];
};

void Send(P2pLink& link, int slot, const Bytes& bytes, int to = 1) {
  const Status sent =
      link.Send(slot, Round::kContribution, to, bytes.data(), static_cast<int64_t>(bytes.size()));
  EXPECT_TRUE(sent.ok()) << sent.ToString();
}
void Receive(P2pLink& link, int slot, Bytes& bytes, int from = 0) {
  const Status posted = link.Receive(slot, Round::kContribution, from, bytes.data(),
                                     static_cast<int64_t>(bytes.size()));
  EXPECT_TRUE(posted.ok()) << posted.ToString();
}

TEST_F(TcpLinkTest, CarriesMessagesOfAllLengthsThroughSmallBuffers) {
  Open({1, 4096});
  P2pLink& sender = Link(0, 0);
  P2pLink& receiver = Link(1, 0);
  for (const size_t size : {0u, 1u, 16u, 4079u, 4080u, 4081u, 300'000u}) {
    const Bytes sent = Pattern(size, 3);
    Bytes received(size + 5);
    Receive(receiver, 0, received);
    Send(sender, 0, sent);
    ASSERT_TRUE(AwaitAll(receiver, 0, Group::kContributions)) << size;
    EXPECT_TRUE(AwaitAll(sender, 0, Group::kSends));
    EXPECT_EQ(receiver.BytesFrom(0), static_cast<int64_t>(size));
    EXPECT_TRUE(std::equal(sent.begin(), sent.end(), received.begin())) << size;
  }
}

TEST_F(TcpLinkTest, KeepsTheOrderOfMessagesOnSeveralSockets) {
  Open({3, 8192});
  P2pLink& sender = Link(0, 0);
  P2pLink& receiver = Link(1, 0);
  // The second is short: it takes another socket than its neighbours.
  const size_t sizes[] = {90'000, 100, 120'000, 50'000};
  std::vector<Bytes> sent;
  std::vector<Bytes> received;
  for (int round = 0; round < 3; ++round) {
    sent.clear();
    received.clear();
    for (int slot = 0; slot < kLinkSlots; ++slot) {
      sent.push_back(Pattern(sizes[static_cast<size_t>(slot)], slot + round));
      received.emplace_back(sent.back().size());
    }
    for (int slot = 0; slot < kLinkSlots; ++slot) {
      Receive(receiver, slot, received[static_cast<size_t>(slot)]);
      Send(sender, slot, sent[static_cast<size_t>(slot)]);
    }
    for (int slot = 0; slot < kLinkSlots; ++slot) {
      ASSERT_TRUE(AwaitAll(receiver, slot, Group::kContributions));
      ASSERT_TRUE(AwaitAll(sender, slot, Group::kSends));
    }
    EXPECT_EQ(received, sent) << round;
  }
}

TEST_F(TcpLinkTest, LetsNoSetWaitForReceivesOfAnother) {
  Open({1, 4096});
  P2pLink& early = Link(0, 1);
  P2pLink& late = Link(0, 2);
  P2pLink& awaits = Link(1, 2);
  const Bytes first = Pattern(200'000, 1);
  const Bytes second = Pattern(200'000, 2);
  Bytes received(second.size());
  Send(early, 0, first);
  Send(late, 0, second);
  Receive(awaits, 0, received);
  ASSERT_TRUE(AwaitAll(awaits, 0, Group::kContributions));
  EXPECT_EQ(received, second);
  Receive(Link(1, 1), 0, received);  // a set that this rank had no link of when its message came
  ASSERT_TRUE(AwaitAll(*links_[1].back(), 0, Group::kContributions));
  EXPECT_EQ(received, first);
}

TEST_F(TcpLinkTest, LetsASenderBeNoMoreMessagesAheadThanThereAreSlots) {
  Open();
  P2pLink& sender = Link(0, 1);
  P2pLink& receiver = Link(1, 1);
  const Bytes sent = Pattern(1000, 1);
  for (int slot = 0; slot < kLinkSlots; ++slot) {
    Send(sender, slot, sent);
    ASSERT_TRUE(AwaitAll(sender, slot, Group::kSends));
  }
  Send(sender, 0, sent);
  for (int i = 0; i < 100; ++i) MoveAll();
  EXPECT_FALSE(sender.AllComplete(0, Group::kSends).value());
  Bytes received(sent.size());
  for (int i = 0; i <= kLinkSlots; ++i) {
    Receive(receiver, i % kLinkSlots, received);
    ASSERT_TRUE(AwaitAll(receiver, i % kLinkSlots, Group::kContributions)) << i;
    EXPECT_EQ(std::exchange(received, Bytes(sent.size())), sent);
  }
  EXPECT_TRUE(AwaitAll(sender, 0, Group::kSends));
}

TEST_F(TcpLinkTest, CountsOnWhereSetsShareANumber) {
  Open();
  for (const uint32_t uid : {7u, 7u + kMaxLiveSets}) {
    P2pLink& sender = Link(0, uid);
    P2pLink& receiver = Link(1, uid);
    for (int i = 0; i < 3 * kLinkSlots; ++i) {
      const Bytes sent = Pattern(100, i);
      Bytes received(100);
      Receive(receiver, i % kLinkSlots, received);
      Send(sender, i % kLinkSlots, sent);
      ASSERT_TRUE(AwaitAll(receiver, i % kLinkSlots, Group::kContributions));
      ASSERT_TRUE(AwaitAll(sender, i % kLinkSlots, Group::kSends));
      EXPECT_EQ(received, sent);
    }
    for (auto& links : links_) links.clear();
  }
}

TEST_F(TcpLinkTest, KeepsLittleOfSetsThatHaveEnded) {
  Open();
  constexpr uint32_t kSets = 2000;
  const Bytes sent = Pattern(100, 1);
  size_t before = 0;
  for (uint32_t uid = 0; uid < kSets; ++uid) {
    if (uid == 100) before = mallinfo2().uordblks;
    Bytes received(sent.size());
    P2pLink& sender = Link(0, uid);
    P2pLink& receiver = Link(1, uid);
    Receive(receiver, 0, received);
    Send(sender, 0, sent);
    ASSERT_TRUE(AwaitAll(receiver, 0, Group::kContributions));
    ASSERT_TRUE(AwaitAll(sender, 0, Group::kSends));
    for (auto& links : links_) links.clear();
  }
  EXPECT_LT(mallinfo2().uordblks, before + 200 * kSets);
}

TEST_F(TcpLinkTest, NamesTheRankThatCannotBeReached) {
  Open();
  P2pLink& link = Link(0, 0);
  Bytes received(10);
  Receive(link, 0, received, 1);
  const Bytes sent(10);
  Send(Link(1, 0), 0, sent, 0);
  ASSERT_TRUE(AwaitAll(link, 0, Group::kContributions));  // connected
  Receive(link, 0, received, 1);
  EndPeer();
  const Status failure = AwaitFailure(link);
  EXPECT_EQ(failure.code(), Code::kUnavailable) << failure.ToString();
  EXPECT_NE(failure.message().find("rank 1 and rank 0 lost their data connection"),
            std::string::npos)
      << failure.ToString();
  EXPECT_EQ(failure.facts().ranks, std::vector<int32_t>{1});
  EXPECT_FALSE(link.Send(0, Round::kContribution, 1, received.data(), 10).ok());
}

TEST_F(TcpLinkTest, FailsToWriteToARankThatIsGoneWithoutASignal) {
  Open({1, 4096});
  P2pLink& link = Link(0, 0);
  const Bytes sent(30'000'000);  // more than the sockets hold
  Send(link, 0, sent);
  close(TakePeer());
  Status failure;
  EXPECT_TRUE(Await([&] {
    failure = link.AllComplete(0, Group::kSends).status();
    return !failure.ok();
  }));
  EXPECT_EQ(failure.code(), Code::kUnavailable) << failure.ToString();
  EXPECT_TRUE(link.Cancel());
}

TEST_F(TcpLinkTest, RefusesHeadersThatNobodySendsWhoKeepsToTheProtocol) {
  const auto with = [](auto change) {
    TcpHeader header;
    header.bytes = 10;
    change(header);
    return header;
  };
  const TcpHeader headers[] = {
      with([](TcpHeader& h) { h.set = kMaxLiveSets; }),
      with([](TcpHeader& h) { h.kind = 3; }),
      with([](TcpHeader& h) { h.kind = TcpHeader::kNoMessage; }),
      with([](TcpHeader& h) { h.bytes = UINT32_MAX; }),
      with([](TcpHeader& h) { h.bytes = 11; }),
      with([](TcpHeader& h) { h.sequence = 1 + kLinkSlots; }),
      with([](TcpHeader& h) { h.sequence = UINT16_MAX; }),
      with([](TcpHeader& h) {
        h.posted = {1 + kLinkSlots, 0};
      }),
      with([](TcpHeader& h) {
        h.posted = {0, 1 + kLinkSlots};
      }),
  };
  for (const TcpHeader& header : headers) {
    Open();
    P2pLink& link = Link(0, 0);
    Bytes received(10);
    Receive(link, 0, received, 1);
    const int socket = TakePeer();
    ASSERT_EQ(send(socket, &header, sizeof header, 0), ssize_t{sizeof header});
    const Status failure = AwaitFailure(link);
    EXPECT_EQ(failure.code(), Code::kInternal) << failure.ToString();
    EXPECT_NE(failure.message().find("rank 1"), std::string::npos) << failure.ToString();
    close(socket);
    links_[0].clear();
    factories_.clear();
  }
}

TEST_F(TcpLinkTest, CancelsWhatIsInFlightAndLeavesOtherSetsAlone) {
  Open({1, 4096});
  P2pLink& sender = Link(0, 1);
  P2pLink& receiver = Link(1, 1);
  auto sent = std::make_unique<Bytes>(Pattern(1'000'000, 1));
  auto received = std::make_unique<Bytes>(sent->size());
  Receive(receiver, 0, *received);
  Send(sender, 0, *sent);
  // Partly written, and partly read.
  ASSERT_TRUE(
      Await([&] { return received->front() == sent->front() && received->at(9) != std::byte{0}; }));
  EXPECT_FALSE(sender.AllComplete(0, Group::kSends).value());
  EXPECT_TRUE(sender.Cancel());
  EXPECT_TRUE(receiver.Cancel());
  sent.reset();
  received.reset();
  P2pLink& other_sender = Link(0, 2);
  P2pLink& other_receiver = Link(1, 2);
  const Bytes other = Pattern(70'000, 2);
  Bytes other_received(other.size());
  Send(other_sender, 0, other);
  Receive(other_receiver, 0, other_received);
  ASSERT_TRUE(AwaitAll(other_receiver, 0, Group::kContributions));
  EXPECT_EQ(other_received, other);
}

TEST_F(TcpLinkTest, LeavesNoMemoryBehindWhenABatchIsAbandoned) {
  Open({1, 4096});
  Counters counters;
  const int ranks[] = {0, 1};
  std::vector<float> values(1 << 20);
  const Segment segment{values.data(), values.data(), 1 << 20};
  Batch batch;
  batch.ranks = ranks;
  batch.segments = {&segment, 1};
  batch.count = segment.count;
  {
    const auto plane = MakeP2pPlane("tcp", factories_[0], BestCpuKernels(), &counters);
    ASSERT_TRUE(plane->AddSet(0, ranks, 0).ok());
    Result<PlaneOperation*> operation = plane->Start(batch);
    ASSERT_TRUE(operation.ok());
    // Nobody reads: messages are partly written.
    for (int i = 0; i < 20; ++i) (void)operation.value()->Step();
    operation.value()->Abandon();
    EXPECT_EQ(plane->Start(batch).status().code(), Code::kAborted);
  }
  EXPECT_GT(counters.Get(Counter::kBulkBytesSent), 0);
  EXPECT_EQ(counters.Get(Counter::kQuarantinedBytes), 0);
}

TEST_F(TcpLinkTest, SleepsUntilTheBellRings) {
  Open();
  P2pLink& sender = Link(0, 0);
  P2pLink& receiver = Link(1, 0);
  const Bytes sent(10);
  Bytes received(10);
  for (int i = 0; i < 2; ++i) {  // the sockets are not connected when it first sleeps
    Receive(receiver, 0, received);
    uint32_t ticket = 0;
    ASSERT_TRUE(Await([&] {
      ticket = bells_[1].Ticket();
      return receiver.PollAfterNs() == kByDoorbell;
    }));
    Send(sender, 0, sent);
    int rings = 0;
    while (!receiver.AllComplete(0, Group::kContributions).value()) {
      (void)sender.PollAfterNs();
      bells_[1].Sleep(FutexDoorbell::Listener::kEngine, ticket, kPatienceNs);
      ASSERT_NE(bells_[1].Ticket(), ticket) << "nothing rang";
      ticket = bells_[1].Ticket();
      while (receiver.PollAfterNs() != kByDoorbell &&
             !receiver.AllComplete(0, Group::kContributions).value()) {
        (void)sender.PollAfterNs();
      }
      ASSERT_LT(++rings, 100);
    }
    ASSERT_TRUE(AwaitAll(sender, 0, Group::kSends));
  }
}

}  // namespace
}  // namespace farandole
