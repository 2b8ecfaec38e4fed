#include "core/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "core/clock.h"

namespace farandole {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "the kernel reads the atomic's only word");

// FUTEX_WAIT takes a relative time of the monotonic clock. The result is ignored: whether the word
// has changed, a signal came or the time is up, callers look at their state and the clock
// themselves.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  timespec relative{};
  relative.tv_sec = timeout_ns / kNsPerSecond;
  relative.tv_nsec = timeout_ns % kNsPerSecond;
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? nullptr : &relative,
          nullptr, 0);
}

// _PRIVATE: the sleepers are threads of this process, which spares the kernel the look-up of the
// page. A word in memory that processes share would need the plain operations in both functions.
void FutexWake(const std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace farandole
