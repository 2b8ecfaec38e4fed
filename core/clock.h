// Monotonic time behind an interface, so that tests decide what time it is.
#pragma once

#include <cstdint>

namespace farandole {

inline constexpr int64_t kNsPerUs = 1'000;
inline constexpr int64_t kNsPerMs = 1'000'000;
inline constexpr int64_t kNsPerSecond = 1'000'000'000;
/// "No deadline": later than any time a Clock returns.
inline constexpr int64_t kNever = INT64_MAX;
constexpr int64_t ToNs(double seconds) {
  return static_cast<int64_t>(seconds * static_cast<double>(kNsPerSecond));
}

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
