#include "test/fakes/fake_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#ifdef FARANDOLE_SANITIZE_ADDRESS
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size) ((void)(begin), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(begin, size) ((void)(begin), (void)(size))
#endif

namespace farandole {
namespace {

constexpr size_t kGuardBytes = 256;  // also the alignment
constexpr unsigned char kGuard = 0xA5;
constexpr unsigned char kFresh = 0xCB;
constexpr unsigned char kFreed = 0xDD;

bool IsGuard(const unsigned char* begin) {
  return std::all_of(begin, begin + kGuardBytes, [](unsigned char c) { return c == kGuard; });
}

}  // namespace

void* FakeMemory::Allocate(int64_t size_bytes) {
  std::lock_guard lock(mutex_);
  if (size_bytes < 0 || size_bytes > limit_ - held_) return nullptr;
  const auto size = static_cast<size_t>(size_bytes);
  void* base = nullptr;
  if (posix_memalign(&base, kGuardBytes, size + 2 * kGuardBytes) != 0) return nullptr;
  auto* memory = static_cast<unsigned char*>(base) + kGuardBytes;
  std::memset(base, kGuard, kGuardBytes);
  std::memset(memory, kFresh, size);
  std::memset(memory + size, kGuard, kGuardBytes);
  ASAN_POISON_MEMORY_REGION(base, kGuardBytes);
  ASAN_POISON_MEMORY_REGION(memory + size, kGuardBytes);
  sizes_[memory] = size_bytes;
  held_ += size_bytes;
  return memory;
}

bool FakeMemory::Has(const void* memory) const {
  std::lock_guard lock(mutex_);
  return sizes_.contains(const_cast<void*>(memory));
}

std::string FakeMemory::Free(void* memory) {
  if (memory == nullptr) return "";
  std::lock_guard lock(mutex_);
  const auto found = sizes_.find(memory);
  if (found == sizes_.end()) return "memory was freed that is not, or no longer, allocated here";
  const auto size = static_cast<size_t>(found->second);
  auto* bytes = static_cast<unsigned char*>(memory);
  ASAN_UNPOISON_MEMORY_REGION(bytes - kGuardBytes, size + 2 * kGuardBytes);
  std::string wrong;
  if (!IsGuard(bytes - kGuardBytes)) wrong = "the bytes before a block were overwritten";
  if (!IsGuard(bytes + size)) wrong = "the bytes after a block were overwritten";
  if (!wrong.empty()) wrong += " (" + std::to_string(size) + " bytes)";
  std::memset(memory, kFreed, size);
  held_ -= found->second;
  sizes_.erase(found);
  std::free(bytes - kGuardBytes);
  return wrong;
}

void FakeMemory::FreeAll() {
  std::map<void*, int64_t> left;
  {
    std::lock_guard lock(mutex_);
    left = sizes_;
  }
  for (const auto& [memory, size] : left) (void)Free(memory);
}

void FakeMemory::SetLimit(int64_t size_bytes) {
  std::lock_guard lock(mutex_);
  limit_ = size_bytes;
}

int64_t FakeMemory::blocks() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(sizes_.size());
}

int64_t FakeMemory::size_bytes() const {
  std::lock_guard lock(mutex_);
  return held_;
}

}  // namespace farandole
