#include "coordinator/engine/progress_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "core/futex.h"

namespace farandole {
namespace {

using Listener = FutexDoorbell::Listener;

constexpr int64_t kEngineLockRetryNs =
    5 * kNsPerMs;  // the engine looks again while a caller runs in its place
constexpr int64_t kStopNapNs = 10 * kNsPerMs;
constexpr int64_t kNapNs = 20 * kNsPerUs;  // shorter sleeps cost more than they save: yield instead
// A peer on another core answers in less. After that it may wait for this very core.
constexpr int64_t kPauseNs = 20 * kNsPerUs;

/// Tells the core that this thread polls memory.
void Pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ProgressThread::ProgressThread(EngineLoop& loop, const EngineParts& parts,
                               const SharedParts& shared, int64_t spin_ns)
    : loop_(loop),
      doorbell_(*parts.doorbell),
      clock_(*parts.clock),
      lifecycle_(shared.lifecycle),
      gpu_(shared.gpu),
      submissions_(shared.submissions),
      callers_(shared.callers),
      spin_ns_(spin_ns) {}

// A thread that Stop has left behind has ended by now, or the owner would keep the engine: the load
// orders what it wrote before the destruction of the parts.
ProgressThread::~ProgressThread() { (void)ended_.load(); }

void ProgressThread::Start() {
  thread_ = std::thread([this] { Loop(); });
  (void)pthread_setname_np(thread_.native_handle(), "farandole-eng");  // for top and gdb
}

// The ticket comes before the iteration: after a ring in between Sleep returns at once, so no
// wake-up is lost. While a caller runs the loop this thread sleeps; HandBack wakes it if it is
// needed. While this rank's own work is in flight it spins as a caller does, but leaves the core to
// whoever wants it.
void ProgressThread::Loop() {
  int64_t moved_ns = 0;
  while (!loop_.HasStopped()) {
    const uint32_t ticket = doorbell_.Ticket();
    bool moved = false;
    int64_t sleep_ns = kEngineLockRetryNs;
    if (engine_lock_.try_lock()) {
      const EngineLoop::Outcome outcome = loop_.RunOnce(false);
      moved = outcome.moved;
      if (moved) moved_ns = loop_.now_ns();
      const bool spins = loop_.now_ns() - moved_ns < spin_ns_ && loop_.AwaitsPeers();
      engine_lock_.unlock();
      sleep_ns = spins ? 0 : outcome.sleep_ns;
      // A mutex is not fair: without a pause this thread would mostly get it again.
      if (engine_lock_wanted_.load() > 0) std::this_thread::yield();
    }
    if (moved) continue;
    if (sleep_ns < 0 || sleep_ns > kNapNs) {
      doorbell_.Sleep(Listener::kEngine, ticket, sleep_ns);
    } else {
      std::this_thread::yield();
    }
  }
  ended_.store(1);
  FutexWake(ended_, 1);
}

bool ProgressThread::Wait(const Work& work, int64_t timeout_ns, bool starts) {
  const int64_t deadline = timeout_ns < 0 ? kNever : clock_.NowNs() + timeout_ns;
  CallerThreads::Waiting waiting(starts ? callers_ : others_, work, timeout_ns < 0);
  bool rang = false;
  while (!work.done()) {
    submissions_.Hurry();
    if (!gpu_.in_use() && engine_lock_.try_lock()) {
      RunAsCaller(work, deadline, waiting);
    } else {
      // One ring makes the engine take what was held until Hurry; more would only cost wake-ups.
      if (!rang) doorbell_.Ring();
      rang = true;
      const int64_t left = deadline == kNever ? -1 : deadline - clock_.NowNs();
      if (deadline == kNever || left > 0) {
        waiting.Sleeps();
        work.SleepUntilDone(left);
      }
    }
    if (work.done()) break;
    if (deadline != kNever && clock_.NowNs() >= deadline) return work.done();
  }
  return true;
}

// Entered with the engine lock; releases it. Spins for a while after the last progress, since the
// next message is likely to come sooner than a sleeper would wake. Rings wake this thread meanwhile
// and leave the engine thread asleep.
void ProgressThread::RunAsCaller(const Work& work, int64_t deadline_ns,
                                 CallerThreads::Waiting& waiting) {
  doorbell_.Listen(Listener::kCaller);
  uint32_t ticket = 0;
  int64_t moved_ns = -1;
  for (;;) {
    ticket = doorbell_.Ticket();
    const EngineLoop::Outcome outcome = loop_.RunOnce(true);
    const int64_t now_ns = loop_.now_ns();
    if (outcome.moved || moved_ns < 0) moved_ns = now_ns;
    if (work.done() || now_ns >= deadline_ns || engine_lock_wanted_.load() > 0) break;
    // What remains is for the engine thread: to pass a final error on, or to work on a GPU.
    if (lifecycle_.failed() || gpu_.in_use()) break;
    if (outcome.moved) continue;
    const int64_t left = deadline_ns == kNever ? outcome.sleep_ns : deadline_ns - now_ns;
    const int64_t sleep_ns = outcome.sleep_ns < 0 ? left : std::min(left, outcome.sleep_ns);
    if (now_ns - moved_ns < std::min(spin_ns_, kPauseNs)) {
      Pause();
    } else if (now_ns - moved_ns < spin_ns_ || (sleep_ns >= 0 && sleep_ns <= kNapNs)) {
      std::this_thread::yield();
    } else {
      waiting.Sleeps();
      doorbell_.Sleep(Listener::kCaller, ticket, sleep_ns);
    }
  }
  HandBack(ticket);
}

// What a caller leaves undone is the engine thread's again. Rings since `ticket` may have been
// meant for the caller. The listener changes before the lock is free, because a ring in between
// must reach the engine thread.
void ProgressThread::HandBack(uint32_t ticket) {
  const bool left = loop_.IsBusy();
  doorbell_.Listen(Listener::kEngine);
  engine_lock_.unlock();
  if (left || doorbell_.Ticket() != ticket) doorbell_.Wake(Listener::kEngine);
}

// Counted in naps: a process that was stopped as a whole has not let the engine end its iteration.
bool ProgressThread::Stop(int64_t timeout_ns, int64_t* waited_ns) {
  for (*waited_ns = 0; ended_.load() == 0 && (timeout_ns < 0 || *waited_ns < timeout_ns);
       *waited_ns += kStopNapNs) {
    FutexWait(ended_, 0, kStopNapNs);
  }
  if (ended_.load() == 0) return false;
  thread_.join();
  return true;
}

void ProgressThread::Detach() {
  if (thread_.joinable()) thread_.detach();
}

// Also counted in naps, hence try_lock and no wait with a deadline. A caller with the lock
// sees engine_lock_wanted_ after its iteration and releases it; the engine thread pauses without
// it.
std::unique_lock<std::mutex> ProgressThread::LockWithin(int64_t timeout_ns) {
  engine_lock_wanted_.fetch_add(1);
  std::unique_lock lock(engine_lock_, std::try_to_lock);
  for (int64_t waited_ns = 0; !lock && (timeout_ns < 0 || waited_ns < timeout_ns);
       waited_ns += kNsPerMs) {
    doorbell_.Ring();  // a caller that sleeps with the engine lock looks at engine_lock_wanted_
    std::this_thread::sleep_for(std::chrono::nanoseconds(kNsPerMs));
    (void)lock.try_lock();
  }
  engine_lock_wanted_.fetch_sub(1);
  return lock;
}

}  // namespace farandole
