#include "core/doorbell.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <new>
#include <thread>

namespace farandole {
namespace {

using Listener = FutexDoorbell::Listener;

TEST(FutexDoorbell, ReturnsAtOnceWhenItRangAfterTheTicket) {
  FutexDoorbell bell;
  const uint32_t ticket = bell.Ticket();
  bell.Ring();
  bell.Sleep(Listener::kEngine, ticket, -1);  // would never return otherwise
  EXPECT_NE(bell.Ticket(), ticket);
}

TEST(FutexDoorbell, PaysNoWakeUpWhileNobodySleeps) {
  FutexDoorbell bell;
  for (int i = 0; i < 100; ++i) bell.Ring();
  EXPECT_EQ(bell.wakes(), 0);
}

TEST(FutexDoorbell, IsRungOnlyIfItsListenerMaySleep) {
  FutexDoorbell bell;
  bell.RingIfAsleep();
  EXPECT_EQ(bell.Ticket(), 1u) << "nobody has said to be up";
  bell.StayAwake();
  for (int i = 0; i < 100; ++i) bell.RingIfAsleep();
  EXPECT_EQ(bell.Ticket(), 1u);
  EXPECT_FALSE(bell.MaySleep()) << "it has to look once more";
  EXPECT_TRUE(bell.MaySleep());
  bell.RingIfAsleep();
  EXPECT_EQ(bell.Ticket(), 2u);
}

TEST(FutexDoorbell, LetsNobodySleepOnceItIsClosed) {
  FutexDoorbell bell;
  bell.Close();  // the engine has looked whether to stop, but has no ticket yet
  bell.Sleep(Listener::kEngine, bell.Ticket(), -1);  // would never return otherwise
  bell.Sleep(Listener::kCaller, bell.Ticket(), -1);
}

TEST(FutexDoorbell, WakesBothSleepersWhenItIsClosed) {
  FutexDoorbell bell;
  const auto sleep = [&](Listener listener) { bell.Sleep(listener, bell.Ticket(), -1); };
  std::thread engine(sleep, Listener::kEngine);
  std::thread caller(sleep, Listener::kCaller);
  bell.Close();
  engine.join();
  caller.join();
}

TEST(FutexDoorbell, ReturnsWhenTheTimeIsUp) {
  FutexDoorbell bell;
  bell.Sleep(Listener::kEngine, bell.Ticket(), 1000);
  EXPECT_EQ(bell.wakes(), 0);
}

/// Sleeps at `listener` until `stop`, counting how often it looked; the loop an engine runs.
class Sleeper {
 public:
  Sleeper(FutexDoorbell& bell, Listener listener)
      : bell_(bell), listener_(listener), thread_([this] { Loop(); }) {}
  ~Sleeper() { Stop(); }
  void Expect(int work) {
    while (done_.load() < work) std::this_thread::yield();
  }
  void Post() { posted_.fetch_add(1); }
  /// Ends the loop; how often it looked.
  int Stop() {
    stop_.store(true);
    bell_.Wake(listener_);
    if (thread_.joinable()) thread_.join();
    return looks_.load();
  }

 private:
  void Loop() {
    while (!stop_.load()) {
      looks_.fetch_add(1);
      const uint32_t ticket = bell_.Ticket();
      done_.store(posted_.load());
      if (stop_.load()) return;
      bell_.Sleep(listener_, ticket, -1);
    }
  }

  FutexDoorbell& bell_;
  const Listener listener_;
  std::atomic<int> posted_{0};
  std::atomic<int> done_{0};
  std::atomic<int> looks_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST(FutexDoorbell, LosesNoRingOfManyWhileTheSleeperGoesToSleepAndWakes) {
  FutexDoorbell bell;
  Sleeper engine(bell, Listener::kEngine);
  for (int i = 1; i <= 2000; ++i) {
    engine.Post();
    bell.Ring();
    engine.Expect(i);  // hangs, and the test times out, if a ring is lost
  }
}

// Written between the sleeper's look and its sleep, a turn is found by its second look, or rung
// for.
TEST(FutexDoorbell, LosesNothingThatIsRungOnlyForWhoMaySleep) {
  constexpr int kTurns = 5000;
  FutexDoorbell bells[2];
  std::atomic<int> turns{0};
  // Each takes every second turn; one that is lost makes both sleep for ever.
  const auto play = [&](int me) {
    for (;;) {
      const uint32_t ticket = bells[me].Ticket();
      const int seen = turns.load(std::memory_order_acquire);
      if (seen < kTurns && seen % 2 == me) {
        turns.store(seen + 1, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);
        bells[1 - me].RingIfAsleep();
        bells[me].StayAwake();
      } else if (seen >= kTurns) {
        return;
      } else if (bells[me].MaySleep()) {
        bells[me].Sleep(Listener::kEngine, ticket, -1);
      }
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_LE(bells[0].Ticket() + bells[1].Ticket(), static_cast<uint32_t>(kTurns));
}

// A ring that the sleeper has seen must not take away what the next ring needs to wake it.
TEST(FutexDoorbell, LosesNoRingOfSeveralThreads) {
  FutexDoorbell bell;
  Sleeper engine(bell, Listener::kEngine);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) bell.Ring();
  });
  for (int i = 1; i <= 2000; ++i) {
    engine.Post();
    bell.Ring();
    engine.Expect(i);
  }
  stop.store(true);
  other.join();
  for (int i = 2001; i <= 2100; ++i) {
    engine.Post();
    bell.Ring();
    engine.Expect(i);
  }
}

TEST(FutexDoorbell, WakesOnlyTheListener) {
  FutexDoorbell::State state;
  FutexDoorbell bell(state);
  Sleeper engine(bell, Listener::kEngine);
  Sleeper caller(bell, Listener::kCaller);
  bell.Listen(Listener::kCaller);
  const auto& slot = state.slots[static_cast<uint32_t>(Listener::kEngine)];
  while (slot.sleeping.load() == 0) std::this_thread::yield();
  for (int i = 1; i <= 200; ++i) {
    caller.Post();
    bell.Ring();
    caller.Expect(i);
  }
  // One look before it slept, and one more if the first ring came just before it was in the futex.
  EXPECT_LE(engine.Stop(), 2);
}

TEST(FutexDoorbell, WakesTheEngineBySummonsOnlyWhileNobodyListens) {
  FutexDoorbell::State state;
  FutexDoorbell bell(state);
  bell.Listen(Listener::kNobody);
  Sleeper engine(bell, Listener::kEngine);
  const auto& slot = state.slots[static_cast<uint32_t>(Listener::kEngine)];
  while (slot.sleeping.load() == 0) std::this_thread::yield();
  const int64_t wakes = bell.wakes();
  for (int i = 0; i < 100; ++i) bell.Ring();
  EXPECT_EQ(bell.wakes(), wakes);
  for (int i = 1; i <= 200; ++i) {
    engine.Post();
    bell.Summon();
    engine.Expect(i);
  }
}

TEST(FutexDoorbell, WakesASleeperWhoeverListensWhenAskedTo) {
  FutexDoorbell bell;
  Sleeper engine(bell, Listener::kEngine);
  bell.Listen(Listener::kCaller);
  for (int i = 1; i <= 200; ++i) {
    engine.Post();
    bell.Wake(Listener::kEngine);
    engine.Expect(i);
  }
}

/// Ping-pong between this process and one that it forks: each sleeps on its own doorbell and rings
/// the other's, through memory that both have mapped.
TEST(FutexDoorbell, LosesNoRingBetweenProcesses) {
  struct Shared {
    FutexDoorbell::State states[2];
    std::atomic<int> turns{0};
  };
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& shared = *new (memory) Shared();
  constexpr int kTurns = 2000;
  // Takes every second turn; a ring that is lost makes both sleep for ever.
  const auto play = [&shared](int me) {
    FutexDoorbell mine;
    mine.MoveTo(shared.states[me]);
    FutexDoorbell theirs(shared.states[1 - me]);
    for (;;) {
      const uint32_t ticket = mine.Ticket();
      const int turns = shared.turns.load();
      if (turns >= kTurns) break;
      if (turns % 2 == me) {
        shared.turns.store(turns + 1);
        theirs.Ring();
      } else {
        mine.Sleep(Listener::kEngine, ticket, -1);
      }
    }
    theirs.Ring();
  };
  const pid_t child = fork();
  if (child == 0) {
    play(1);
    _exit(0);
  }
  play(0);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_GT(shared.states[0].wakes + shared.states[1].wakes, 0);
  munmap(memory, sizeof(Shared));
}

TEST(FutexDoorbell, KeepsRingsFromBeforeItMoved) {
  FutexDoorbell::State state;
  FutexDoorbell(state).Ring();
  FutexDoorbell bell;
  const uint32_t ticket = bell.Ticket();
  bell.MoveTo(state);
  EXPECT_NE(bell.Ticket(), ticket);
  bell.Sleep(Listener::kEngine, ticket, -1);  // would never return otherwise
}

}  // namespace
}  // namespace farandole
