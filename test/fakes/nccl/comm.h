// The fake communicator, from the side of NCCL's calls: its states and the rules of use.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include FARANDOLE_FAKE_NCCL_ABI
#include "test/fakes/driver.h"
#include "test/fakes/nccl/control.h"
#include "test/fakes/nccl/exchange.h"

/// Thread safety: as NCCL's, for one thread at a time; ncclCommAbort and ncclCommGetAsyncError from
/// any. Lifetime: never freed, so that a use after the end is noticed.
struct ncclComm {
  enum class State : uint8_t { kConnecting, kReady, kFinalizing, kFinalized, kDestroyed, kAborted };

  struct Launch {
    const char* name = "";
    cudaStream_t stream = nullptr;
    std::vector<farandole::FakeNcclWork> works;
  };

  std::string name;  ///< Of the memory it shares with its peers.
  int rank = 0;
  int size = 0;
  const FarandoleFakeDevice* device = nullptr;
  std::shared_ptr<farandole::FakeNcclExchange> exchange;

  std::atomic<int> outstanding{0};  // launches in streams
  std::atomic<bool> in_call{false};
  std::atomic<bool> busy{false};  // a non-blocking call is in progress, on this thread:
  std::thread worker;
  int calls = 0;  // no lock: ThreadSanitizer sees two threads that use one communicator

  std::mutex mutex;  // what follows
  State state = State::kConnecting;
  bool aborting = false;
  ncclResult_t error = ncclSuccess;
  std::string error_text;
  int init_looks = 0;
  int collectives = 0;

  bool over() const { return state == State::kDestroyed || state == State::kAborted; }
};

namespace farandole {

int FakeNcclVersion();
/// Keeps what ncclGetLastError says, of the process. @return `result`.
ncclResult_t FakeNcclFail(ncclResult_t result, const std::string& text);
std::string FakeNcclLastError();

/// All communicators of the process.
ncclComm* NewFakeNcclComm();
std::vector<ncclComm*> FakeNcclComms();

/// This rank's side of the communicator that has its memory by that name.
/// @return nullptr with `*result`, if there is no memory or the rank is in already.
ncclComm* EnterFakeNccl(const std::string& name, int rank, int size, int* result, int max_ctas = 0);

/// ncclCommGetAsyncError's answer.
ncclResult_t LookAtFakeNcclComm(ncclComm& comm);
/// Puts work into its stream: of one rank at once; else a thread does, after a while, and after it
/// has met the others at the first use of an algorithm or peer. @return Success or InProgress.
ncclResult_t LaunchFakeNccl(ncclComm& comm, ncclComm::Launch launch);
/// A thread waits for the kernels, then leaves the peers' proxies.
void FinalizeFakeNccl(ncclComm& comm);
/// What ends a communicator waits for: its thread, and its kernels, and so whatever the streams
/// hold before them. Then it leaves the peers' proxies.
void AwaitFakeNcclComm(ncclComm& comm);
/// The calling thread is inside ncclGroupStart: the end of an aborted communicator waits for its
/// outermost ncclGroupEnd.
bool DeferFakeNcclAbort(ncclComm& comm);
/// The second half of an abort.
void TearDownFakeNccl(ncclComm& comm);

/// One call of a communicator: counted, logged and checked as it begins, over with the object.
///
///   FakeNcclUse use({.name = "ncclAllReduce", .comm = comm, ...});
///   if (!use.ok()) return use.result();
///   return use.End(...);
class FakeNcclUse {
 public:
  /// Which rules hold: everything; or the communicator may be connecting, or in error.
  enum class Rules : uint8_t { kReady, kExists };

  explicit FakeNcclUse(FakeNcclCall call, Rules rules = Rules::kReady);
  ~FakeNcclUse();
  FakeNcclUse(const FakeNcclUse&) = delete;
  FakeNcclUse& operator=(const FakeNcclUse&) = delete;

  bool ok() const { return result_ == ncclSuccess; }
  ncclResult_t result() const { return result_; }
  ncclResult_t End(ncclResult_t result) { return result_ = result; }

 private:
  ncclResult_t Check(Rules rules);

  FakeNcclCall call_;
  ncclComm* const comm_;
  bool entered_ = false;
  ncclResult_t result_ = ncclSuccess;
};

}  // namespace farandole
