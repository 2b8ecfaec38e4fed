// Monotonic time behind an interface, so that tests decide what time it is.
#pragma once

#include <cstdint>

namespace farandole {

inline constexpr int64_t kNsPerUs = 1'000;
inline constexpr int64_t kNsPerMs = 1'000'000;
inline constexpr int64_t kNsPerSecond = 1'000'000'000;
/// "No deadline": later than any time a Clock returns.
inline constexpr int64_t kNever = INT64_MAX;

/// Thread safety: NowNs from any thread. Invariant: never runs backwards.
class Clock {
 public:
  virtual ~Clock() = default;
  /// Nanoseconds since an arbitrary fixed point in time.
  virtual int64_t NowNs() const = 0;
};

/// The process-wide monotonic clock (CLOCK_MONOTONIC). It holds no state.
const Clock& SteadyClock();

}  // namespace farandole
