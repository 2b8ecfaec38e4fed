// The fake libnccl's calls about communicators, versions and errors.
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "test/fakes/nccl/comm.h"
#include "test/fakes/nccl/journal.h"

using farandole::FakeNcclFail;
using farandole::FakeNcclJournal;
using farandole::FakeNcclUse;

namespace {

constexpr char kIdPrefix[] = "farandole-fake-nccl-";
constexpr unsigned kMagic = 0xcafebeef;
constexpr int kUndefined = -2147483647 - 1;

FakeNcclJournal& Journal() { return FakeNcclJournal::Get(); }

ncclResult_t CheckInit(const ncclComm_t* comm, int nranks, const ncclUniqueId& id, int rank,
                       const ncclConfig_t* config) {
  if (farandole_fake_current_device() == nullptr) {
    Journal().Misuse("ncclCommInitRankConfig: no device is current");
    return FakeNcclFail(ncclUnhandledCudaError, "fake NCCL: no device is current");
  }
  if (comm == nullptr || nranks < 1 || nranks > farandole::kFakeNcclRanks || rank < 0 ||
      rank >= nranks || std::strncmp(id.internal, kIdPrefix, sizeof kIdPrefix - 1) != 0) {
    return FakeNcclFail(ncclInvalidArgument, "fake NCCL: a wrong rank, size (1 to 8) or id");
  }
  if (config == nullptr || config->magic != kMagic || config->size < sizeof(size_t) + 12) {
    return FakeNcclFail(ncclInvalidArgument, "fake NCCL: the config was not initialized");
  }
  if (config->blocking != 0) {
    return FakeNcclFail(ncclInvalidArgument, "fake NCCL: it has no blocking communicators");
  }
  return ncclSuccess;
}

/// What was set at or above the place of `maxCTAs`, or 0.
int MaxCtas(const ncclConfig_t* config) {
  const bool known = config != nullptr && config->size >= offsetof(ncclConfig_t, maxCTAs) + 4;
  return known && config->maxCTAs != kUndefined ? config->maxCTAs : 0;
}

/// Under comm.mutex.
void End(ncclComm& comm, ncclComm::State state) {
  if (!comm.exchange->Connected()) comm.exchange->Unlink();
  comm.state = state;
}

}  // namespace

namespace farandole {

int FakeNcclVersion() { return Journal().Number("VERSION", FARANDOLE_FAKE_NCCL_VERSION); }

void TearDownFakeNccl(ncclComm& comm) {
  AwaitFakeNcclComm(comm);
  std::lock_guard lock(comm.mutex);
  End(comm, ncclComm::State::kAborted);
}

}  // namespace farandole

ncclResult_t ncclGetVersion(int* version) {
  Journal().Count("ncclGetVersion");
  *version = farandole::FakeNcclVersion();
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId) {
  Journal().Count("ncclGetUniqueId");
  std::random_device random;
  *uniqueId = {};
  std::snprintf(uniqueId->internal, sizeof uniqueId->internal, "%s%d-%08x%08x", kIdPrefix,
                static_cast<int>(getpid()), random(), random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                                    ncclConfig_t* config) {
  const int max_ctas = MaxCtas(config);
  farandole::FakeNcclCall call{
      .name = "ncclCommInitRankConfig", .count = nranks, .op = max_ctas, .rank = rank};
  for (const char* name : {"NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"}) {
    (void)Journal().Environment(name);
  }
  Journal().Count(call.name);
  int result = CheckInit(comm, nranks, commId, rank, config);
  const auto end = [&](int why) {
    call.result = why;
    Journal().Add(call);
    return static_cast<ncclResult_t>(why);
  };
  if (result != 0) return end(result);
  commId.internal[sizeof commId.internal - 1] = '\0';
  ncclComm* const made =
      farandole::EnterFakeNccl(std::string("/") + commId.internal, rank, nranks, &result, max_ctas);
  if (made == nullptr) return end(result);
  *comm = made;
  call.comm = made;
  return end(ncclInProgress);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  FakeNcclUse use({.name = "ncclCommFinalize", .comm = comm});
  if (!use.ok()) return use.result();
  std::lock_guard lock(comm->mutex);
  comm->state = ncclComm::State::kFinalizing;
  farandole::FinalizeFakeNccl(*comm);
  return use.End(ncclInProgress);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  FakeNcclUse use({.name = "ncclCommDestroy", .comm = comm}, FakeNcclUse::Rules::kExists);
  if (!use.ok()) return use.result();
  farandole::AwaitFakeNcclComm(*comm);
  comm->exchange->AwaitPeersClosed();
  std::lock_guard lock(comm->mutex);
  End(*comm, ncclComm::State::kDestroyed);
  return use.End(ncclSuccess);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  farandole::FakeNcclCall call{.name = "ncclCommAbort", .comm = comm};
  const auto end = [&](ncclResult_t result) {
    call.result = result;
    Journal().Add(call);
    return result;
  };
  if (comm == nullptr) return end(ncclInvalidArgument);
  call.rank = comm->rank;
  Journal().Count(call.name);
  {
    std::lock_guard lock(comm->mutex);
    if (comm->over() || comm->aborting) {
      Journal().Misuse("ncclCommAbort: the communicator was destroyed or aborted before");
      return end(ncclInvalidArgument);
    }
    comm->aborting = true;
  }
  comm->exchange->Abort();
  if (!farandole::DeferFakeNcclAbort(*comm)) farandole::TearDownFakeNccl(*comm);
  return end(ncclSuccess);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
  Journal().Count("ncclCommGetAsyncError");
  if (comm == nullptr || asyncError == nullptr) return ncclInvalidArgument;
  bool over = false;
  {
    std::lock_guard lock(comm->mutex);
    over = comm->over();
  }
  if (over) {
    Journal().Misuse("ncclCommGetAsyncError: the communicator was destroyed or aborted before");
    return ncclInvalidArgument;
  }
  *asyncError = farandole::LookAtFakeNcclComm(*comm);
  return ncclSuccess;
}

const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string text;
  text = farandole::FakeNcclLastError();
  return text.c_str();
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (static_cast<int>(result)) {
    case ncclSuccess:
      return "no error (fake NCCL)";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (fake NCCL)";
    case ncclSystemError:
      return "unhandled system error (fake NCCL)";
    case ncclInternalError:
      return "internal error (fake NCCL)";
    case ncclInvalidArgument:
      return "invalid argument (fake NCCL)";
    case ncclInvalidUsage:
      return "invalid usage (fake NCCL)";
    case ncclRemoteError:
      return "remote process exited or there was a network error (fake NCCL)";
    case ncclInProgress:
      return "NCCL operation in progress (fake NCCL)";
    default:
      return "unknown result code (fake NCCL)";
  }
}

// Aligned as NCCL's granularity of 2 MiB is not: nothing depends on it.
ncclResult_t ncclMemAlloc(void** ptr, size_t size) {
  Journal().Count("ncclMemAlloc");
  *ptr = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  return *ptr != nullptr ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* ptr) {
  Journal().Count("ncclMemFree");
  std::free(ptr);
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buff, size_t size, void** handle) {
  FakeNcclUse use({.name = "ncclCommRegister", .comm = comm, .count = static_cast<int64_t>(size)});
  if (!use.ok()) return use.result();
  *handle = buff;
  return use.End(ncclSuccess);
}
