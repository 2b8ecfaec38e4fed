// Who runs the engine when: its own thread, a waiting caller, and the watch.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "coordinator/engine/engine.h"
#include "core/futex.h"

namespace farandole {
namespace {

constexpr int64_t kEngineLockRetryNs =
    5 * kNsPerMs;  // the engine looks again while a caller runs in its place
constexpr int64_t kWatchPeriodNs = 250 * kNsPerMs;
constexpr int64_t kStopNapNs = 10 * kNsPerMs;
constexpr int64_t kRevokeTimeoutNs = kNsPerSecond;  // far more than a chunk's copy takes
constexpr int64_t kNapNs = 20 * kNsPerUs;  // shorter sleeps cost more than they save: yield instead

}  // namespace

Engine::~Engine() { Stop(); }

bool Engine::Stop(int64_t timeout_ns) {
  if (given_up_.load()) return false;
  // Counted in naps: a process that was stopped as a whole has not let the engine end its step.
  int64_t waited_ns = 0;
  if (thread_.joinable()) {
    stop_.store(true);
    parts_.doorbell->Close();  // a wake-up could come before the ticket of who is to be woken
    watch_stop_.store(1);
    FutexWake(watch_stop_, 1);
    watch_.join();
    for (; thread_done_.load() == 0 && (timeout_ns < 0 || waited_ns < timeout_ns);
         waited_ns += kStopNapNs) {
      FutexWait(thread_done_, 0, kStopNapNs);
    }
    if (thread_done_.load() == 0) return GiveUp(timeout_ns);
    thread_.join();
  }
  if (!LockWithin(timeout_ns < 0 ? -1 : timeout_ns - waited_ns)) return GiveUp(timeout_ns);
  std::lock_guard lock(engine_lock_, std::adopt_lock);
  Fail(Aborted("farandole has been shut down on rank " + std::to_string(rank())));
  return true;
}

// Takes the engine lock, which a waiting caller may have.
bool Engine::LockWithin(int64_t timeout_ns) {
  engine_lock_wanted_.fetch_add(1);
  bool locked = engine_lock_.try_lock();
  for (int64_t waited_ns = 0; !locked && (timeout_ns < 0 || waited_ns < timeout_ns);) {
    parts_.doorbell
        ->Ring();  // a caller that sleeps with the engine lock looks at engine_lock_wanted_
    std::this_thread::sleep_for(std::chrono::nanoseconds(kNsPerMs));
    waited_ns += kNsPerMs;
    locked = engine_lock_.try_lock();
  }
  engine_lock_wanted_.fetch_sub(1);
  return locked;
}

// A thread with the engine lock does not come back from a library: the engine is its own from now
// on, and everything it may touch is leaked by Stop's caller. Users get their memory back.
bool Engine::GiveUp(int64_t waited_ns) {
  given_up_.store(true);
  FailFromOutside(Timeout(
      "rank " + std::to_string(rank()) + ": shutdown: a thread is stuck inside a library call (" +
      std::to_string(waited_ns / kNsPerMs) + " ms after it was asked to stop) and is left behind"));
  FailInFlight(final_error());
  if (thread_.joinable()) thread_.detach();
  return false;
}

// For other threads than the holder of the engine lock: after this it touches no tensor, so they
// may be given back.
void Engine::FailFromOutside(const Status& status) {
  (void)memory_.Revoke(kRevokeTimeoutNs);  // false: stuck in a plane that does not release it
  {
    std::lock_guard lock(registry_);
    if (final_error_.ok()) final_error_ = status;
  }
  failed_.store(true);
}

void Engine::EngineLoop() {
  using Listener = FutexDoorbell::Listener;
  while (!stop_.load() || (spreading_abort_.load() && !given_up_.load())) {
    const uint32_t ticket = parts_.doorbell->Ticket();
    int64_t sleep_ns = kEngineLockRetryNs;
    if (engine_lock_.try_lock()) {
      const StepResult step = RunOnce();
      engine_lock_.unlock();
      sleep_ns = step.moved ? 0 : step.sleep_ns;
      if (engine_lock_wanted_.load() > 0) std::this_thread::yield();
    }
    if (sleep_ns < 0 || sleep_ns > kNapNs) {
      parts_.doorbell->Sleep(Listener::kEngine, ticket, sleep_ns);
    } else if (sleep_ns > 0) {
      std::this_thread::yield();
    }
  }
  thread_done_.store(1);
  FutexWake(thread_done_, 1);
}

bool Engine::Poll(const Work& work) {
  if (work.done()) return true;
  urgent_.store(true);
  if (options_.threads) parts_.doorbell->Ring();
  return work.done();
}

bool Engine::Wait(const Work& work, int64_t timeout_ns) {
  const int64_t now = parts_.clock->NowNs();
  const int64_t deadline = timeout_ns < 0 ? kNever : now + timeout_ns;
  bool rang = false;
  while (!work.done()) {
    urgent_.store(true);
    // With a GPU at work the engine thread stays the one that talks to it: a caller would have to
    // borrow its current device, and may itself be in the middle of a library's call.
    if (!uses_device_.load(std::memory_order_relaxed) && engine_lock_.try_lock()) {
      RunAsCaller(work, deadline);
    } else {
      if (!rang) parts_.doorbell->Ring();
      rang = true;
      const int64_t left = deadline == kNever ? -1 : deadline - parts_.clock->NowNs();
      if (deadline == kNever || left > 0) work.SleepUntilDone(left);
    }
    if (deadline != kNever && parts_.clock->NowNs() >= deadline) break;
  }
  return work.done();
}

// Entered with the engine lock; gives it back.
void Engine::RunAsCaller(const Work& work, int64_t deadline_ns) {
  using Listener = FutexDoorbell::Listener;
  parts_.doorbell->Listen(Listener::kCaller);
  uint32_t ticket = 0;
  int64_t moved_ns = parts_.clock->NowNs();
  for (;;) {
    ticket = parts_.doorbell->Ticket();
    caller_runs_ = true;
    const StepResult step = RunOnce();
    caller_runs_ = false;
    if (step.moved) moved_ns = now_ns_;
    if (work.done() || now_ns_ >= deadline_ns || engine_lock_wanted_.load() > 0 || failed_.load())
      break;
    if (uses_device_.load(std::memory_order_relaxed)) break;
    if (step.moved) continue;
    const int64_t left = deadline_ns == kNever ? step.sleep_ns : deadline_ns - now_ns_;
    const int64_t sleep_ns = step.sleep_ns < 0 ? left : std::min(left, step.sleep_ns);
    if (now_ns_ - moved_ns < options_.spin_ns) {
      __builtin_ia32_pause();
    } else if (sleep_ns >= 0 && sleep_ns <= kNapNs) {
      std::this_thread::yield();
    } else {
      parts_.doorbell->Sleep(Listener::kCaller, ticket, sleep_ns);
    }
  }
  HandBack(ticket);
}

// What a caller leaves undone is the engine thread's again. Rings since `ticket` may have been
// meant for the caller.
void Engine::HandBack(uint32_t ticket) {
  using Listener = FutexDoorbell::Listener;
  const bool left =
      negotiation_.Busy() || !executor_.Idle() || !submissions_.Empty() || failed_.load();
  parts_.doorbell->Listen(Listener::kEngine);
  engine_lock_.unlock();
  if (left || parts_.doorbell->Ticket() != ticket) parts_.doorbell->Wake(Listener::kEngine);
}

// A join or a leave has not ended: it may wait to be taken, or the step that took it is stuck.
bool Engine::MembershipChanges() const {
  std::lock_guard lock(registry_);
  return (joining_ && !joining_->done()) || (leaving_ && !leaving_->done());
}

// Frees the callers when the holder of the engine lock is stuck inside a library call; it cannot
// free the holder itself.
void Engine::WatchLoop() {
  const int64_t shortest_ns = std::min(options_.progress_timeout_ns, options_.shutdown_timeout_ns);
  const int64_t period = std::min(kWatchPeriodNs, std::max<int64_t>(shortest_ns / 4, kNsPerMs));
  // Counted in periods that this thread has lived through: a process that was stopped and continued
  // as a whole is not stuck.
  int64_t same_step = 0;
  int64_t watched = 0;
  while (watch_stop_.load() == 0) {
    FutexWait(watch_stop_, 0, period);
    const int64_t began = step_began_ns_.load(std::memory_order_relaxed);
    same_step = began != 0 && began == watched ? same_step + 1 : 0;
    watched = began;
    const int64_t stuck_ns = same_step * period;
    if (stuck_ns > (MembershipChanges() ? shortest_ns : options_.progress_timeout_ns) &&
        !failed_.load()) {
      FailFromOutside(Timeout("rank " + std::to_string(rank()) +
                              ": the engine has been inside one library call for " +
                              std::to_string(stuck_ns / kNsPerMs) + " ms"));
    }
    if (failed_.load()) FailInFlight(final_error());
    StderrSink().Flush();
    if (parts_.timeline != nullptr) parts_.timeline->Flush();
  }
}

}  // namespace farandole
