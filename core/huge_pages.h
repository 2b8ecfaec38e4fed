// Large memory in huge pages.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace farandole {

/// Asks the kernel for huge pages, if it has any, in memory that is about to be written first: a
/// fresh page costs a fault then, and with small ones those take longer than a transfer. Does
/// nothing for less than 4 MiB, which hold a huge page wherever they begin.
inline void UseHugePages(void* memory, size_t bytes) {
  constexpr size_t kLarge = size_t{4} << 20;
  if (bytes < kLarge) return;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // where madvise wants to begin
  const size_t before = (page - reinterpret_cast<uintptr_t>(memory) % page) % page;
  // Where the kernel refuses, only speed is lost.
  (void)madvise(static_cast<std::byte*>(memory) + before, bytes - before, MADV_HUGEPAGE);
}

}  // namespace farandole
