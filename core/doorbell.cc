#include "core/doorbell.h"

#include "core/futex.h"

namespace farandole {

// All atomic operations here but the count are sequentially consistent, and have to be. A ring
// writes the sequence and the word and then reads `sleeping`; a sleeper writes `sleeping` and then
// reads the sequence. With acquire and release alone each could miss what the other wrote, and the
// wake-up would be lost.
// If the listener changes between the two lines, the former one is woken. No ring is lost by that,
// because whoever changes it looks at the sequence afterwards: a caller takes a new ticket and
// looks for work, and ProgressThread::HandBack wakes the engine's thread.
void FutexDoorbell::Ring() {
  state_->sequence.fetch_add(1);
  WakeSlot(state_->slots[state_->listener.load()]);
}

// The fence and that of whoever rings are a pair: either the look that follows here finds what was
// written there, or RingIfAsleep finds that this listener may sleep, and rings.
bool FutexDoorbell::MaySleep() {
  if (state_->awake.load(std::memory_order_relaxed) == 0) return true;
  state_->awake.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return false;
}

void FutexDoorbell::Summon() {
  Ring();
  if (state_->listener.load() == static_cast<uint32_t>(Listener::kNobody)) Wake(Listener::kEngine);
}

// Changes the sequence as well: the thread may have taken its ticket and not be asleep yet.
void FutexDoorbell::Wake(Listener listener) {
  state_->sequence.fetch_add(1);
  WakeSlot(state_->slots[static_cast<uint32_t>(listener)]);
}

void FutexDoorbell::Close() {
  closed_.store(true);
  for (State::Slot& slot : state_->slots) WakeSlot(slot);
}

void FutexDoorbell::WakeSlot(State::Slot& slot) {
  slot.word.fetch_add(1);
  // Nobody sleeps while the engine works, and a ring then costs no system call. Who rings leaves
  // `sleeping` as it is: the sleeper may have read the word after this ring and not sleep yet, and
  // the next ring has to wake it.
  if (slot.sleeping.load() == 0) return;
  state_->wakes.fetch_add(1, std::memory_order_relaxed);
  FutexWake(slot.word, 1, scope_);
}

void FutexDoorbell::Sleep(Listener listener, uint32_t ticket, int64_t timeout_ns) {
  State::Slot& slot = state_->slots[static_cast<uint32_t>(listener)];
  const uint32_t word = slot.word.load();
  slot.sleeping.store(1);
  // A ring between Ticket() and here changed the sequence; one after this check changes `word` and
  // wakes us. So does Close.
  if (state_->sequence.load() == ticket && !closed_.load()) {
    FutexWait(slot.word, word, timeout_ns, scope_);
  }
  slot.sleeping.store(0);
}

}  // namespace farandole
