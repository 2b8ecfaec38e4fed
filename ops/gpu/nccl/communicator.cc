#include "ops/gpu/nccl/communicator.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace farandole {
namespace {

const char* NameOf(NcclCall::Kind kind) {
  switch (kind) {
    case NcclCall::Kind::kAllReduce:
      return "ncclAllReduce";
    case NcclCall::Kind::kBroadcast:
      return "ncclBroadcast";
    case NcclCall::Kind::kAllGather:
      return "ncclAllGather";
    case NcclCall::Kind::kReduceScatter:
      return "ncclReduceScatter";
    case NcclCall::Kind::kSend:
      return "ncclSend";
    case NcclCall::Kind::kReceive:
      return "ncclRecv";
  }
  return "";  // unreachable
}

const char* NameOfGroup(NcclCall::Kind first) {
  if (first == NcclCall::Kind::kAllReduce) return "ncclGroupEnd of ncclAllReduce";
  return first == NcclCall::Kind::kBroadcast ? "ncclGroupEnd of ncclBroadcast"
                                             : "ncclGroupEnd of ncclSend and ncclRecv";
}

bool IsAccepted(NcclResult result) {
  return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

}  // namespace

// Nobody hears of a failure any more. A communicator in error, or busy, must not be destroyed. The
// thread that serves the peers' proxy connections is joined by ncclCommDestroy and ends when each
// peer has closed its own in ncclCommFinalize (NCCL 2.27, src/proxy.cc: ncclProxyService).
NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  const int64_t deadline_ns = clock_.NowNs() + kCloseNs;
  if (failure_.ok())
    failure_ = Complete("ncclCommFinalize", api().CommFinalize(comm_), deadline_ns);
  if (failure_.ok()) {
    (void)api().CommDestroy(comm_);
  } else {
    Abort();
  }
}

Status NcclCommunicator::Connect() {
  NcclUniqueId id{};
  if (options_.unique_id.size() != sizeof(id.internal)) {
    return failure_ = Internal("a unique id of NCCL has " + std::to_string(sizeof(id.internal)) +
                               " bytes, this one " + std::to_string(options_.unique_id.size()));
  }
  std::memcpy(id.internal, options_.unique_id.data(), sizeof(id.internal));
  NcclConfig config;
  config.blocking = 0;
  // Kernels of ranks that share a GPU wait for each other: if they do not all fit, NCCL hangs.
  if (options_.shared_gpu) config.max_ctas = 2;
  return Complete("ncclCommInitRankConfig",
                  api().CommInitRankConfig(&comm_, options_.size, id, options_.index, &config));
}

// A group is open for the thread, not for the communicator: it is ended whatever happens in it.
Status NcclCommunicator::Run(std::span<const NcclCall> calls, NcclStream stream) {
  if (!failure_.ok() || calls.empty()) return failure_;
  const NcclCall::Kind first = calls.front().kind;
  if (calls.size() == 1) return Complete(NameOf(first), Enqueue(calls.front(), stream));
  if (const NcclResult begun = api().GroupStart(); begun != NcclResult::kSuccess) {
    return Fail("ncclGroupStart", begun);
  }
  const char* refused = nullptr;
  NcclResult result = NcclResult::kSuccess;
  for (const NcclCall& call : calls) {
    result = Enqueue(call, stream);
    if (IsAccepted(result)) continue;
    refused = NameOf(call.kind);
    break;
  }
  const NcclResult ended = api().GroupEnd();
  if (refused != nullptr) return Fail(refused, result);
  return Complete(NameOfGroup(first), ended);
}

// The handle is not needed: a communicator ends its registrations (NCCL 2.27, src/init.cc:
// commFree, src/register/register.cc: ncclRegCleanup).
Result<void*> NcclCommunicator::AllocateRegistered(int64_t size_bytes) {
  if (!failure_.ok()) return failure_;
  const auto size = static_cast<size_t>(size_bytes);
  void* memory = nullptr;
  if (const NcclResult got = api().MemAlloc(&memory, size); got != NcclResult::kSuccess) {
    return ResourceExhausted(Fail("ncclMemAlloc", got).message());
  }
  void* handle = nullptr;
  const Status status =
      Complete("ncclCommRegister", api().CommRegister(comm_, memory, size, &handle));
  if (status.ok()) return memory;
  FreeRegistered(library_, memory);
  return status;
}

void NcclCommunicator::FreeRegistered(const NcclLibrary& library, void* memory) {
  (void)library.api().MemFree(memory);  // what fails here, failed before
}

NcclResult NcclCommunicator::Enqueue(const NcclCall& call, NcclStream stream) {
  const auto count = static_cast<size_t>(call.count);
  switch (call.kind) {
    case NcclCall::Kind::kAllReduce:
      return api().AllReduce(call.in, call.out, count, call.type, call.op, comm_, stream);
    case NcclCall::Kind::kBroadcast:
      return api().Broadcast(call.in, call.out, count, call.type, call.peer, comm_, stream);
    case NcclCall::Kind::kAllGather:
      return api().AllGather(call.in, call.out, count, call.type, comm_, stream);
    case NcclCall::Kind::kReduceScatter:
      return api().ReduceScatter(call.in, call.out, count, call.type, call.op, comm_, stream);
    case NcclCall::Kind::kSend:
      return api().Send(call.in, count, call.type, call.peer, comm_, stream);
    case NcclCall::Kind::kReceive:
      return api().Recv(call.out, count, call.type, call.peer, comm_, stream);
  }
  return NcclResult::kInvalidArgument;  // unreachable
}

// Polls until the call is complete, without sleep for kSpinNs. Nothing but CommGetAsyncError and
// CommAbort may be called before.
Status NcclCommunicator::Complete(const char* call, NcclResult result, int64_t deadline_ns) {
  const int64_t spin_end_ns = clock_.NowNs() + kSpinNs;
  while (result == NcclResult::kInProgress) {
    if (is_given_up_ && is_given_up_()) {
      return failure_ = Aborted(std::string(call) + " was given up");
    }
    if (deadline_ns >= 0 && clock_.NowNs() >= deadline_ns) {
      return failure_ = Timeout(std::string(call) + " took too long");
    }
    if (clock_.NowNs() < spin_end_ns) {
      std::this_thread::yield();
    } else {
      ++sleeps_;
      std::this_thread::sleep_for(std::chrono::nanoseconds(kPollNs));
    }
    const NcclResult answer = api().CommGetAsyncError(comm_, &result);
    if (answer != NcclResult::kSuccess) return Fail("ncclCommGetAsyncError", answer);
  }
  return result == NcclResult::kSuccess ? Status() : Fail(call, result);
}

Status NcclCommunicator::CheckAsync() {
  if (!failure_.ok() || comm_ == nullptr) return failure_;
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api().CommGetAsyncError(comm_, &state);
  if (asked != NcclResult::kSuccess) return Fail("ncclCommGetAsyncError", asked);
  return IsAccepted(state) ? Status() : Fail("a collective of NCCL", state);
}

void NcclCommunicator::Abort() {
  if (failure_.ok()) failure_ = Aborted("the NCCL communicator was given up");
  if (comm_ == nullptr) return;
  (void)api().CommAbort(std::exchange(comm_, nullptr));  // the reason is known already
}

Status NcclCommunicator::Fail(const char* call, NcclResult result) {
  const Code code = result == NcclResult::kRemoteError ? Code::kUnavailable : Code::kInternal;
  std::string text = std::string(call) + ": " + api().GetErrorString(result);
  const char* const last = api().GetLastError(comm_);
  if (last != nullptr && *last != '\0') text += "; " + std::string(last);
  text += "; " + library_.Describe();
  if (!options_.ranks_text.empty()) text += "; " + options_.ranks_text;
  return failure_ = Status(code, std::move(text));
}

}  // namespace farandole
