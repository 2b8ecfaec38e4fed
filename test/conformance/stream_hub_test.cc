// Two hubs of this process: signs of life, their absence, and errors past the engine.
#include "core/net/stream_hub.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/futex.h"
#include "core/net/listener.h"
#include "test/support/counting_doorbell.h"

namespace farandole {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr int64_t kLongNs = 60 * kNsPerSecond;
constexpr int64_t kPatienceNs = 400 * kNsPerMs;

/// Holds the hub's thread once it is told to: such a rank is silent.
class HoldingDoorbell final : public Doorbell {
 public:
  ~HoldingDoorbell() override { Release(); }
  void Ring() override {
    while (holds_.load() != 0) FutexWait(holds_, 1, kNsPerSecond);
  }
  void Hold() { holds_.store(1); }
  void Release() {
    holds_.store(0);
    FutexWake(holds_, 1);
  }

 private:
  std::atomic<uint32_t> holds_{0};
};

class LastLine final : public Log {
 public:
  bool Enabled(LogLevel) const override { return true; }
  void Write(LogLevel, std::string_view message) override {
    text = message;
    count.fetch_add(1);
    FutexWake(count, 1);
  }
  std::string text;
  std::atomic<uint32_t> count{0};
};

/// What a hub has heard.
class Ear final : public Liveness {
 public:
  void Note(const Status&) override {}
  void Hear(std::span<const std::byte> failure) override {
    heard = {reinterpret_cast<const char*>(failure.data()), failure.size()};
    count.fetch_add(1);
    FutexWake(count, 1);
  }
  void NoteEnd(int) override {}
  bool HasEnded(int) const override { return false; }
  void NoteStopped(int, bool) override {}
  std::string heard;
  std::atomic<uint32_t> count{0};
};

HubOptions OptionsOf(int rank, int64_t patience_ns) {
  HubOptions options;
  options.party.rank = rank;
  options.size = 2;
  options.patience_ns = patience_ns;
  options.clock = &SteadyClock();
  return options;
}

/// Two hubs that are connected both ways, by loopback.
struct Pair {
  explicit Pair(int64_t patience_ns, Doorbell* bell_of_1 = nullptr, Liveness* ear_of_1 = nullptr) {
    for (int rank = 0; rank < 2; ++rank) {
      HubOptions options = OptionsOf(rank, patience_ns);
      if (rank == 1) options.doorbell = bell_of_1;
      if (rank == 1) options.liveness = ear_of_1;
      hubs[rank] = std::move(StreamHub::Create(options).value());
    }
    for (int rank = 0; rank < 2; ++rank) {
      Listening at = std::move(ListenOn({ParseSocketAddress("127.0.0.1:1").value()}, {}).value());
      EXPECT_TRUE(hubs[rank]->Listen(at.sockets.front().Release()).ok());
      hubs[1 - rank]->SetPeer(rank, at.addresses);
    }
    for (int rank = 0; rank < 2; ++rank) hubs[rank]->Connect(1 - rank);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(hubs[rank]->Send(1 - rank, FrameType::kMessage, TextBytes("hello")).ok());
    }
    for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(TextOf(Await(rank)), "hello");
  }

  HubEvent Await(int rank) {
    EXPECT_TRUE(hubs[rank]->WaitForEvent(SteadyClock().NowNs() + kLongNs));
    std::optional<HubEvent> event = hubs[rank]->Next();
    return event ? std::move(*event) : HubEvent();
  }
  static std::string TextOf(const HubEvent& event) {
    return {reinterpret_cast<const char*>(event.data.data()), event.data.size()};
  }

  std::unique_ptr<StreamHub> hubs[2];
};

TEST(StreamHub, ARankThatIsSilentIsLostAndLearnsWhyOnceItGoesOn) {
  HoldingDoorbell bell;
  Pair pair(kPatienceNs, &bell);
  bell.Hold();
  ASSERT_TRUE(pair.hubs[0]->Send(1, FrameType::kMessage, TextBytes("ring")).ok());
  const HubEvent lost = pair.Await(0);
  EXPECT_EQ(lost.kind, HubEvent::Kind::kLost);
  EXPECT_EQ(lost.status.facts().kind, FailureKind::kLinkDown);
  EXPECT_EQ(lost.status.facts().ranks, std::vector<int32_t>{1});
  EXPECT_THAT(lost.status.message(), HasSubstr("cannot be reached from rank 0"));
  EXPECT_TRUE(pair.hubs[0]->Send(1, FrameType::kMessage, TextBytes("lost")).ok());
  bell.Release();
  EXPECT_EQ(Pair::TextOf(pair.Await(1)), "ring");
  EXPECT_EQ(Pair::TextOf(pair.Await(1)), "lost");
}

TEST(StreamHub, WhoeverPollsTakesFramesInTheirOrderAndIsNotRungForEach) {
  CountingDoorbell bell;
  Pair pair(0, &bell);
  const int before = bell.rings();
  constexpr int kFrames = 2000;
  for (int number = 0; number < kFrames; ++number) {
    const std::string text = std::to_string(number);
    ASSERT_TRUE(pair.hubs[0]->Send(1, FrameType::kMessage, TextBytes(text)).ok());
    std::optional<HubEvent> event;
    while (!event) event = pair.hubs[1]->Next();
    ASSERT_EQ(Pair::TextOf(*event), text);
  }
  EXPECT_LT(bell.rings() - before, kFrames);
}

// The thread sleeps without a limit when the stranger is accepted by whoever polls.
TEST(StreamHub, WhoeverPollsLeavesTimersToTheThread) {
  Pair pair(0);
  const SocketAddress at = pair.hubs[0]->Peer(1).front();
  const int stranger = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(connect(stranger, at.data(), at.size()), 0);
  const int64_t until_ns = SteadyClock().NowNs() + kLongNs;
  ssize_t read = 1;
  for (char byte = 0; read != 0 && SteadyClock().NowNs() < until_ns;) {
    EXPECT_FALSE(pair.hubs[1]->Next());
    read = recv(stranger, &byte, 1, MSG_DONTWAIT);
  }
  EXPECT_EQ(read, 0) << "a connection without proof has no limit";
  close(stranger);
}

// As a box on the way does that forgets connections.
TEST(StreamHub, NeitherEndOfABrokenConnectionIsCalledGone) {
  Pair pair(0);
  const sockaddr nowhere{.sa_family = AF_UNSPEC, .sa_data = {}};
  for (int file = 3; file < 1024; ++file) {
    sockaddr_in peer{};
    socklen_t size = sizeof peer;
    const bool is_stream = getpeername(file, reinterpret_cast<sockaddr*>(&peer), &size) == 0 &&
                           peer.sin_family == AF_INET;
    // Sends a reset. ThreadSanitizer takes connect() for a write to what the hub's thread reads.
    if (is_stream) (void)syscall(SYS_connect, file, &nowhere, sizeof nowhere);
  }
  for (int rank = 0; rank < 2; ++rank) {
    const HubEvent lost = pair.Await(rank);
    EXPECT_EQ(lost.kind, HubEvent::Kind::kLost);
    const std::string own = RankName(rank), peer = RankName(1 - rank);
    EXPECT_THAT(lost.status.message(),
                AnyOf(HasSubstr(peer + " and " + own + " lost their connection ("),
                      HasSubstr(peer + " unexpectedly closed its connection to " +
                                own)));  // as that one had lost it
  }
}

TEST(StreamHub, WithoutPatienceNobodyIsSilent) {
  HoldingDoorbell bell;
  Pair pair(0, &bell);
  bell.Hold();
  ASSERT_TRUE(pair.hubs[0]->Send(1, FrameType::kMessage, TextBytes("ring")).ok());
  EXPECT_FALSE(pair.hubs[0]->WaitForEvent(SteadyClock().NowNs() + 2 * kPatienceNs));
  bell.Release();  // before the hub ends
}

TEST(StreamHub, AStreamThatIsNeverEmptyKeepsNothingThatItHasSent) {
  Pair pair(0);
  const std::string megabyte(1 << 20, 'x');
  const auto held = [] { return mallinfo2().uordblks + mallinfo2().hblkhd; };
  const auto send = [&] {
    EXPECT_TRUE(pair.hubs[0]->Send(1, FrameType::kMessage, TextBytes(megabyte)).ok());
  };
  const size_t before = held();
  for (int i = 0; i < 32; ++i) send();  // more than the kernel takes
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(pair.Await(1).data.size(), megabyte.size());
    send();
  }
  EXPECT_LT(held(), before + 160 * megabyte.size());
}

TEST(StreamHub, DoesNotCountWhatStaysOnTheHost) {
  Pair pair(0);
  std::array<std::optional<int>, 2> sockets;
  while (!sockets[0] || !sockets[1]) {
    for (size_t rank = 0; rank < 2; ++rank) {
      const int peer = 1 - static_cast<int>(rank);
      if (!sockets[rank]) sockets[rank] = pair.hubs[rank]->Take({.peer = peer}).value();
    }
    std::this_thread::yield();
  }
  for (const auto& socket : sockets) ASSERT_EQ(fcntl(*socket, F_SETFL, 0), 0);  // blocking
  std::vector<char> data(4 << 20);
  std::thread sender([&] {
    EXPECT_EQ(write(*sockets[0], data.data(), data.size()), static_cast<ssize_t>(data.size()));
  });
  std::vector<char> received(data.size());
  EXPECT_EQ(recv(*sockets[1], received.data(), received.size(), MSG_WAITALL),
            static_cast<ssize_t>(received.size()));
  sender.join();
  EXPECT_EQ(pair.hubs[0]->Use(kNsPerSecond).bytes, 0);
  for (size_t rank = 0; rank < 2; ++rank) {
    pair.hubs[rank]->Unwatch(*sockets[rank]);
    close(*sockets[rank]);
  }
}

TEST(StreamHub, AReportIsHeardAndIsNoEvent) {
  Ear ear;
  Pair pair(0, nullptr, &ear);
  pair.hubs[0]->Report(TextBytes("stuck"));
  while (ear.count.load() == 0) FutexWait(ear.count, 0, kNsPerSecond);
  EXPECT_EQ(ear.heard, "stuck");
  EXPECT_FALSE(pair.hubs[1]->Next().has_value());
}

/// While it exists, this process gets no further descriptor.
class NoDescriptors {
 public:
  NoDescriptors() {
    (void)getrlimit(RLIMIT_NOFILE, &before_);
    const int next = dup(STDERR_FILENO);
    close(next);
    const rlimit none{static_cast<rlim_t>(next), before_.rlim_max};
    (void)setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { (void)setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

/// Ten times as fast.
class FastClock final : public Clock {
 public:
  int64_t NowNs() const override { return 10 * SteadyClock().NowNs(); }
};

/// Rank 0's, which watches nobody.
std::unique_ptr<StreamHub> HubOn(const Clock& clock, Log* log = nullptr) {
  HubOptions options = OptionsOf(0, 0);
  options.clock = &clock;
  options.log = log;
  return std::move(StreamHub::Create(options).value());
}

const char* const kNone = "Too many open files; this process has all ";

TEST(StreamHub, ARankWithoutDescriptorsThatConnectsSaysSoOfItself) {
  const FastClock clock;
  const std::unique_ptr<StreamHub> hub = HubOn(clock);
  hub->SetPeer(1, {ParseSocketAddress("127.0.0.1:1").value()});
  const NoDescriptors none;
  hub->Connect(1);
  ASSERT_TRUE(hub->WaitForEvent(clock.NowNs() + kLongNs));
  const Status status = hub->Next()->status;
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.facts().ranks, std::vector<int32_t>{0});
  EXPECT_THAT(status.message(),
              HasSubstr("rank 0 cannot connect to rank 1 at 127.0.0.1:1: " + std::string(kNone)));
}

TEST(StreamHub, ARankThatCannotAcceptWarnsOnceAndFailsOnlyIfItAwaitsSomebody) {
  const FastClock clock;
  LastLine log;
  const std::unique_ptr<StreamHub> hub = HubOn(clock, &log);
  hub->OpenToJoins(true, 1);
  hub->OpenToJoins(false, 1);  // all have come
  Listening at = std::move(ListenOn({ParseSocketAddress("127.0.0.1:1").value()}, {}).value());
  ASSERT_TRUE(hub->Listen(at.sockets.front().Release()).ok());
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const NoDescriptors none;
  ASSERT_EQ(connect(client, at.addresses[0].data(), at.addresses[0].size()), 0);
  EXPECT_FALSE(hub->WaitForEvent(clock.NowNs() + kNsPerSecond));
  EXPECT_EQ(log.count.load(), 1u);
  EXPECT_THAT(log.text, HasSubstr("rank 0 cannot accept a connection: " + std::string(kNone)));
  hub->Expect(1);
  ASSERT_TRUE(hub->WaitForEvent(clock.NowNs() + kLongNs));
  const HubEvent failed = std::move(*hub->Next());
  EXPECT_EQ(failed.kind, HubEvent::Kind::kLost);
  EXPECT_EQ(failed.status.code(), Code::kResourceExhausted);
  EXPECT_EQ(failed.status.facts().ranks, std::vector<int32_t>{0});
  EXPECT_EQ(log.count.load(), 1u);
  close(client);
}

TEST(StreamHub, ALackThatHarmedNobodyLeavesTheNextOneItsTime) {
  const FastClock clock;
  LastLine log;
  const std::unique_ptr<StreamHub> hub = HubOn(clock, &log);
  Listening at = std::move(ListenOn({ParseSocketAddress("127.0.0.1:1").value()}, {}).value());
  ASSERT_TRUE(hub->Listen(at.sockets.front().Release()).ok());
  hub->Expect(1);
  const int first = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int second = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int last = dup(STDERR_FILENO);
  const NoDescriptors none;
  close(last);
  const auto come = [&](int client) {
    ASSERT_EQ(connect(client, at.addresses[0].data(), at.addresses[0].size()), 0);
  };
  come(first);  // takes the last one, and the hub looks for a further connection
  EXPECT_FALSE(hub->WaitForEvent(clock.NowNs() + 600 * kNsPerMs));  // of this process's time
  EXPECT_GE(log.count.load(), 1u);
  close(first);
  EXPECT_FALSE(hub->WaitForEvent(clock.NowNs() + 100 * kNsPerMs));
  const std::array taken = {dup(STDERR_FILENO), dup(STDERR_FILENO)};  // its ends' descriptors
  come(second);
  EXPECT_FALSE(hub->WaitForEvent(clock.NowNs() + 200 * kNsPerMs));
  EXPECT_TRUE(hub->WaitForEvent(clock.NowNs() + 20 * kNsPerSecond));
  for (const int socket : taken) close(socket);
  close(second);
}

TEST(StreamHub, ARankThatIsOnlyWatchedAndCannotBeConnectedIsNotLost) {
  LastLine log;
  HubOptions options = OptionsOf(0, kPatienceNs);
  options.only_watches = true;
  options.log = &log;
  const std::unique_ptr<StreamHub> hub = std::move(StreamHub::Create(options).value());
  hub->SetPeer(1, {ParseSocketAddress("127.0.0.1:1").value()});  // nobody listens there
  hub->Connect(1);
  while (log.count.load() == 0) FutexWait(log.count, 0, kNsPerSecond);
  hub->Shutdown();
  EXPECT_THAT(log.text, HasSubstr("rank 0 cannot reach rank 1 at 127.0.0.1:1"));
  EXPECT_FALSE(hub->Next().has_value());
}

}  // namespace
}  // namespace farandole
