#include "coordinator/engine/work.h"

#include <algorithm>
#include <climits>

#include "core/clock.h"
#include "core/futex.h"

namespace farandole {
namespace {

/// In the place of the callbacks of a work that is done.
Callback* NoMore() {
  static Callback none;
  return &none;
}

}  // namespace

// The first caller alone writes status_, and done() is true only after that. Nobody sleeps in most
// cases, and then there is no system call. No wake-up is lost, because all accesses here and in
// SleepUntilDone are sequentially consistent: either `sleepers_` counts a waiter here, or that
// waiter reads kDone. From then on the operation, whose `status` may be, can be started again.
bool Work::Finish(const Status& status) {
  uint32_t expected = kPending;
  if (!state_.compare_exchange_strong(expected, kFinishing)) return false;
  status_ = status;
  state_.store(kDone);
  Callback* const last = callbacks_.exchange(NoMore());
  if (last != nullptr) last->threads->Push(*this, last);
  if (sleepers_.load() > 0) FutexWake(state_, INT_MAX);
  return true;
}

// After the exchange in Finish, which this acquires, the status is there.
bool Work::AddCallback(std::unique_ptr<Callback>& callback) {
  Callback* last = callbacks_.load();
  do {
    if (last == NoMore()) return false;
    callback->next = last;
  } while (!callbacks_.compare_exchange_weak(last, callback.get()));
  (void)callback.release();
  return true;
}

void Work::MakeRoomForRows(size_t tensors, size_t ranks) {
  ranks_ = ranks;
  rows_.resize(tensors * ranks);
}

void Work::SetRows(size_t i, std::span<const int64_t> rows) {
  std::ranges::copy(rows, rows_.begin() + static_cast<std::ptrdiff_t>(i * ranks_));
}

void Work::SleepUntilDone(int64_t timeout_ns) const {
  sleepers_.fetch_add(1);
  const uint32_t state = state_.load();
  if (state != kDone) FutexWait(state_, state, timeout_ns);
  sleepers_.fetch_sub(1);
}

bool Work::SleepUntilDoneFor(int64_t timeout_ns) const {
  const int64_t until_ns = timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
  for (int64_t left_ns = timeout_ns; !done();) {
    SleepUntilDone(left_ns);
    if (until_ns == kNever) continue;
    left_ns = until_ns - SteadyClock().NowNs();
    if (left_ns <= 0) break;
  }
  return done();
}

}  // namespace farandole
