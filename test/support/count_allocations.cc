#include "test/support/count_allocations.h"

#include <cstdlib>
#include <new>

namespace farandole {
namespace {

thread_local bool counting = false;
thread_local int64_t allocations = 0;
thread_local int64_t until_failure = 0;  // allocations; 0: none fails
thread_local bool failed = false;

}  // namespace

CountAllocations::CountAllocations() {
  allocations = 0;
  counting = true;
}
CountAllocations::~CountAllocations() { counting = false; }
int64_t CountAllocations::count() const { return allocations; }

FailAllocation::FailAllocation(int64_t nth) {
  failed = false;
  until_failure = nth;
}
FailAllocation::~FailAllocation() { until_failure = 0; }
bool FailAllocation::has_failed() const { return failed; }

void* TryAllocate(std::size_t size) {
  if (counting) ++allocations;
  if (until_failure > 0 && --until_failure == 0) {
    failed = true;
    return nullptr;
  }
  return std::malloc(size == 0 ? 1 : size);
}

void* Allocate(std::size_t size) {
  void* memory = TryAllocate(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace farandole

#ifndef FARANDOLE_SANITIZE_THREAD  // whose runtime has these operators itself
void* operator new(std::size_t size) { return farandole::Allocate(size); }
void* operator new[](std::size_t size) { return farandole::Allocate(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return farandole::TryAllocate(size);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return farandole::TryAllocate(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
#endif

// For AddressSanitizer, by its name for it. A list of Protocol Buffers that has no memory to grow
// forgets the message that it made for its new place.
extern "C" const char* __lsan_default_suppressions();   // NOLINT
extern "C" const char* __lsan_default_suppressions() {  // NOLINT
  return "leak:google::protobuf::internal::RepeatedPtrFieldBase::Add<";
}
