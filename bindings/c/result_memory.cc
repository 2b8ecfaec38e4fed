#include "bindings/c/result_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace {

constexpr int64_t kAlign = 64;              // of a cache line, and of any vector register
constexpr size_t kPage = 4096;              // bytes; madvise wants to begin at one
constexpr size_t kLarge = size_t{4} << 20;  // bytes; holds a huge page wherever it begins

// A large result in huge pages, if the kernel has any: a fresh page costs a fault when it is first
// written, and with small ones those take longer than the transfer. nullptr: there is no memory.
void* AllocateHost(int64_t bytes) {
  // aligned_alloc takes multiples of the alignment. An empty result gets a line as well: nullptr
  // means only that there is no memory.
  const auto size =
      static_cast<size_t>((std::max<int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
  void* const memory = std::aligned_alloc(kAlign, size);
  if (memory == nullptr || size < kLarge) return memory;
  const size_t before = (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage;
  // Where the kernel has no huge pages, or its small ones are larger, only speed is lost.
  (void)madvise(static_cast<std::byte*>(memory) + before, size - before, MADV_HUGEPAGE);
  return memory;
}

}  // namespace

farandole_buffer::~farandole_buffer() {
  if (owner != nullptr) return;
  if (device == nullptr) {
    // The device is the process's and never destroyed, so a buffer may outlive its context.
    std::free(data);
  } else if (data != nullptr) {
    device->Free(data);
  }
}

namespace farandole {
namespace {

Status NoMemory(int64_t bytes) {
  return ResourceExhausted("no memory for a result of " + std::to_string(bytes) + " bytes");
}

}  // namespace

Result<std::shared_ptr<std::byte>> AllocateZeroes(int64_t bytes) {
  void* const memory = AllocateHost(bytes);
  if (memory == nullptr) {
    return ResourceExhausted("no memory for a buffer of " + std::to_string(bytes) + " bytes");
  }
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                    [](std::byte* gone) { std::free(gone); });
}

Result<void*> LibraryResults::Allocate(size_t tensor, std::span<const int64_t> /*rows*/,
                                       int64_t bytes) {
  void* memory = nullptr;
  if (device_ == nullptr) {
    memory = AllocateHost(bytes);
    if (memory == nullptr) return NoMemory(bytes);
  } else if (bytes > 0) {
    Result<void*> allocated = device_->Allocate(bytes);
    if (!allocated.ok()) return allocated.status();
    memory = allocated.value();
  }
  const std::lock_guard lock(mutex_);
  if (buffers_.size() <= tensor) buffers_.resize(tensor + 1);
  buffers_[tensor] = std::make_unique<farandole_buffer>(memory, bytes, device_);
  return memory;
}

std::unique_ptr<farandole_buffer> LibraryResults::Take(size_t tensor) {
  const std::lock_guard lock(mutex_);
  return tensor < buffers_.size() ? std::move(buffers_[tensor]) : nullptr;
}

Result<void*> CallbackResults::Allocate(size_t tensor, std::span<const int64_t> rows,
                                        int64_t bytes) {
  // An empty result may have any address, also NULL.
  void* const memory = allocator_.allocate(allocator_.user, static_cast<int32_t>(tensor),
                                           rows.data(), static_cast<int32_t>(rows.size()), bytes);
  if (memory != nullptr || bytes == 0) return memory;
  return NoMemory(bytes);
}

}  // namespace farandole
