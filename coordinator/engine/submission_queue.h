// From any thread to the engine: an intrusive multi-producer, single-consumer queue of operations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>

#include "coordinator/engine/operation.h"
#include "core/doorbell.h"

namespace farandole {

/// A lock-free stack whose consumer takes everything at once and turns it round.
/// Source: R. K. Treiber, "Systems programming: coping with parallelism", IBM RJ 5118, 1986; taking
/// all nodes with one exchange has no ABA problem.
///
/// Small submissions that nobody waits for are held for `linger_ns`, so that more of them travel
/// together; those of which the engine was not notified, until something else wants the queue.
///
/// Thread safety: as each section says. Never blocks. Invariant: operations of one thread come out
/// in the order it pushed them.
class SubmissionQueue {
 public:
  /// @param linger_bytes  With more than this pending nothing is held.
  SubmissionQueue(FutexDoorbell& doorbell, int64_t linger_ns, int64_t linger_bytes)
      : doorbell_(doorbell), linger_ns_(linger_ns), linger_bytes_(linger_bytes) {}

  // Any thread.
  /// Fills in the request of an operation that the caller has claimed and checked, and pushes it:
  /// it is handed on.
  /// @param notify  Wakes the engine; false: the caller runs it, or calls Hurry and wakes it, or
  /// leaves the operation to whoever does next.
  std::shared_ptr<Work> Submit(ClaimedOperation& claimed, std::span<const void* const> in,
                               std::span<void* const> out, const Vote& vote, bool notify);
  /// Takes its place behind what was submitted before; for nothing while it is in the queue.
  void PushJoin() { PushChange(join_); }
  void PushLeave() { PushChange(leave_); }
  /// Somebody waits: nothing is held until the queue has been taken.
  void Hurry() { urgent_.store(true); }
  bool Empty() const { return head_.load(std::memory_order_acquire) == nullptr; }
  /// Something is in the queue that the engine was notified of, or somebody waits for.
  bool IsWanted() const { return !Empty() && (urgent_.load() || rung_.load()); }

  // The holder of the engine lock.
  /// The oldest operation, of which the others follow by `next`; nullptr if there is none, or they
  /// are held: then `*wake_in_ns` is when not any more, unless it is earlier.
  Operation* TakeReady(int64_t now_ns, int64_t* wake_in_ns);
  Operation* TakeAll();
  bool IsJoin(const Operation& operation) const { return &operation == &join_; }
  bool IsLeave(const Operation& operation) const { return &operation == &leave_; }

 private:
  void Push(Operation& operation);
  void PushChange(Operation& change);
  bool IsHeld(int64_t now_ns, int64_t* wake_in_ns);

  FutexDoorbell& doorbell_;
  const int64_t linger_ns_;
  const int64_t linger_bytes_;
  int64_t held_since_ns_ = 0;  // first sight of submissions still held; 0: none; engine lock

  alignas(64) std::atomic<Operation*> head_{nullptr};
  std::atomic<bool> urgent_{false};  // somebody waits: hold nothing
  std::atomic<bool> rung_{false};    // the doorbell was rung for what is in the queue
  std::atomic<int64_t> held_bytes_{0};
  Operation join_, leave_;  // stand for the two in the queue
};

}  // namespace farandole
