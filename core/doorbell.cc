#include "core/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "core/clock.h"

namespace farandole {
namespace {

// std::atomic<uint32_t> is layout-compatible with the word the kernel looks at (checked below);
// libstdc++'s own atomic::wait is not used because it does not work between processes and has no
// timeout.
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

long Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

void FutexDoorbell::Ring() {
  sequence_.fetch_add(1);
  Wake(static_cast<Place>(listener_.load()));
}

void FutexDoorbell::Wake(Place place) {
  Slot& slot = slots_[static_cast<uint32_t>(place)];
  slot.word.fetch_add(1);
  if (slot.sleeping.load() == 0) return;
  wakes_.fetch_add(1, std::memory_order_relaxed);
  Futex(&slot.word, FUTEX_WAKE_PRIVATE, 1, nullptr);
}

void FutexDoorbell::Sleep(Place place, uint32_t ticket, int64_t timeout_ns) {
  Slot& slot = slots_[static_cast<uint32_t>(place)];
  const uint32_t word = slot.word.load();
  slot.sleeping.store(1);
  // A ring between Ticket() and here changed the sequence; one after this check changes `word` and
  // wakes us.
  if (sequence_.load() == ticket) {
    timespec relative{};
    relative.tv_sec = timeout_ns / kNsPerSecond;
    relative.tv_nsec = timeout_ns % kNsPerSecond;
    Futex(&slot.word, FUTEX_WAIT_PRIVATE, word, timeout_ns < 0 ? nullptr : &relative);
  }
  slot.sleeping.store(0);
}

}  // namespace farandole
