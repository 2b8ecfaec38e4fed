#include "test/fakes/nccl/comm.h"

#include <chrono>
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

// NCCL reads such variables once per process.
bool MayShareGpu() {
  return FakeNcclVersion() >= 23000 && Journal().Environment("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
}

/// Kernels of all ranks of a GPU must run at once, which nothing but a limit makes sure.
bool FitOnOneGpu(const FakeNcclShared::Rank& a, const FakeNcclShared::Rank& b) {
  if (!Journal().Environment("NCCL_MAX_CTAS").empty()) return true;
  return a.max_ctas > 0 && b.max_ctas > 0;
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
    for (int b = a + 1; b < comm.size; ++b) {
      if (std::strcmp(ranks[a].bus_id, ranks[b].bus_id) != 0) continue;
      if (MayShareGpu()) {
        if (FitOnOneGpu(ranks[a], ranks[b])) continue;
        Journal().Misuse("ranks that share a GPU have no limit of blocks: the real one may hang");
        return ncclInProgress;
      }
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

void Sleep(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

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
  if (comm.busy) return ncclInProgress;
  if (comm.state == State::kFinalizing) {
    comm.state = State::kFinalized;
  }
  return ncclSuccess;
}

void FinalizeFakeNccl(ncclComm& comm) {
  if (comm.worker.joinable()) comm.worker.join();  // through with the call before: it was checked
  comm.busy = true;
  comm.worker = std::thread([&comm] {
    while (comm.outstanding > 0) Sleep(50);
    comm.exchange->Close();
    comm.busy = false;
  });
}

void AwaitFakeNcclComm(ncclComm& comm) {
  if (comm.worker.joinable()) comm.worker.join();
  while (comm.outstanding > 0) Sleep(50);
  comm.exchange->Close();
}

namespace {

/// Under comm.mutex.
void MakeErrorsHappen(ncclComm& comm, ncclComm::Launch& launch) {
  const int error_at = Journal().NumberFor(comm.rank, "ERROR_AT", 0);
  for (FakeNcclWork& work : launch.works) {
    if (++comm.collectives < error_at || error_at == 0) continue;
    work.never_ends = true;
    const std::string text = Journal().Text("ERROR_TEXT");
    Break(comm, ncclRemoteError, text.empty() ? "fake NCCL: an error was made to happen" : text);
  }
}

bool IsTransfer(const FakeNcclWork& work) {
  return work.kind == FakeNcclWork::Kind::kSend || work.kind == FakeNcclWork::Kind::kReceive;
}

/// The host's part of a launch.
void LaunchNow(ncclComm& comm, ncclComm::Launch launch) {
  // A collective of nothing is dropped.
  std::erase_if(launch.works,
                [](const FakeNcclWork& work) { return work.count == 0 && !IsTransfer(work); });
  if (launch.works.empty()) return;
  if (!comm.exchange->MeetAtFirstUse(launch.works)) return;
  std::lock_guard lock(comm.mutex);
  MakeErrorsHappen(comm, launch);
  PutIntoStream(comm, std::move(launch));
}

}  // namespace

ncclResult_t LaunchFakeNccl(ncclComm& comm, ncclComm::Launch launch) {
  if (comm.size == 1) {
    LaunchNow(comm, std::move(launch));
    return ncclSuccess;
  }
  if (comm.worker.joinable()) comm.worker.join();  // through with the call before: it was checked
  static std::atomic<unsigned> draws{0};
  const auto drawn = static_cast<int>(draws.fetch_add(1) * 2654435761u % 200);
  const int sleep_us = Journal().NumberFor(comm.rank, "BUSY_US", drawn);
  comm.busy = true;
  comm.worker = std::thread([&comm, sleep_us, launch = std::move(launch)]() mutable {
    Sleep(sleep_us);
    LaunchNow(comm, std::move(launch));
    comm.busy = false;
  });
  return ncclInProgress;
}

FakeNcclUse::FakeNcclUse(FakeNcclCall call, Rules rules)
    : call_(call), comm_(static_cast<ncclComm*>(const_cast<void*>(call.comm))) {
  if (comm_ != nullptr) call_.rank = comm_->rank;
  Journal().Count(call_.name);
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
  if (comm_->busy) {
    return refuse(ncclInvalidArgument, "the call before is still ncclInProgress");
  }
  if (comm_->state != State::kReady) return refuse(ncclInvalidUsage, "it was finalized before");
  return ncclSuccess;
}

}  // namespace farandole
