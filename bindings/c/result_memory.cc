#include "bindings/c/result_memory.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

namespace {

constexpr int64_t kAlign = 64;  // of a cache line, and of any vector register

}  // namespace

farandole_buffer::~farandole_buffer() {
  if (device == nullptr) {
    std::free(data);
  } else if (data != nullptr) {
    device->Free(data);
  }
}

namespace farandole {

Result<void*> LibraryResults::Allocate(size_t tensor, std::span<const int64_t> /*rows*/,
                                       int64_t bytes) {
  void* memory = nullptr;
  if (device_ == nullptr) {
    const int64_t rounded = (std::max<int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign;
    memory = std::aligned_alloc(kAlign, static_cast<size_t>(rounded));
    if (memory == nullptr) {
      return ResourceExhausted("no memory for a result of " + std::to_string(bytes) + " bytes");
    }
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
  void* const memory = allocator_.allocate(allocator_.user, static_cast<int32_t>(tensor),
                                           rows.data(), static_cast<int32_t>(rows.size()), bytes);
  if (memory != nullptr || bytes == 0) return memory;
  return ResourceExhausted("no memory for a result of " + std::to_string(bytes) + " bytes");
}

}  // namespace farandole
