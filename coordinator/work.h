// The handle of one started operation: finished exactly once, waited for by any thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "coordinator/key.h"
#include "core/status.h"

namespace farandole {

/// Thread safety: done() from any thread; status() and skipped() from any thread once done() is
/// true; Finish from any thread, the first one wins. Invariant: done() never goes back.
class Work {
 public:
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  /// Why it failed, or OK.
  const Status& status() const { return status_; }
  /// No rank contributed member i: its output was not written.
  bool skipped(int i) const { return TestBit(skipped_, i); }

  /// Ends the work and wakes its waiters. @return false if it had ended before.
  bool Finish(const Status& status);
  void SetSkipped(const Mask& mask) { skipped_ = mask; }
  /// Sleeps until done or `timeout_ns` (< 0: no limit) passed; may return early.
  void SleepUntilDone(int64_t timeout_ns) const;

 private:
  static constexpr uint32_t kPending = 0, kFinishing = 1, kDone = 2;
  std::atomic<uint32_t> state_{kPending};
  mutable std::atomic<uint32_t> sleepers_{0};
  Status status_;
  Mask skipped_;
};

}  // namespace farandole
