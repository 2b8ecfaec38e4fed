#include "ops/nccl/communicator.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace farandole {
namespace {

const char* NameOf(NcclTransfer::Kind kind) {
  switch (kind) {
    case NcclTransfer::Kind::kBroadcast:
      return "ncclBroadcast";
    case NcclTransfer::Kind::kSend:
      return "ncclSend";
    case NcclTransfer::Kind::kReceive:
      return "ncclRecv";
  }
  return "ncclGroupEnd";  // unreachable
}

const char* NameOfGroup(NcclTransfer::Kind kind) {
  return kind == NcclTransfer::Kind::kBroadcast ? "ncclGroupEnd of ncclBroadcast"
                                                : "ncclGroupEnd of ncclSend and ncclRecv";
}

}  // namespace

NcclCommunicator::NcclCommunicator(NcclCommunicatorOptions options)
    : options_(std::move(options)) {}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  if (FinalizeInTime()) {
    (void)api().CommDestroy(comm_);  // nobody is left to hear of a failure
  } else {
    Abort();
  }
}

// A call that is in progress belongs to something given up: there is nothing to wait for.
bool NcclCommunicator::FinalizeInTime() {
  if (in_progress_ != nullptr) return false;
  if (!Took("ncclCommFinalize", api().CommFinalize(comm_)).ok()) return false;
  const int64_t deadline_ns = options_.clock->NowNs() + kCloseNs;
  while (in_progress_ != nullptr && options_.clock->NowNs() < deadline_ns) {
    if (Settle().state == Progress::State::kFailed) return false;
    std::this_thread::sleep_for(std::chrono::nanoseconds(kPollNs));
  }
  return in_progress_ == nullptr;
}

Progress NcclCommunicator::Connect() {
  if (!started_) {
    started_ = true;
    Status begun = options_.parent == nullptr ? Begin() : BeginFromParent();
    if (!begun.ok()) return Progress::Failed(begun);
  }
  if (awaits_parent_) {
    Progress made = options_.parent->Settle();
    if (made.state == Progress::State::kFailed) failure_ = made.status;
    if (made.state != Progress::State::kDone) return made;
    awaits_parent_ = false;
    in_progress_ = "ncclCommShrink";
  }
  return Settle();
}

// NCCL fills `comm_` in when the parent is through with the call.
Status NcclCommunicator::BeginFromParent() {
  NcclCommunicator& parent = *options_.parent;
  if (!parent.failure_.ok()) return failure_ = parent.failure_;
  NcclConfig config;
  config.blocking = 0;
  failure_ =
      parent.Took("ncclCommShrink", api().CommShrink(parent.comm_, options_.excluded.data(),
                                                     static_cast<int>(options_.excluded.size()),
                                                     &comm_, &config, /*flags=*/0));
  awaits_parent_ = failure_.ok();
  return failure_;
}

Status NcclCommunicator::Begin() {
  NcclUniqueId id{};
  if (options_.unique_id.size() != sizeof(id.internal)) {
    failure_ = Internal("a unique id of NCCL has " + std::to_string(sizeof(id.internal)) +
                        " bytes, this one " + std::to_string(options_.unique_id.size()));
    return failure_;
  }
  std::memcpy(id.internal, options_.unique_id.data(), sizeof(id.internal));
  NcclConfig config;
  config.blocking = 0;
  return Took("ncclCommInitRankConfig",
              api().CommInitRankConfig(&comm_, options_.size, id, options_.index, &config));
}

Progress NcclCommunicator::Settle() {
  if (!failure_.ok()) return Progress::Failed(failure_);
  if (in_progress_ == nullptr) return Progress::Done();
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api().CommGetAsyncError(comm_, &state);
  if (asked != NcclResult::kSuccess) {
    return Progress::Failed(Fail("ncclCommGetAsyncError", asked));
  }
  if (state == NcclResult::kInProgress) return Progress::Waiting(kPollNs);
  if (state != NcclResult::kSuccess) return Progress::Failed(Fail(in_progress_, state));
  in_progress_ = nullptr;
  return Progress::Done();
}

Status NcclCommunicator::AllReduce(const void* in, void* out, int64_t count, NcclDataType type,
                                   NcclRedOp op, NcclStream stream) {
  if (!failure_.ok()) return failure_;
  return Took("ncclAllReduce",
              api().AllReduce(in, out, static_cast<size_t>(count), type, op, comm_, stream));
}

Status NcclCommunicator::Broadcast(const void* in, void* out, int64_t count, NcclDataType type,
                                   int root, NcclStream stream) {
  if (!failure_.ok()) return failure_;
  return Took("ncclBroadcast",
              api().Broadcast(in, out, static_cast<size_t>(count), type, root, comm_, stream));
}

Status NcclCommunicator::AllGather(const void* in, void* out, int64_t count, NcclDataType type,
                                   NcclStream stream) {
  if (!failure_.ok()) return failure_;
  return Took("ncclAllGather",
              api().AllGather(in, out, static_cast<size_t>(count), type, comm_, stream));
}

Status NcclCommunicator::ReduceScatter(const void* in, void* out, int64_t count, NcclDataType type,
                                       NcclRedOp op, NcclStream stream) {
  if (!failure_.ok()) return failure_;
  return Took("ncclReduceScatter",
              api().ReduceScatter(in, out, static_cast<size_t>(count), type, op, comm_, stream));
}

// A group is open for the thread, not for the communicator: it is ended whatever happens in it.
Status NcclCommunicator::Group(std::span<const NcclTransfer> transfers, NcclStream stream) {
  if (!failure_.ok()) return failure_;
  if (transfers.empty()) return {};
  FARANDOLE_RETURN_IF_ERROR(Took("ncclGroupStart", api().GroupStart()));
  const char* refused = nullptr;
  NcclResult result = NcclResult::kSuccess;
  for (const NcclTransfer& transfer : transfers) {
    result = Enqueue(transfer, stream);
    if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) continue;
    refused = NameOf(transfer.kind);
    break;
  }
  const NcclResult ended = api().GroupEnd();
  if (refused != nullptr) return Fail(refused, result);
  return Took(NameOfGroup(transfers.front().kind), ended);
}

NcclResult NcclCommunicator::Enqueue(const NcclTransfer& transfer, NcclStream stream) {
  const auto count = static_cast<size_t>(transfer.size_bytes);
  constexpr NcclDataType kType = NcclDataType::kUint8;
  switch (transfer.kind) {
    case NcclTransfer::Kind::kBroadcast:
      return api().Broadcast(transfer.in, transfer.out, count, kType, transfer.peer, comm_, stream);
    case NcclTransfer::Kind::kSend:
      return api().Send(transfer.in, count, kType, transfer.peer, comm_, stream);
    case NcclTransfer::Kind::kReceive:
      return api().Recv(transfer.out, count, kType, transfer.peer, comm_, stream);
  }
  return NcclResult::kInvalidArgument;  // unreachable
}

Status NcclCommunicator::Register(void* memory, int64_t size_bytes, void** handle) {
  *handle = nullptr;
  if (!failure_.ok()) return failure_;
  const NcclResult result =
      api().CommRegister(comm_, memory, static_cast<size_t>(size_bytes), handle);
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) {
    return Took("ncclCommRegister", result);
  }
  *handle = nullptr;
  return Unavailable(Describe("ncclCommRegister", result));
}

void NcclCommunicator::Deregister(void* handle) {
  if (comm_ == nullptr || in_progress_ != nullptr) return;  // it ends with the communicator
  (void)Took("ncclCommDeregister", api().CommDeregister(comm_, handle));  // kept in failure_
}

Status NcclCommunicator::CheckAsync() {
  if (!failure_.ok() || comm_ == nullptr) return failure_;
  const int64_t now_ns = options_.clock->NowNs();
  if (now_ns - checked_ns_ < kCheckNs) return {};
  checked_ns_ = now_ns;
  NcclResult state = NcclResult::kSuccess;
  const NcclResult asked = api().CommGetAsyncError(comm_, &state);
  if (asked != NcclResult::kSuccess) return Fail("ncclCommGetAsyncError", asked);
  if (state == NcclResult::kSuccess || state == NcclResult::kInProgress) return {};
  return Fail(in_progress_ != nullptr ? in_progress_ : "a collective of NCCL", state);
}

void NcclCommunicator::Abort() {
  if (failure_.ok()) failure_ = Aborted("the NCCL communicator was given up");
  in_progress_ = nullptr;
  if (comm_ == nullptr) return;
  (void)api().CommAbort(std::exchange(comm_, nullptr));  // the reason is known already
}

// Notes what a call answered.
Status NcclCommunicator::Took(const char* call, NcclResult result) {
  if (result == NcclResult::kSuccess) return {};
  if (result != NcclResult::kInProgress) return Fail(call, result);
  in_progress_ = call;
  return {};
}

Status NcclCommunicator::Fail(const char* call, NcclResult result) {
  const Code code = result == NcclResult::kRemoteError ? Code::kUnavailable : Code::kInternal;
  failure_ = Status(code, Describe(call, result));
  Abort();
  return failure_;
}

std::string NcclCommunicator::Describe(const char* call, NcclResult result) const {
  std::string text = std::string(call) + ": " + api().GetErrorString(result);
  const char* const last = api().GetLastError(comm_);
  if (last != nullptr && *last != '\0') text += "; " + std::string(last);
  return text + "; " + options_.library->Describe() +
         (options_.map.empty() ? "" : "; " + options_.map);
}

}  // namespace farandole
