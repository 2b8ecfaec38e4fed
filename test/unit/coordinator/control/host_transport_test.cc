#include "coordinator/control/host_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/control/in_process.h"
#include "coordinator/control/rendezvous.h"
#include "core/clock.h"

namespace farandole {
namespace {

using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

/// The ranks of the first of two hosts, or of the only one, stepped by hand. In place of MPI they
/// have the in-process transport.
class HostTransportTest : public ::testing::Test {
 protected:
  /// @param peers  That rank 0 watches.
  void Make(size_t first_size, size_t size, const PeerWatch* peers = nullptr) {
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
                                         rank == 0 ? peers : nullptr));
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

/// A process that lives until it is killed.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ != 0) return;
    for (;;) pause();
  }
  ~Child() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

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

TEST_F(HostTransportTest, ReportsWhoHasDiedAfterItsMessagesAndOnce) {
  Child child;
  FutexDoorbell bell;
  PeerWatch peers(bell);
  ASSERT_TRUE(peers.Add(1, child.pid()));
  Make(2, 2, &peers);
  ASSERT_TRUE(ranks_[1]->Send(0, Message(10)).ok());
  ASSERT_TRUE(ranks_[1]->Send(0, Message(300'000)).ok());  // of this one a part arrives
  const std::string pid = std::to_string(child.pid());
  child.Kill();
  peers.Watch(kNsPerMs);
  EXPECT_EQ(Next(0)->data.size(), 10u);
  const auto lost = Next(0);
  ASSERT_TRUE(lost.has_value());
  EXPECT_EQ(lost->from, 1);
  EXPECT_EQ(lost->lost.code(), Code::kUnavailable);
  EXPECT_EQ(lost->lost.message().find("rank 1 (pid " + pid + " on host "), 0u)
      << lost->lost.message();
  EXPECT_FALSE(Next(0).has_value());
  EXPECT_EQ(ranks_[0]->Send(1, Message(1)).code(), Code::kUnavailable);
}

TEST_F(HostTransportTest, DoesNotReportWhoHasLeft) {
  Child child;
  FutexDoorbell bell;
  PeerWatch peers(bell);
  ASSERT_TRUE(peers.Add(1, child.pid()));
  Make(2, 2, &peers);
  ASSERT_TRUE(ranks_[1]->Send(0, Message(10)).ok());
  ranks_[1]->Leave();
  child.Kill();
  peers.Watch(kNsPerMs);
  EXPECT_EQ(Next(0)->data.size(), 10u);
  EXPECT_FALSE(Next(0).has_value());
  EXPECT_TRUE(ranks_[0]->Send(1, Message(1)).ok());
}

TEST(PeerWatch, EndsItsWatchWhenItIsWoken) {
  FutexDoorbell bell;
  PeerWatch peers(bell);
  peers.Wake();
  peers.Watch(3600 * kNsPerSecond);  // would not return in time otherwise
  EXPECT_EQ(peers.losses(), 0);
}

TEST(PeerWatch, RingsForADeath) {
  Child child;
  FutexDoorbell bell;
  PeerWatch peers(bell);
  ASSERT_TRUE(peers.Add(7, child.pid()));
  const uint32_t ticket = bell.Ticket();
  peers.Watch(kNsPerMs);
  EXPECT_EQ(bell.Ticket(), ticket);
  child.Kill();
  peers.Watch(kNsPerMs);
  EXPECT_NE(bell.Ticket(), ticket);
  EXPECT_EQ(peers.losses(), 1);
  EXPECT_TRUE(peers.IsLost(0));
  peers.Watch(kNsPerMs);
  EXPECT_EQ(peers.losses(), 1);
}

/// Why a watched child is lost that ends in this way.
Status WhyLost(const std::function<void()>& end) {
  FutexDoorbell bell;
  PeerWatch peers(bell);
  int gate[2];
  EXPECT_EQ(pipe(gate), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    char byte = 0;
    (void)!read(gate[0], &byte, 1);
    end();
    _exit(99);
  }
  EXPECT_TRUE(peers.Add(5, pid));
  peers.SetDescribeLast([](int rank, int64_t* age_ns) {
    *age_ns = 300 * kNsPerMs;
    return "allreduce \"x\" of rank " + std::to_string(rank);
  });
  EXPECT_EQ(write(gate[1], "g", 1), 1);
  for (int i = 0; i < 10'000 && peers.losses() == 0; ++i) peers.Watch(kNsPerMs);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  for (const int file : gate) close(file);
  return peers.WhyLost(0);
}

TEST(PeerWatch, SaysHowAProcessHasEnded) {
  const Status killed = WhyLost([] { (void)raise(SIGKILL); });
  EXPECT_EQ(killed.facts().kind, FailureKind::kKilled);
  EXPECT_EQ(killed.facts().number, SIGKILL);
  EXPECT_EQ(killed.facts().host, HostName());
  EXPECT_THAT(killed.message(), HasSubstr(") was killed by signal 9 (Killed)"));
  const Status exited = WhyLost([] { _exit(3); });
  EXPECT_EQ(exited.facts().kind, FailureKind::kExited);
  EXPECT_EQ(exited.facts().number, 3);
  EXPECT_THAT(exited.message(), HasSubstr(") has exited with code 3 before it left the job"));
}

TEST(PeerWatch, SaysWhatALostProcessDidLast) {
  const Status lost = WhyLost([] { _exit(0); });
  EXPECT_EQ(lost.facts().last, "allreduce \"x\" of rank 5");
  EXPECT_EQ(lost.facts().last_age_ns, 300 * kNsPerMs);
  EXPECT_THAT(lost.message(),
              HasSubstr("; its last operation: allreduce \"x\" of rank 5, 0.3 s before"));
}

/// A child with a pulse, watched with a patience of ten periods.
class PulseTest : public ::testing::Test {
 protected:
  PulseTest() {
    EXPECT_TRUE(peers_.Add(3, child_.pid()));
    peers_.UsePulses(pulses_, ranks_, 0, 10 * kNsPerMs);
    pulses_[1].thread = child_.pid();
    pulses_[1].beats = 1;
  }

  void Watch(int periods) {
    for (int i = 0; i < periods; ++i) peers_.Watch(kNsPerMs);
  }
  void Stop(int signal = SIGSTOP) {
    kill(child_.pid(), signal);
    int status = 0;
    ASSERT_EQ(waitpid(child_.pid(), &status, WUNTRACED), child_.pid());
    ASSERT_TRUE(WIFSTOPPED(status));
  }

  Child child_;
  FutexDoorbell bell_;
  PeerWatch peers_{bell_};
  std::array<Pulse, 2> pulses_ = {};
  const std::vector<int> ranks_ = {2, 3};
};

TEST_F(PulseTest, OfAStoppedProcessEndsAndThenItIsLost) {
  Stop();
  Watch(10);
  EXPECT_EQ(peers_.losses(), 0) << "the first period only finds out how far the pulse is";
  const uint32_t ticket = bell_.Ticket();
  Watch(1);
  ASSERT_EQ(peers_.losses(), 1);
  EXPECT_NE(bell_.Ticket(), ticket);
  EXPECT_FALSE(peers_.HasEnded(0));
  const std::string text = peers_.WhyLost(0).message();
  EXPECT_NE(text.find(") is stopped (SIGSTOP or Ctrl-Z); it has not run for "), std::string::npos)
      << text;
  child_.Kill();
  Watch(2);
  EXPECT_EQ(peers_.losses(), 1) << "who is killed later is not lost twice";
  EXPECT_EQ(peers_.WhyLost(0).message(), text);
}

TEST_F(PulseTest, OfARunningProcessKeepsIt) {
  for (int i = 0; i < 30; ++i) {
    ++pulses_[1].beats;
    Watch(1);
  }
  EXPECT_EQ(peers_.losses(), 0);
}

TEST_F(PulseTest, MayNotHaveBegunOrHaveEnded) {
  Stop();
  pulses_[1].beats = 0;
  Watch(30);
  EXPECT_EQ(peers_.losses(), 0);
  EXPECT_GT(pulses_[0].beats, 0u) << "this process's own";
  peers_.EndPulse();
  EXPECT_EQ(pulses_[0].beats, 0u);
}

TEST_F(PulseTest, ThatIsMissedForLongMeansThatTheProcessIsFrozen) {
  Watch(49);
  EXPECT_EQ(peers_.losses(), 0) << "the child sleeps and has no pulse";
  Watch(2);
  ASSERT_EQ(peers_.losses(), 1);
  EXPECT_NE(peers_.WhyLost(0).message().find(") is frozen (state S); "), std::string::npos)
      << peers_.WhyLost(0).message();
}

TEST_F(PulseTest, IsNotMissedWithoutALimit) {
  peers_.UsePulses(pulses_, ranks_, 0, 0);
  Stop();
  Watch(100);
  EXPECT_EQ(peers_.losses(), 0);
}

TEST_F(PulseTest, CarriesTheErrorOfAStuckEngine) {
  FutexDoorbell bell;
  PeerWatch stuck(bell);
  stuck.UsePulses(pulses_, ranks_, 1, 0);
  stuck.Report(Timeout("the engine has been inside one library call for 60000 ms"));
  stuck.Report(Timeout("a later one"));
  Watch(1);
  ASSERT_EQ(peers_.losses(), 1);
  EXPECT_NE(peers_.WhyLost(0).message().find(
                ") failed: the engine has been inside one library call for 60"),
            std::string::npos)
      << peers_.WhyLost(0).message();
}

TEST(PeerWatch, DoesWithoutAProcessThatIsNotThere) {
  FutexDoorbell bell;
  PeerWatch peers(bell);
  EXPECT_FALSE(peers.Add(1, -1));
  EXPECT_EQ(peers.size(), 0u);
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
