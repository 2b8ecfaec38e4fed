// The handle of one started operation: finished exactly once, waited for by any thread.
//
// On the CPU done means that the result stands. On a GPU it means launched: the end is an event in
// a stream, for which other streams can wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "coordinator/engine/callback_threads.h"
#include "coordinator/protocol/request.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Memory for results whose size is known only when the operation runs (RowsMayDiffer).
///
/// Thread safety: called by the holder of the engine lock; must not call the engine. Lifetime:
/// until the operation has finished.
class ResultAllocator {
 public:
  virtual ~ResultAllocator() = default;
  /// Once per tensor of the operation.
  /// @param rows   That come from each rank of the set, by position.
  /// @param bytes  Of all of them; 0 is possible, and any address will do then.
  /// @return the memory; if there is none, this rank drops the tensor and its work fails with the
  /// status, while the other ranks go on.
  virtual Result<void*> Allocate(size_t tensor, std::span<const int64_t> rows, int64_t bytes) = 0;
  /// CUDA: the memory is free once the stream of the inputs has come to where it is then.
  virtual bool IsInStreamOrder() const { return false; }
};

/// Thread safety: done() from any thread; status() and skipped() from any thread once done() is
/// true, and so is end(); Finish from any thread, the first one wins. Invariant: done() never goes
/// back.
class Work : public std::enable_shared_from_this<Work> {
 public:
  explicit Work(bool is_of_all_ranks = true) : is_of_all_ranks_(is_of_all_ranks) {}
  /// And not of a process set of some.
  bool is_of_all_ranks() const { return is_of_all_ranks_; }
  bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
  /// Why it failed, or OK.
  const Status& status() const { return status_; }
  /// No rank contributed tensor i: its output was not written.
  bool skipped(int i) const { return TestBit(skipped_, i); }
  /// Where rows may differ: those that came from each rank for tensor i, by position; 0 if nothing
  /// ran.
  std::span<const int64_t> rows(size_t i) const {
    const bool is_there = ranks_ > 0 && i < rows_.size() / ranks_;
    return is_there ? std::span(rows_).subspan(i * ranks_, ranks_) : std::span<const int64_t>();
  }
  /// CUDA: once it is complete the result stands, and inputs and outputs are not touched any more.
  /// nullptr for what ran on the CPU, or did not run.
  const std::shared_ptr<DeviceEvent>& end() const { return end_; }

  /// Ends the work, wakes its waiters and has its callbacks called. @return false if it had ended
  /// before.
  bool Finish(const Status& status);
  /// Takes a callback, from any thread. @return false if the work is done: then it has not.
  bool AddCallback(std::unique_ptr<Callback>& callback);
  void SetSkipped(const Mask& mask) { skipped_ = mask; }
  /// Before it is started, where rows may differ.
  void MakeRoomForRows(size_t tensors, size_t ranks);
  void SetRows(size_t i, std::span<const int64_t> rows);
  void SetEnd(std::shared_ptr<DeviceEvent> end) { end_ = std::move(end); }
  /// Sleeps until done or `timeout_ns` (< 0: no limit) passed; may return early.
  void SleepUntilDone(int64_t timeout_ns) const;
  /// Sleeps until done or the whole of `timeout_ns` (< 0: no limit) has passed. @return done?
  bool SleepUntilDoneFor(int64_t timeout_ns) const;

 private:
  const bool is_of_all_ranks_;
  static constexpr uint32_t kPending = 0, kFinishing = 1, kDone = 2;
  std::atomic<uint32_t> state_{kPending};
  mutable std::atomic<uint32_t> sleepers_{0};
  std::atomic<Callback*> callbacks_{nullptr};  // the last one added; NoMore(): done
  Status status_;
  Mask skipped_;
  size_t ranks_ = 0;
  std::vector<int64_t> rows_;  // of ranks_ ranks, tensor after tensor
  std::shared_ptr<DeviceEvent> end_;
};

}  // namespace farandole
