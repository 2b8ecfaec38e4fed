#include "coordinator/engine/progress_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

#include "core/futex.h"
#include "core/pause.h"

namespace farandole {
namespace {

using Listener = FutexDoorbell::Listener;

constexpr int64_t kEngineLockRetryNs =
    5 * kNsPerMs;  // the engine looks again while a caller runs in its place
constexpr int64_t kStopNapNs = 10 * kNsPerMs;
constexpr int64_t kNapNs = 20 * kNsPerUs;  // shorter sleeps cost more than they save: yield instead
// A peer on another core answers in less. After that it may wait for this very core.
constexpr int64_t kPauseNs = 20 * kNsPerUs;
// Standing by, the engine thread looks so often: for a caller that computes for long, or has died.
constexpr int64_t kStandByNs = 5 * kNsPerMs;
constexpr int64_t kComesBackNs = 50 * kNsPerMs;  // a caller does, after RunBriefly
constexpr int kBriefRuns = 3;                    // of the loop: submit, send, one slice of data
constexpr int kLockTries = 10;

bool IsSleep(int64_t sleep_ns) { return sleep_ns < 0 || sleep_ns > kNapNs; }

/// A caller that waits for another thread to run the engine loop.
class Sleeper {
 public:
  explicit Sleeper(std::atomic<int>& count) : count_(count) { count_.fetch_add(1); }
  ~Sleeper() { count_.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic<int>& count_;
};

}  // namespace

ProgressThread::ProgressThread(EngineLoop& loop, const EngineParts& parts,
                               const SharedParts& shared, const EngineOptions& options)
    : loop_(loop),
      doorbell_(*parts.doorbell),
      clock_(*parts.clock),
      lifecycle_(shared.lifecycle),
      gpu_(shared.gpu),
      submissions_(shared.submissions),
      steps_(shared.steps),
      callers_(shared.callers),
      spin_ns_(options.spin_ns),
      fills_cores_(options.fills_cores && options.threads) {}

// A thread that Stop has left behind has ended by now, or the owner would keep the engine: the load
// orders what it wrote before the destruction of the parts.
ProgressThread::~ProgressThread() { (void)ended_.load(); }

void ProgressThread::Start() {
  thread_ = std::thread([this] { Loop(); });
  (void)pthread_setname_np(thread_.native_handle(), "farandole-eng");  // for top and gdb
}

// The ticket comes before the iteration: after a ring in between Sleep returns at once, so no
// wake-up is lost. While a caller runs the loop this thread sleeps; HandBack wakes it if it is
// needed. Before it sleeps it looks once more, since planes ring only who may sleep. While this
// rank's own work is in flight it spins as a caller does, but leaves the core to whoever wants it.
// Standing by it does neither: the callers need the core, and run the loop.
void ProgressThread::Loop() {
  int64_t moved_ns = 0;
  while (!loop_.HasStopped()) {
    const uint32_t ticket = doorbell_.Ticket();
    bool moved = false;
    bool looks_again = false;
    bool stands_by = false;
    int64_t sleep_ns = kEngineLockRetryNs;
    if (engine_lock_.try_lock()) {
      const EngineLoop::Outcome outcome = loop_.RunOnce(EngineLoop::Runner::kEngine);
      moved = outcome.moved;
      if (moved) moved_ns = loop_.now_ns();
      const bool spins = loop_.now_ns() - moved_ns < spin_ns_ && loop_.AwaitsPeers();
      stands_by = stands_by_ = MayStandBy();
      doorbell_.Listen(stands_by ? Listener::kNobody : Listener::kEngine);
      sleep_ns = spins ? 0 : outcome.sleep_ns;
      if (moved) {
        doorbell_.StayAwake();
      } else if (!stands_by && IsSleep(sleep_ns)) {
        looks_again = !doorbell_.MaySleep();
      }
      looks_ns_ = stands_by ? kNever : DueNs(sleep_ns);
      engine_lock_.unlock();
      // A mutex is not fair: without a pause this thread would mostly get it again.
      if (engine_lock_wanted_.load() > 0) std::this_thread::yield();
    } else {
      looks_ns_ = clock_.NowNs() + sleep_ns;
    }
    if (stands_by) {
      const uint32_t rings = doorbell_.Ticket();  // those of peers since `ticket` do not count
      if (!IsWanted()) doorbell_.Sleep(Listener::kEngine, rings, kStandByNs);
      continue;
    }
    if (moved || looks_again) continue;
    if (IsSleep(sleep_ns)) {
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
    if (!gpu_.in_use() && TakesEngineLock()) {
      RunAsCaller(work, deadline, waiting);
    } else {
      // One ring makes the engine take what was held until Hurry; more would only cost wake-ups.
      const Sleeper sleeper(sleepers_);
      if (!rang) doorbell_.Summon();
      rang = true;
      const int64_t left = deadline == kNever ? -1 : deadline - clock_.NowNs();
      if (deadline == kNever || left > 0) {
        waiting.Sleeps();
        const int64_t began_ns = clock_.NowNs();
        work.SleepUntilDone(left);
        steps_.NoteWait(work.is_of_all_ranks(), clock_.NowNs() - began_ns);
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
  int64_t began_ns = -1;
  EngineLoop::Outcome outcome;
  for (;;) {
    ticket = doorbell_.Ticket();
    outcome = loop_.RunOnce(EngineLoop::Runner::kWaiter);
    const int64_t now_ns = loop_.now_ns();
    if (outcome.moved || moved_ns < 0) moved_ns = now_ns;
    if (began_ns < 0) began_ns = now_ns;
    if (outcome.moved) doorbell_.StayAwake();
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
    } else if (doorbell_.MaySleep()) {
      waiting.Sleeps();
      doorbell_.Sleep(Listener::kCaller, ticket, sleep_ns);
    }
  }
  steps_.NoteWait(work.is_of_all_ranks(), loop_.now_ns() - began_ns);
  HandBack(ticket, outcome.sleep_ns);
}

int64_t ProgressThread::DueNs(int64_t sleep_ns) const {
  return sleep_ns < 0 ? kNever : loop_.now_ns() + sleep_ns;
}

// What a caller leaves undone is the engine thread's again. Rings since `ticket` may have been
// meant for the caller; planes, which ring only who may sleep, have nothing for an engine that has
// no batch left. The listener changes before the lock is free, because a ring in between
// must reach the engine thread. What is only to be looked after can wait for its next look: in a
// loop of calls it would be woken by each, as peers that are ahead have announced the next one.
void ProgressThread::HandBack(uint32_t ticket, int64_t sleep_ns) {
  const bool can_wait = !loop_.AwaitsPeers() && !submissions_.IsWanted() && !lifecycle_.failed() &&
                        !gpu_.in_use() && DueNs(sleep_ns) >= looks_ns_;
  const bool left = loop_.IsBusy() && !can_wait;
  const bool stands_by = stands_by_ = stands_by_ && MayStandBy();
  doorbell_.Listen(stands_by ? Listener::kNobody : Listener::kEngine);
  engine_lock_.unlock();
  const bool is_due = stands_by ? IsWanted() : left || doorbell_.Ticket() != ticket;
  if (is_due) doorbell_.Wake(Listener::kEngine);
}

// Under the engine lock.
bool ProgressThread::MayStandBy() const {
  return fills_cores_ && loop_.now_ns() - brief_ns_ < kComesBackNs && !IsWanted() &&
         !lifecycle_.failed() && !lifecycle_.IsChanging() && !gpu_.in_use();
}

// By this rank's own threads, other than the one that runs the loop.
bool ProgressThread::IsWanted() const { return sleepers_.load() > 0 || submissions_.IsWanted(); }

// An engine thread that stands by has it for moments, in which it may need this very core.
bool ProgressThread::TakesEngineLock() {
  for (int tries = 1; !engine_lock_.try_lock(); ++tries) {
    if (!fills_cores_ || tries == kLockTries) return false;
    std::this_thread::yield();
  }
  return true;
}

void ProgressThread::RunBriefly() {
  if (gpu_.in_use() || !TakesEngineLock()) {
    submissions_.Hurry();
    return doorbell_.Summon();
  }
  doorbell_.Listen(Listener::kCaller);
  submissions_.Hurry();
  uint32_t ticket = 0;
  EngineLoop::Outcome outcome;
  for (int run = 0; run < kBriefRuns; ++run) {
    ticket = doorbell_.Ticket();
    outcome = loop_.RunOnce(EngineLoop::Runner::kCaller);
    if (!outcome.moved || lifecycle_.failed() || gpu_.in_use()) break;
  }
  brief_ns_ = loop_.now_ns();
  HandBack(ticket, outcome.sleep_ns);
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
