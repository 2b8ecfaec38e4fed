// Counts calls of operator new, for tests that promise none. Link count_allocations.cc into the
// test program.
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

}  // namespace farandole
