// Counts calls of operator new, for tests that promise none, or makes one fail. Link
// count_allocations.cc into the test program.
#pragma once

#include <cstdint>

namespace farandole {

/// Counts the calling thread's allocations between construction and count(); none with
/// ThreadSanitizer. Not nested.
class CountAllocations {
 public:
  CountAllocations();
  ~CountAllocations();
  int64_t count() const;
};

/// Makes the calling thread's `nth` allocation from here on throw std::bad_alloc; none with
/// ThreadSanitizer. Not nested.
class FailAllocation {
 public:
  explicit FailAllocation(int64_t nth);
  ~FailAllocation();
  /// Whether it has been reached.
  bool has_failed() const;
};

}  // namespace farandole
