// The one thing an engine sleeps on. Transports, planes and submitting threads ring it. What
// cannot, MPI and the events of a GPU, is polled.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/futex.h"

namespace farandole {

/// Wakes one rank's engine. Coalescing: many rings before the sleeper looks are one wake-up.
/// Thread safety: Ring from any thread (not from a signal handler).
class Doorbell {
 public:
  virtual ~Doorbell() = default;
  virtual void Ring() = 0;
  /// For what the caller has written to memory that the engine looks at, and a sequentially
  /// consistent fence behind it, which may serve many bells: rings only an engine that may sleep
  /// without another look. While it works that costs the load of a line that nobody writes.
  virtual void RingIfAsleep() { Ring(); }
};

/// Doorbell over a futex, with two sleeping places: the engine thread's and a waiting caller's.
///
/// Whoever holds the engine lock is the *listener*; a ring wakes only the listener. A caller
/// that takes the engine lock while the engine thread sleeps leaves it asleep, which saves two
/// cross-core wake-ups (29-48 us each). Where nobody listens, the engine thread looks by itself
/// after a while, and only Summon wakes it.
///
/// The listener says that it is up (StayAwake), and before it sleeps that it may (MaySleep), after
/// which it looks once more: so RingIfAsleep loses nothing that it has to work on. Who never says
/// that it is up is always rung.
///
/// Its state may lie in memory that processes share: then one process sleeps on it, and each of the
/// others has a doorbell over the same state to ring.
///
/// Thread safety: Ring, RingIfAsleep, Ticket and wakes from any thread; StayAwake and MaySleep by
/// the holder of the engine lock; Sleep by the two sleepers only, one thread per listener.
/// Invariant: a Ring after Ticket() makes the Sleep with that ticket return at once. A Ring costs
/// no system call unless the listener sleeps.
class FutexDoorbell final : public Doorbell {
 public:
  enum class Listener : uint32_t { kEngine = 0, kCaller = 1, kNobody = 2 };

  /// Holds no address. All zeros is a doorbell that has not rung.
  struct State {
    struct alignas(64) Slot {
      std::atomic<uint32_t> word{0};      // bumped by each ring or wake meant for this listener
      std::atomic<uint32_t> sleeping{0};  // 1 while its thread is, or is about to be, in the futex
    };
    alignas(64) std::atomic<uint32_t> sequence{0};
    std::atomic<uint32_t> listener{0};
    std::atomic<int64_t> wakes{0};
    Slot slots[3];  // nobody sleeps in the last
    // 1: the listener looks for work once more before it sleeps. In a line that rings leave alone.
    alignas(64) std::atomic<uint32_t> awake{0};
    static_assert(std::atomic<int64_t>::is_always_lock_free);
  };

  FutexDoorbell() = default;
  /// Over the doorbell of another process. `shared` outlives this.
  explicit FutexDoorbell(State& shared) : state_(&shared), scope_(FutexScope::kHost) {}
  FutexDoorbell(const FutexDoorbell&) = delete;
  FutexDoorbell& operator=(const FutexDoorbell&) = delete;

  /// Moves it to memory that processes share, where it may have been rung already: nobody sleeps
  /// yet, and who does later looks for work before. `shared` outlives every later use.
  void MoveTo(State& shared) {
    state_ = &shared;
    scope_ = FutexScope::kHost;
  }

  void Ring() override;
  void RingIfAsleep() override {
    if (state_->awake.load(std::memory_order_relaxed) == 0) Ring();
  }
  /// As Ring, and wakes the engine thread where nobody listens: this rank's own program wants
  /// something.
  void Summon();
  /// Take this before looking for work; pass it to Sleep.
  uint32_t Ticket() const { return state_->sequence.load(std::memory_order_acquire); }
  /// Says which sleeper a ring wakes from now on.
  void Listen(Listener listener) { state_->listener.store(static_cast<uint32_t>(listener)); }
  /// The listener has found work and goes on looking.
  void StayAwake() {
    if (state_->awake.load(std::memory_order_relaxed) == 0)
      state_->awake.store(1, std::memory_order_relaxed);
  }
  /// The listener has found no work. @return Whether it may sleep; otherwise it looks once more, by
  /// a new ticket, and asks again.
  bool MaySleep();
  /// Sleeps until a ring after `ticket` reaches this listener, a Wake(listener), or `timeout_ns`
  /// passed
  /// (<0: no limit). May return early; callers look for work again.
  void Sleep(Listener listener, uint32_t ticket, int64_t timeout_ns);
  /// Wakes a sleeper whoever listens, e.g. the engine thread when a caller gives the engine lock
  /// back with work left.
  void Wake(Listener listener);
  /// From now on nobody sleeps: who does is woken, and Sleep returns at once.
  void Close();
  /// Futex wakes issued for its sleepers so far, by whoever rang.
  int64_t wakes() const { return state_->wakes.load(std::memory_order_relaxed); }

 private:
  void WakeSlot(State::Slot& slot);

  State own_;
  State* state_ = &own_;
  FutexScope scope_ = FutexScope::kProcess;
  std::atomic<bool> closed_{false};  // by the process that sleeps
};

}  // namespace farandole
