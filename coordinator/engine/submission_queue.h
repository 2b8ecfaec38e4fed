// From any thread to the engine: an intrusive multi-producer, single-consumer queue of operations.
#pragma once

#include <atomic>
#include <cstdint>

#include "coordinator/engine/operation.h"

namespace farandole {

/// A lock-free stack whose consumer takes everything at once and turns it round.
/// Source: R. K. Treiber, "Systems programming: coping with parallelism", IBM RJ 5118, 1986; taking
/// all nodes with one exchange has no ABA problem.
///
/// Thread safety: Push from any thread; TakeAll from the holder of the engine lock. Never
/// allocates, never blocks. Invariant: operations of one thread come out in the order it pushed
/// them.
class SubmissionQueue {
 public:
  void Push(Operation* operation) {
    Operation* head = head_.load(std::memory_order_relaxed);
    do {
      operation->next = head;
    } while (!head_.compare_exchange_weak(head, operation, std::memory_order_release,
                                          std::memory_order_relaxed));
  }
  bool Empty() const { return head_.load(std::memory_order_acquire) == nullptr; }
  /// The oldest operation; follow `next`.
  Operation* TakeAll() {
    Operation* newest = head_.exchange(nullptr, std::memory_order_acquire);
    Operation* oldest = nullptr;
    while (newest != nullptr) {
      Operation* next = newest->next;
      newest->next = oldest;
      oldest = newest;
      newest = next;
    }
    return oldest;
  }

 private:
  alignas(64) std::atomic<Operation*> head_{nullptr};
};

}  // namespace farandole
