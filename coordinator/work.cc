#include "coordinator/work.h"

#include <climits>

#include "core/futex.h"

namespace farandole {

bool Work::Finish(const Status& status) {
  uint32_t expected = kPending;
  if (!state_.compare_exchange_strong(expected, kFinishing)) return false;
  status_ = status;
  state_.store(kDone);
  if (sleepers_.load() > 0) FutexWake(state_, INT_MAX);
  return true;
}

void Work::SleepUntilDone(int64_t timeout_ns) const {
  sleepers_.fetch_add(1);
  const uint32_t state = state_.load();
  if (state != kDone) FutexWait(state_, state, timeout_ns);
  sleepers_.fetch_sub(1);
}

}  // namespace farandole
