#include "core/clock.h"

#include <ctime>

namespace farandole {
namespace {

class MonotonicClock final : public Clock {
 public:
  int64_t NowNs() const override {
    // CLOCK_MONOTONIC stands still while the machine sleeps, so that no deadline passes then. As a
    // rule it is read without a system call (vDSO).
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t{t.tv_sec} * kNsPerSecond + t.tv_nsec;
  }
};

}  // namespace

const Clock& SteadyClock() {
  static const MonotonicClock clock;
  return clock;
}

}  // namespace farandole
