// The handle of one started operation: finished exactly once, waited for by any thread.
//
// On the CPU done means that the result stands. On a GPU it means launched: the end is an event in
// a stream, for which other streams can wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "coordinator/protocol/request.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Thread safety: done() from any thread; status() and skipped() from any thread once done() is
/// true, and so is end(); Finish from any thread, the first one wins. Invariant: done() never goes
/// back.
class Work {
 public:
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  /// Why it failed, or OK.
  const Status& status() const { return status_; }
  /// No rank contributed member i: its output was not written.
  bool skipped(int i) const { return TestBit(skipped_, i); }
  /// CUDA: once it is complete the result stands, and inputs and outputs are not touched any more.
  /// nullptr for what ran on the CPU, or did not run.
  const std::shared_ptr<DeviceEvent>& end() const { return end_; }

  /// Ends the work and wakes its waiters. @return false if it had ended before.
  bool Finish(const Status& status);
  void SetSkipped(const Mask& mask) { skipped_ = mask; }
  void SetEnd(std::shared_ptr<DeviceEvent> end) { end_ = std::move(end); }
  /// Sleeps until done or `timeout_ns` (< 0: no limit) passed; may return early.
  void SleepUntilDone(int64_t timeout_ns) const;
  /// Sleeps until done or the whole of `timeout_ns` (< 0: no limit) has passed. @return done?
  bool SleepUntilDoneFor(int64_t timeout_ns) const;

 private:
  static constexpr uint32_t kPending = 0, kFinishing = 1, kDone = 2;
  std::atomic<uint32_t> state_{kPending};
  mutable std::atomic<uint32_t> sleepers_{0};
  Status status_;
  Mask skipped_;
  std::shared_ptr<DeviceEvent> end_;
};

}  // namespace farandole
