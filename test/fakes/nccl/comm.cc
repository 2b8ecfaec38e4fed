#include "test/fakes/nccl/comm.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "test/fakes/nccl/journal.h"

namespace farandole {
namespace {

using State = ncclComm::State;

struct Process {
  std::mutex mutex;
  std::string last_error;
  std::vector<std::unique_ptr<ncclComm>> comms;
};

Process& OfProcess() {
  static auto* process = new Process;  // streams may use it until the very end
  return *process;
}

FakeNcclJournal& Journal() { return FakeNcclJournal::Get(); }

/// Under comm.mutex.
ncclResult_t Break(ncclComm& comm, ncclResult_t error, const std::string& text) {
  comm.error = error;
  comm.error_text = text;
  return FakeNcclFail(error, text);
}

bool MayShareGpu() {
  const char* asked = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return FakeNcclVersion() >= 23000 && asked != nullptr && std::strcmp(asked, "1") == 0;
}

/// What the real one finds out from its peers. Under comm.mutex.
ncclResult_t JudgePeers(ncclComm& comm) {
  const auto* ranks = comm.exchange->shared().ranks;
  for (int a = 0; a < comm.size; ++a) {
    if (ranks[a].size != comm.size || ranks[a].version != ranks[0].version) {
      return Break(comm, ncclInvalidUsage,
                   "fake NCCL: rank " + std::to_string(a) + " has version " +
                       std::to_string(ranks[a].version) + " and size " +
                       std::to_string(ranks[a].size) + ", rank 0 " +
                       std::to_string(ranks[0].version) + " and " + std::to_string(ranks[0].size));
    }
    for (int b = a + 1; b < comm.size && !MayShareGpu(); ++b) {
      if (std::strcmp(ranks[a].bus_id, ranks[b].bus_id) != 0) continue;
      if (std::strcmp(ranks[a].host, ranks[b].host) != 0) continue;
      return Break(comm, ncclInvalidUsage,
                   "fake NCCL: Duplicate GPU detected: rank " + std::to_string(a) + " and rank " +
                       std::to_string(b) + " both on CUDA device " + ranks[a].bus_id);
    }
  }
  return ncclSuccess;
}

/// Under comm.mutex.
ncclResult_t Connect(ncclComm& comm) {
  const int error = Journal().NumberFor(comm.rank, "INIT_ERROR", 0);
  if (error != 0) {
    return Break(comm, static_cast<ncclResult_t>(error), "fake NCCL: the init was made to fail");
  }
  if (Journal().NumberFor(comm.rank, "INIT_HANGS", 0) != 0) return ncclInProgress;
  if (comm.init_looks++ < Journal().NumberFor(comm.rank, "INIT_POLLS", 0)) return ncclInProgress;
  if (!comm.exchange->Connected()) return ncclInProgress;
  const ncclResult_t judged = JudgePeers(comm);
  if (judged == ncclSuccess) comm.state = State::kReady;
  return judged;
}

struct InStream {
  ncclComm* comm;
  uint64_t ticket;
  std::vector<FakeNcclWork> works;
};

/// Under comm.mutex.
void PutIntoStream(ncclComm& comm, ncclComm::Launch launch) {
  FarandoleFakeStream* stream = launch.stream == nullptr
                                    ? comm.device->default_stream
                                    : reinterpret_cast<FarandoleFakeStream*>(launch.stream);
  auto* in_stream = new InStream{&comm, comm.exchange->TakeTicket(), std::move(launch.works)};
  ++comm.outstanding;
  stream->enqueue(
      stream, launch.name,
      [](void* argument) {
        auto* it = static_cast<InStream*>(argument);
        it->comm->exchange->Run(it->ticket, it->works);
      },
      [](void* argument) {
        auto* it = static_cast<InStream*>(argument);
        --it->comm->outstanding;
        delete it;
      },
      in_stream);
}

}  // namespace

ncclResult_t FakeNcclFail(ncclResult_t result, const std::string& text) {
  std::lock_guard lock(OfProcess().mutex);
  OfProcess().last_error = text;
  return result;
}

std::string FakeNcclLastError() {
  std::lock_guard lock(OfProcess().mutex);
  return OfProcess().last_error;
}

ncclComm* NewFakeNcclComm() {
  std::lock_guard lock(OfProcess().mutex);
  OfProcess().comms.push_back(std::make_unique<ncclComm>());
  return OfProcess().comms.back().get();
}

std::vector<ncclComm*> FakeNcclComms() {
  std::lock_guard lock(OfProcess().mutex);
  std::vector<ncclComm*> comms;
  for (const auto& comm : OfProcess().comms) comms.push_back(comm.get());
  return comms;
}

ncclResult_t LookAtFakeNcclComm(ncclComm& comm) {
  std::lock_guard lock(comm.mutex);
  if (comm.error != ncclSuccess) return comm.error;
  if (comm.state == State::kConnecting) return Connect(comm);
  if (comm.looks_left > 0) {
    --comm.looks_left;
    return ncclInProgress;
  }
  for (ncclComm::Launch& launch : std::exchange(comm.pending, {})) {
    PutIntoStream(comm, std::move(launch));
  }
  if (comm.child_place != nullptr) {
    *std::exchange(comm.child_place, nullptr) = std::exchange(comm.child, nullptr);
  }
  if (comm.state == State::kFinalizing) {
    if (comm.outstanding > 0) return ncclInProgress;
    comm.state = State::kFinalized;
  }
  return ncclSuccess;
}

ncclResult_t LaunchFakeNccl(ncclComm& comm, ncclComm::Launch launch) {
  std::lock_guard lock(comm.mutex);
  const int error_at = Journal().NumberFor(comm.rank, "ERROR_AT", 0);
  for (FakeNcclWork& work : launch.works) {
    if (++comm.collectives < error_at || error_at == 0) continue;
    work.never_ends = true;
    const std::string text = Journal().Text("ERROR_TEXT");
    Break(comm, static_cast<ncclResult_t>(Journal().Number("ERROR", ncclRemoteError)),
          text.empty() ? "fake NCCL: an error was made to happen" : text);
  }
  const int looks = comm.blocking ? 0 : Journal().NumberFor(comm.rank, "BUSY_POLLS", 0);
  if (looks == 0) {
    PutIntoStream(comm, std::move(launch));
    return ncclSuccess;
  }
  comm.looks_left = looks;
  comm.pending.push_back(std::move(launch));
  return ncclInProgress;
}

FakeNcclUse::FakeNcclUse(FakeNcclCall call, Rules rules)
    : call_(call), comm_(static_cast<ncclComm*>(const_cast<void*>(call.comm))) {
  if (comm_ != nullptr) call_.rank = comm_->rank;
  result_ = static_cast<ncclResult_t>(Journal().Begin(call_.name, call_.rank));
  if (result_ != ncclSuccess) {
    FakeNcclFail(result_, std::string("fake NCCL: ") + call_.name + " was made to fail");
    return;
  }
  result_ = Check(rules);
}

FakeNcclUse::~FakeNcclUse() {
  if (entered_) comm_->in_call = false;
  call_.result = result_;
  Journal().Add(call_);
}

ncclResult_t FakeNcclUse::Check(Rules rules) {
  const auto refuse = [&](ncclResult_t result, const std::string& why) {
    const std::string text = std::string(call_.name) + ": " + why;
    Journal().Misuse(text);
    return FakeNcclFail(result, "fake NCCL: " + text);
  };
  if (comm_ == nullptr) return refuse(ncclInvalidArgument, "the communicator is null");
  if (comm_->in_call.exchange(true)) {
    return refuse(ncclInternalError, "another thread is using the communicator");
  }
  entered_ = true;
  ++comm_->calls;
  std::lock_guard lock(comm_->mutex);
  if (comm_->over()) {
    return refuse(ncclInvalidArgument, "the communicator was destroyed or aborted before");
  }
  if (farandole_fake_current_device() != comm_->device) {
    return refuse(ncclInvalidUsage, "the current device is not the communicator's");
  }
  if (rules == Rules::kExists) return ncclSuccess;
  if (comm_->error != ncclSuccess) return FakeNcclFail(comm_->error, comm_->error_text);
  if (comm_->state == State::kConnecting) {
    return refuse(ncclInvalidArgument, "the communicator is not connected yet");
  }
  if (comm_->looks_left > 0 || !comm_->pending.empty() || comm_->child_place != nullptr) {
    return refuse(ncclInvalidArgument, "the call before is still ncclInProgress");
  }
  if (comm_->state != State::kReady) return refuse(ncclInvalidUsage, "it was finalized before");
  return ncclSuccess;
}

}  // namespace farandole
