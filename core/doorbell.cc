#include "core/doorbell.h"

#include "core/futex.h"

namespace farandole {

void FutexDoorbell::Ring() {
  sequence_.fetch_add(1);
  WakeSlot(slots_[listener_.load()]);
}

void FutexDoorbell::Wake(Listener listener) {
  sequence_.fetch_add(1);
  WakeSlot(slots_[static_cast<uint32_t>(listener)]);
}

void FutexDoorbell::Close() {
  closed_.store(true);
  for (Slot& slot : slots_) WakeSlot(slot);
}

void FutexDoorbell::WakeSlot(Slot& slot) {
  slot.word.fetch_add(1);
  if (slot.sleeping.load() == 0) return;
  wakes_.fetch_add(1, std::memory_order_relaxed);
  FutexWake(slot.word, 1);
}

void FutexDoorbell::Sleep(Listener listener, uint32_t ticket, int64_t timeout_ns) {
  Slot& slot = slots_[static_cast<uint32_t>(listener)];
  const uint32_t word = slot.word.load();
  slot.sleeping.store(1);
  // A ring between Ticket() and here changed the sequence; one after this check changes `word` and
  // wakes us. So does Close.
  if (sequence_.load() == ticket && !closed_.load()) FutexWait(slot.word, word, timeout_ns);
  slot.sleeping.store(0);
}

}  // namespace farandole
