#include "core/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "core/clock.h"

namespace farandole {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "the kernel reads the atomic's only word");

namespace {

// A private word spares the kernel the look-up of its page.
int Operation(int operation, FutexScope scope) {
  return scope == FutexScope::kProcess ? operation | FUTEX_PRIVATE_FLAG : operation;
}

}  // namespace

// FUTEX_WAIT takes a relative time of the monotonic clock. The result is ignored: whether the word
// has changed, a signal came or the time is up, callers look at their state and the clock
// themselves.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns,
               FutexScope scope) {
  timespec relative{};
  relative.tv_sec = timeout_ns / kNsPerSecond;
  relative.tv_nsec = timeout_ns % kNsPerSecond;
  syscall(SYS_futex, &word, Operation(FUTEX_WAIT, scope), expected,
          timeout_ns < 0 ? nullptr : &relative, nullptr, 0);
}

void FutexWake(const std::atomic<uint32_t>& word, int count, FutexScope scope) {
  syscall(SYS_futex, &word, Operation(FUTEX_WAKE, scope), count, nullptr, nullptr, 0);
}

}  // namespace farandole
