// Sleeping on a 32-bit word: the one primitive under Doorbell and Work.
//
// std::atomic::wait is not used: it has no timeout, and libstdc++'s does not work between
// processes.
#pragma once

#include <atomic>
#include <cstdint>

namespace farandole {

/// Who sleeps on a word and wakes: threads of this process, or of all that have mapped its memory.
enum class FutexScope { kProcess, kHost };

/// Sleeps while `word` holds `expected`, at most `timeout_ns` (< 0: no limit). May return early.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns,
               FutexScope scope = FutexScope::kProcess);
/// Wakes up to `count` threads that sleep on `word`, in the same scope.
void FutexWake(const std::atomic<uint32_t>& word, int count,
               FutexScope scope = FutexScope::kProcess);

}  // namespace farandole
