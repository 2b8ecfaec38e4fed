// Whoever connects to a rank's port without the job's key disturbs no rank.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "core/net/frames.h"
#include "core/net/handshake.h"
#include "test/support/tcp_ranks.h"

namespace farandole {
namespace {

/// A blocking connection of a stranger.
class Stranger {
 public:
  explicit Stranger(const SocketAddress& to) : socket_(socket(to.family(), SOCK_STREAM, 0)) {
    connected_ = connect(socket_, to.data(), to.size()) == 0;
  }
  ~Stranger() { close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;
  bool connected() const { return connected_; }
  void Say(ByteSpan bytes) const { (void)!send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  /// Waits up to 30 s for the next `most` bytes. Empty: the connection was closed, or time is up.
  std::vector<std::byte> Hear(size_t most) const {
    std::vector<std::byte> bytes(most);
    pollfd ready{socket_, POLLIN, 0};
    if (poll(&ready, 1, 30'000) <= 0) return {};
    const ssize_t count = recv(socket_, bytes.data(), most, 0);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
    return bytes;
  }
  /// Whether the other end closes within 30 s.
  bool IsClosed() const {
    pollfd ready{socket_, POLLIN, 0};
    while (poll(&ready, 1, 30'000) > 0) {
      if (Hear(256).empty()) return true;
    }
    return false;
  }
  bool IsClosedYet() const {
    pollfd ready{socket_, POLLIN, 0};
    return poll(&ready, 1, 0) > 0 && Hear(256).empty();
  }

 private:
  int socket_;
  bool connected_ = false;
};

/// Two ranks that gather while strangers visit rank 0, before the job starts and after.
class TcpStrangers : public testing::Test {
 protected:
  void Visit(const std::function<void(const SocketAddress&)>& visit) {
    const LoopbackListener root;
    std::atomic<bool> ends{false};
    const std::vector<Status> outcomes = OnThreads(3, [&](int thread) -> Status {
      if (thread == 2) return visit(root.address), ends = true, Status();
      // Rank 1 comes late: strangers are there first.
      if (thread == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      TcpRank me;
      FARANDOLE_RETURN_IF_ERROR(JoinTestJob(me, TestNetwork(thread, 2, root)));
      for (bool last = false; !last;) {
        Result<std::vector<std::string>> all =
            me.transport->Allgather(ends ? "end" : "go on", 120 * kNsPerSecond);
        if (!all.ok()) return all.status();
        last = std::ranges::count(all.value(), "end") > 0;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return Status();
    });
    for (const Status& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.ToString();
  }
};

Party TestParty() {
  Party party{.rank = 1};
  std::ranges::fill(party.key, std::byte{'k'});
  const Digest digest = Sha256({TextBytes(""), TextBytes("/"), TextBytes("2")});
  std::memcpy(&party.job, digest.data(), sizeof party.job);
  return party;
}

TEST_F(TcpStrangers, GarbageAndOtherProtocolsAreClosedAtOnce) {
  Visit([](const SocketAddress& address) {
    for (int i = 0; i < 20; ++i) {
      const Stranger web(address);
      web.Say(TextBytes("GET / HTTP/1.1\r\nHost: farandole\r\n\r\n"));
      EXPECT_TRUE(web.IsClosed());
      const Stranger noise(address);
      std::array<std::byte, 200> bytes;
      FillRandom(bytes);
      noise.Say(bytes);
      EXPECT_TRUE(noise.IsClosed());
    }
  });
}

TEST_F(TcpStrangers, WhoSaysNothingOrHardlyAnythingIsClosedIn2Seconds) {
  Visit([](const SocketAddress& address) {
    const Stranger silent(address);
    const Stranger slow(address);
    Handshake handshake = Handshake::Connect(TestParty(), {StreamRole::kControl, 1}, 0);
    slow.Say(ByteSpan(handshake.TakeOutput()).first(31));
    const int64_t begin_ns = SteadyClock().NowNs();
    EXPECT_TRUE(silent.IsClosed());
    EXPECT_TRUE(slow.IsClosed());
    EXPECT_GT(SteadyClock().NowNs() - begin_ns, kNsPerSecond);
  });
}

TEST_F(TcpStrangers, TheOldestMakesWayEvenIfAYoungerOneIsSilent) {
  Visit([](const SocketAddress& address) {
    std::vector<std::unique_ptr<Stranger>> slow;
    for (int i = 0; i < 63; ++i) {
      slow.push_back(std::make_unique<Stranger>(address));
      Handshake handshake = Handshake::Connect(TestParty(), {StreamRole::kControl, 1}, 0);
      slow.back()->Say(ByteSpan(handshake.TakeOutput()).first(31));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // all are older than 100 ms
    const Stranger silent(address);
    const Stranger further(address);
    EXPECT_TRUE(slow.front()->IsClosed());
    EXPECT_FALSE(silent.IsClosedYet());
  });
}

TEST_F(TcpStrangers, TwoHundredSilentConnectionsKeepNobodyOut) {
  Visit([](const SocketAddress& address) {
    std::vector<std::unique_ptr<Stranger>> crowd;
    for (int i = 0; i < 200; ++i) crowd.push_back(std::make_unique<Stranger>(address));
    for (const auto& one : crowd) EXPECT_TRUE(one->connected());
    for (const auto& one : crowd) EXPECT_TRUE(one->IsClosed());
  });
}

TEST_F(TcpStrangers, AWrongKeyAndAnotherVersionAreRefused) {
  Visit([](const SocketAddress& address) {
    Party party = TestParty();
    party.key[0] = std::byte{'x'};
    const Stranger wrong(address);
    Handshake handshake = Handshake::Connect(party, {StreamRole::kJoin, 1}, 0);
    wrong.Say(handshake.TakeOutput());
    while (handshake.wanted() > 0) {
      const std::vector<std::byte> answer = wrong.Hear(handshake.wanted());
      if (answer.empty()) break;
      handshake.Take(answer);
    }
    // Once the job has started rank 0 says so before it comes to the key.
    EXPECT_TRUE(handshake.refusal() == Refusal::kWrongKey ||
                handshake.refusal() == Refusal::kNotJoining);
    wrong.Say(handshake.TakeOutput());
    EXPECT_TRUE(wrong.IsClosed());

    const Stranger other(address);
    std::vector<std::byte> hello =
        Handshake::Connect(TestParty(), {StreamRole::kControl, 1}, 0).TakeOutput();
    hello[2] = std::byte{kNetVersion + 1};
    other.Say(hello);
    EXPECT_TRUE(other.IsClosed());
  });
}

// A recorded connection, played again: hello, proof and what followed.
TEST_F(TcpStrangers, WhatWasRecordedIsWorthNothing) {
  Visit([](const SocketAddress& address) {
    for (int i = 0; i < 5; ++i) {
      const Stranger thief(address);
      Handshake handshake = Handshake::Connect(TestParty(), {StreamRole::kJoin, 1}, 0);
      std::vector<std::byte> record = handshake.TakeOutput();
      record.resize(record.size() + sizeof(Digest) + 100, std::byte{7});
      thief.Say(record);
      EXPECT_TRUE(thief.IsClosed());
    }
  });
}

TEST_F(TcpStrangers, WhoClosesInTheMiddleIsForgotten) {
  Visit([](const SocketAddress& address) {
    for (int i = 0; i < 100; ++i) {
      const Stranger stranger(address);
      Handshake handshake = Handshake::Connect(TestParty(), {StreamRole::kControl, 1}, 0);
      stranger.Say(ByteSpan(handshake.TakeOutput()).first(static_cast<size_t>(i % 32)));
    }
  });
}

// All ranks of a job on one host, over real connections.
TEST(TcpNetwork, FiveHundredRanksJoin) {
#ifdef FARANDOLE_SANITIZE_THREAD
  constexpr int kRanks = 60;  // threads are costly there
#else
  constexpr int kRanks = 500;
#endif
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 16 * kRanks);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_cur < 16 * kRanks) GTEST_SKIP() << "too few descriptors are allowed";
  const LoopbackListener root;
  const int64_t begin_ns = SteadyClock().NowNs();
  const std::vector<Status> outcomes = OnThreads(kRanks, [&](int rank) -> Status {
    TcpRank me;
    FARANDOLE_RETURN_IF_ERROR(JoinTestJob(me, TestNetwork(rank, kRanks, root)));
    Result<std::vector<std::string>> all =
        me.transport->Allgather(std::to_string(rank), 120 * kNsPerSecond);
    if (!all.ok()) return all.status();
    return all.value().back() == std::to_string(kRanks - 1) ? Status() : Internal("wrong texts");
  });
  const int64_t took_ns = SteadyClock().NowNs() - begin_ns;
  for (const Status& outcome : outcomes) ASSERT_TRUE(outcome.ok()) << outcome.ToString();
  EXPECT_LT(took_ns, 60 * kNsPerSecond);
  RecordProperty("milliseconds", static_cast<int>(took_ns / kNsPerMs));
}

}  // namespace
}  // namespace farandole
