// The fake libnccl's calls that came with 2.19 and later: registered memory.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "test/fakes/nccl/comm.h"
#include "test/fakes/nccl/journal.h"
#include "test/fakes/nccl/memory.h"

using farandole::FakeNcclFail;
using farandole::FakeNcclJournal;
using farandole::FakeNcclUse;

namespace {

constexpr size_t kPageBytes = 4096;

struct Memory {
  std::mutex mutex;
  std::map<void*, size_t> sizes;
};

Memory& AllMemory() {
  static auto* memory = new Memory;
  return *memory;
}

ncclResult_t Register(const char* name, ncclComm_t comm, void* buff, size_t size, void** handle) {
  FakeNcclUse use({.name = name, .comm = comm, .count = static_cast<int64_t>(size)});
  if (!use.ok()) return use.result();
  if (buff == nullptr || size == 0 || handle == nullptr) {
    return use.End(FakeNcclFail(ncclInvalidArgument, "fake NCCL: nothing to register"));
  }
  *handle = new char;  // an address of its own
  std::lock_guard lock(comm->mutex);
  comm->registered[*handle] = static_cast<int64_t>(size);
  return use.End(ncclSuccess);
}

ncclResult_t Deregister(const char* name, ncclComm_t comm, void* handle) {
  FakeNcclUse use({.name = name, .comm = comm}, FakeNcclUse::Rules::kExists);
  if (!use.ok()) return use.result();
  std::lock_guard lock(comm->mutex);
  if (comm->registered.erase(handle) == 0) {
    FakeNcclJournal::Get().Misuse(std::string(name) + ": no such registration");
    return use.End(FakeNcclFail(ncclInvalidArgument, "fake NCCL: no such registration"));
  }
  delete static_cast<char*>(handle);
  return use.End(ncclSuccess);
}

}  // namespace

namespace farandole {

int64_t FakeNcclMemoryBytes() {
  std::lock_guard lock(AllMemory().mutex);
  int64_t sum = 0;
  for (const auto& [memory, size] : AllMemory().sizes) sum += static_cast<int64_t>(size);
  return sum;
}

}  // namespace farandole

ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  const int failed = FakeNcclJournal::Get().Begin("ncclMemAlloc", -1);
  if (failed != 0) {
    return FakeNcclFail(static_cast<ncclResult_t>(failed),
                        "fake NCCL: ncclMemAlloc was made to fail");
  }
  if (farandole_fake_current_device() == nullptr) {
    FakeNcclJournal::Get().Misuse("ncclMemAlloc: no device is current");
    return FakeNcclFail(ncclUnhandledCudaError, "fake NCCL: no device is current");
  }
  if (ptr == nullptr || size == 0) return ncclInvalidArgument;
  *ptr = std::aligned_alloc(kPageBytes, (size + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (*ptr == nullptr) return FakeNcclFail(ncclSystemError, "fake NCCL: out of memory");
  std::memset(*ptr, 0xCB, size);
  std::lock_guard lock(AllMemory().mutex);
  AllMemory().sizes[*ptr] = size;
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* ptr) {
  const int failed = FakeNcclJournal::Get().Begin("ncclMemFree", -1);
  if (failed != 0) return static_cast<ncclResult_t>(failed);
  if (ptr == nullptr) return ncclSuccess;
  std::lock_guard lock(AllMemory().mutex);
  const auto found = AllMemory().sizes.find(ptr);
  if (found == AllMemory().sizes.end()) {
    FakeNcclJournal::Get().Misuse("ncclMemFree: memory that is not, or no longer, allocated");
    return FakeNcclFail(ncclInvalidArgument, "fake NCCL: no such memory");
  }
  std::memset(ptr, 0xDD, found->second);
  AllMemory().sizes.erase(found);
  std::free(ptr);
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  return Register("ncclCommRegister", comm, buff, size, handle);
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  return Deregister("ncclCommDeregister", comm, handle);
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                                    int) {
  return Register("ncclCommWindowRegister", comm, buff, size, reinterpret_cast<void**>(win));
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
  return Deregister("ncclCommWindowDeregister", comm, win);
}
