#include "core/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "core/clock.h"

namespace farandole {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "the kernel reads the atomic's only word");

void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  timespec relative{};
  relative.tv_sec = timeout_ns / kNsPerSecond;
  relative.tv_nsec = timeout_ns % kNsPerSecond;
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? nullptr : &relative,
          nullptr, 0);
}

void FutexWake(const std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

}  // namespace farandole
