// Whether an engine may still touch the tensors it has borrowed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "core/clock.h"

namespace farandole {

/// Protects memory that was released to its users against an engine whose library call returns
/// late.
///
/// The engine holds it while it runs a plane, and a plane releases it around each library call that
/// might not return. Whoever fails operations in the engine's place revokes it first: that waits
/// for a copy that is being made, which is short, and not for a library.
///
/// Thread safety: Acquire and Release by the one thread that runs the engine; Revoke and revoked
/// from any thread. Invariant: after a Revoke that returned true, Acquire fails for ever.
class BorrowedMemory {
 public:
  /// @return false once revoked: nothing borrowed may be read or written any more.
  bool Acquire() {
    uint32_t idle = 0;
    return state_.compare_exchange_strong(idle, kHeld);
  }
  void Release() { state_.fetch_and(~kHeld); }
  /// Waits up to `timeout_ns` for the holder. @return false if it still holds.
  bool Revoke(int64_t timeout_ns) {
    state_.fetch_or(kRevoked);
    for (int64_t waited_ns = 0; (state_.load() & kHeld) != 0; waited_ns += kNapNs) {
      // Counted in naps: a process that was stopped as a whole has not let the holder finish.
      if (waited_ns >= timeout_ns) return false;
      std::this_thread::sleep_for(std::chrono::nanoseconds(kNapNs));
    }
    return true;
  }
  bool revoked() const { return (state_.load() & kRevoked) != 0; }

 private:
  static constexpr uint32_t kHeld = 1, kRevoked = 2;
  static constexpr int64_t kNapNs = 100 * kNsPerUs;
  std::atomic<uint32_t> state_{0};
};

/// The memory, acquired for a scope, however that ends.
class AcquiredMemory {
 public:
  explicit AcquiredMemory(BorrowedMemory& memory) : memory_(memory), is_held_(memory.Acquire()) {}
  ~AcquiredMemory() {
    if (is_held_) memory_.Release();
  }
  AcquiredMemory(const AcquiredMemory&) = delete;
  AcquiredMemory& operator=(const AcquiredMemory&) = delete;
  /// false: it was revoked before.
  bool is_held() const { return is_held_; }

 private:
  BorrowedMemory& memory_;
  const bool is_held_;
};

/// A library call from inside a plane: borrowed memory may be released to its users meanwhile.
class LibraryCall {
 public:
  /// @param memory  Held by this thread; nullptr: there is nothing to protect.
  explicit LibraryCall(BorrowedMemory* memory) : memory_(memory) {
    if (memory_ != nullptr) memory_->Release();
  }
  /// After the call. @return false: it returned too late, and the plane must touch nothing
  /// borrowed.
  bool ReturnedInTime() const { return memory_ == nullptr || memory_->Acquire(); }

 private:
  BorrowedMemory* const memory_;
};

}  // namespace farandole
