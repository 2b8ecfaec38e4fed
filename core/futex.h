// Sleeping on a 32-bit word: the one primitive under Doorbell and Work.
//
// std::atomic::wait is not used: it has no timeout, and libstdc++'s does not work between
// processes.
#pragma once

#include <atomic>
#include <cstdint>

namespace farandole {

/// Sleeps while `word` holds `expected`, at most `timeout_ns` (< 0: no limit). May return early.
void FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
/// Wakes up to `count` threads of this process that sleep on `word`.
void FutexWake(const std::atomic<uint32_t>& word, int count);

}  // namespace farandole
