#include "coordinator/liveness/peer_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "coordinator/control/frame_coalescer.h"
#include "coordinator/liveness/table.h"
#include "core/clock.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

TEST(PeerWatch, EndsItsWatchWhenItIsWoken) {
  LivenessTable table;
  PeerWatch peers(table);
  peers.Wake();
  peers.Watch(3600 * kNsPerSecond);  // would not return in time otherwise
  EXPECT_EQ(table.news(), 0);
}

TEST(PeerWatch, NotesADeathOnceAndRings) {
  Child child;
  FutexDoorbell bell;
  LivenessTable table(&bell);
  PeerWatch peers(table);
  ASSERT_TRUE(peers.Add(7, child.pid()));
  const uint32_t ticket = bell.Ticket();
  peers.Watch(kNsPerMs);
  EXPECT_EQ(bell.Ticket(), ticket);
  child.Kill();
  peers.Watch(kNsPerMs);
  EXPECT_NE(bell.Ticket(), ticket);
  EXPECT_EQ(table.news(), 1);
  EXPECT_TRUE(table.HasEnded(7));
  peers.Watch(kNsPerMs);
  EXPECT_EQ(table.news(), 1);
}

/// Why a watched child is lost that ends in this way.
Status WhyLost(const std::function<void()>& end) {
  LivenessTable table;
  PeerWatch peers(table);
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
  for (int i = 0; i < 10'000 && table.news() == 0; ++i) peers.Watch(kNsPerMs);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  for (const int file : gate) close(file);
  return table.Judge().error;
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
  LivenessTable table_{&bell_};
  PeerWatch peers_{table_};
  std::array<Pulse, 2> pulses_ = {};
  const std::vector<int> ranks_ = {2, 3};
};

TEST_F(PulseTest, OfAStoppedProcessEndsAndThenItIsLost) {
  Stop();
  Watch(10);
  EXPECT_EQ(table_.news(), 0) << "the first period only finds out how far the pulse is";
  const uint32_t ticket = bell_.Ticket();
  Watch(1);
  ASSERT_EQ(table_.news(), 1);
  EXPECT_NE(bell_.Ticket(), ticket);
  EXPECT_FALSE(table_.HasEnded(3));
  const std::string text = table_.Judge().error.message();
  EXPECT_NE(text.find(") is stopped (SIGSTOP or Ctrl-Z); it has not run for "), std::string::npos)
      << text;
  child_.Kill();
  Watch(2);
  EXPECT_TRUE(table_.HasEnded(3));
  EXPECT_EQ(table_.news(), 1) << "who is killed later is not lost twice";
  EXPECT_EQ(table_.Judge().error.message(), text);
}

TEST_F(PulseTest, OfAStoppedProcessIsMissedByWhoEndsForAnotherReasonMeanwhile) {
  Stop();
  Watch(5);
  EXPECT_THAT(table_.absent().silent, IsEmpty());
  Watch(1);
  EXPECT_THAT(table_.absent().silent, ElementsAre(3));
  EXPECT_EQ(table_.news(), 0);
  table_.Note(LostConnection(2, 4, "connection", "reset"));
  EXPECT_THAT(table_.absent().silent, ElementsAre(3));
  ++pulses_[1].beats;
  Watch(1);
  EXPECT_THAT(table_.absent().silent, IsEmpty()) << "it goes on";
}

TEST_F(PulseTest, OfARunningProcessKeepsIt) {
  for (int i = 0; i < 30; ++i) {
    ++pulses_[1].beats;
    Watch(1);
  }
  EXPECT_EQ(table_.news(), 0);
}

TEST_F(PulseTest, MayNotHaveBegunOrHaveEnded) {
  Stop();
  pulses_[1].beats = 0;
  Watch(30);
  EXPECT_EQ(table_.news(), 0);
  EXPECT_GT(pulses_[0].beats, 0u) << "this process's own";
  peers_.EndPulse();
  EXPECT_EQ(pulses_[0].beats, 0u);
}

TEST_F(PulseTest, ThatIsMissedForLongMeansThatTheProcessIsFrozen) {
  Watch(49);
  EXPECT_EQ(table_.news(), 0) << "the child sleeps and has no pulse";
  Watch(2);
  ASSERT_EQ(table_.news(), 1);
  EXPECT_NE(table_.Judge().error.message().find(") is frozen (state S); "), std::string::npos)
      << table_.Judge().error.message();
}

TEST_F(PulseTest, IsNotMissedWithoutALimit) {
  peers_.UsePulses(pulses_, ranks_, 0, 0);
  Stop();
  Watch(100);
  EXPECT_EQ(table_.news(), 0);
}

TEST_F(PulseTest, CarriesTheErrorOfAStuckEngine) {
  LivenessTable own;
  PeerWatch stuck(own);
  stuck.UsePulses(pulses_, ranks_, 1, 0);
  const Status error = Timeout("the engine has been inside one library call for 60000 ms");
  stuck.Report(EncodeFailure(3, FailedHere(3, error), false));
  stuck.Report(EncodeFailure(3, FailedHere(3, Timeout("a later one")), false));
  Watch(1);
  EXPECT_EQ(table_.news(), 1);
  const LivenessTable::Cause cause = table_.Judge();
  EXPECT_TRUE(cause.is_shared);
  EXPECT_EQ(cause.error.message(), "rank 3 failed: " + error.message());
  EXPECT_EQ(cause.error.facts().pid, getpid());
}

TEST_F(PulseTest, SaysWhoHasLeftAndMayEnd) {
  pulses_[1].left = 1;
  child_.Kill();
  Watch(1);
  EXPECT_TRUE(table_.HasEnded(3));
  EXPECT_EQ(table_.news(), 0);
}

TEST(PeerWatch, DoesWithoutAProcessThatIsNotThere) {
  LivenessTable table;
  PeerWatch peers(table);
  EXPECT_FALSE(peers.Add(1, -1));
  peers.Watch(kNsPerMs);
  EXPECT_EQ(table.news(), 0);
}

}  // namespace
}  // namespace farandole
