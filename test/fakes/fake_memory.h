// Host memory that poses as device memory, and notices what a GPU would not say.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace farandole {

/// Blocks with guards around them. Fresh memory holds 0xCB, freed memory 0xDD until it is given
/// back to the C library (AddressSanitizer reports later accesses, and those to the guards).
///
/// Thread safety: any thread. A block that is never freed is a leak to LeakSanitizer.
class FakeMemory {
 public:
  /// Aligned to 256 bytes. @return nullptr beyond the limit.
  void* Allocate(int64_t size_bytes);
  /// @return What is wrong with that, or nothing.
  std::string Free(void* memory);
  /// Frees all that is left: what a test expects to be given up is no leak.
  void FreeAll();
  void SetLimit(int64_t size_bytes);
  /// Whether a block begins there.
  bool Has(const void* memory) const;
  int64_t blocks() const;
  int64_t size_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<void*, int64_t> sizes_;
  int64_t limit_ = INT64_MAX;
  int64_t held_ = 0;
};

}  // namespace farandole
