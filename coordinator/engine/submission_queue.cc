#include "coordinator/engine/submission_queue.h"

#include <algorithm>

namespace farandole {

// The caller has taken the operation, so the request is filled in without a lock. After Push it may
// end, and be started again by another thread, before this function returns: what is needed
// afterwards is read before.
std::shared_ptr<Work> SubmissionQueue::Submit(ClaimedOperation& claimed,
                                              std::span<const void* const> in,
                                              std::span<void* const> out, const Vote& vote,
                                              bool notify) {
  Operation& operation = *claimed;
  std::copy(in.begin(), in.end(), operation.in.begin());
  std::copy(out.begin(), out.end(), operation.out.begin());
  if (out.empty()) std::fill(operation.out.begin(), operation.out.end(), nullptr);
  operation.vote = vote;
  operation.failure = Status();
  operation.is_awaited = !notify;
  operation.work = std::make_shared<Work>(operation.is_of_all_ranks);
  if (RowsMayDiffer(operation.name.kind)) {
    operation.work->MakeRoomForRows(operation.rows.size(), operation.ranks);
    if (operation.name.kind == OpKind::kAllgather) operation.vote.rows = operation.rows;
  }
  std::shared_ptr<Work> work = operation.work;
  const int64_t bytes = notify ? TotalBytes(operation) : 0;  // else it is not held
  operation.started.store(true, std::memory_order_release);
  claimed.HandOn();
  Push(operation);  // from here on the operation is the engine's
  if (!notify) return work;
  held_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  // One ring for all that gathers in the queue. A large submission rings again, since it ends the
  // time for which others are held.
  if (!rung_.exchange(true) || bytes >= linger_bytes_) doorbell_.Summon();
  return work;
}

// The release makes the request visible to TakeAll, which acquires.
void SubmissionQueue::Push(Operation& operation) {
  Operation* head = head_.load(std::memory_order_relaxed);
  do {
    operation.next = head;
  } while (!head_.compare_exchange_weak(head, &operation, std::memory_order_release,
                                        std::memory_order_relaxed));
}

// Through the queue, so that a caller need not wait for the engine, which may be inside a library.
void SubmissionQueue::PushChange(Operation& change) {
  if (!change.in_flight.exchange(true)) Push(change);
  Hurry();
  doorbell_.Summon();
}

// The ring that woke the engine may have been for something taken before it; the next one must ring
// again. The exchange orders this against Submit: either it rings, or its push is seen here. Where
// `rung_` is false already the next Submit rings in any case.
Operation* SubmissionQueue::TakeReady(int64_t now_ns, int64_t* wake_in_ns) {
  if (Empty()) {
    if (!rung_.load(std::memory_order_relaxed) && !urgent_.load(std::memory_order_relaxed))
      return nullptr;
    (void)rung_.exchange(false);
    (void)urgent_.exchange(false);
    if (Empty()) return nullptr;
    urgent_.store(true);  // what came meanwhile may have found them set
  }
  return IsHeld(now_ns, wake_in_ns) ? nullptr : TakeAll();
}

bool SubmissionQueue::IsHeld(int64_t now_ns, int64_t* wake_in_ns) {
  if (urgent_.load() || held_bytes_.load(std::memory_order_relaxed) >= linger_bytes_) return false;
  if (!rung_.load()) return true;  // nobody has asked for it; who does notifies
  // From when the engine loop first sees them: callers need not read the clock.
  if (held_since_ns_ == 0) held_since_ns_ = now_ns;
  const int64_t left = held_since_ns_ + linger_ns_ - now_ns;
  if (left <= 0) return false;
  *wake_in_ns = *wake_in_ns < 0 ? left : std::min(*wake_in_ns, left);
  return true;
}

// The flags are cleared first: what is pushed afterwards sets them again.
Operation* SubmissionQueue::TakeAll() {
  urgent_.store(false);
  (void)rung_.exchange(false);
  held_bytes_.store(0, std::memory_order_relaxed);
  held_since_ns_ = 0;
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

}  // namespace farandole
