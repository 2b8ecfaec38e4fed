// The fake libnccl's calls that move data.
#include <string>
#include <utility>
#include <vector>

#include "test/fakes/nccl/comm.h"
#include "test/fakes/nccl/journal.h"
#include "test/fakes/nccl/reduce.h"

using farandole::FakeNcclCall;
using farandole::FakeNcclFail;
using farandole::FakeNcclUse;
using farandole::FakeNcclWork;
using Kind = farandole::FakeNcclWork::Kind;

namespace {

/// The calling thread's group.
struct Group {
  struct Part {
    ncclComm* comm;
    ncclComm::Launch launch;
  };
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Part> parts;
  std::vector<ncclComm*> aborted;
};
thread_local Group group;

/// Where an operation's memory must not be null.
struct Buffers {
  bool send = true;
  bool receive = true;
};

/// What is read is written elsewhere, or exactly where NCCL takes it to be in place.
bool OverlapsWrongly(const ncclComm& comm, const FakeNcclWork& work, Buffers buffers) {
  if (!buffers.send || !buffers.receive || work.send == nullptr) return false;
  const int64_t bytes = work.count * farandole::FakeNcclSizeOf(work.datatype);
  const int64_t send_bytes = work.kind == Kind::kReduceScatter ? bytes * comm.size : bytes;
  const int64_t receive_bytes = work.kind == Kind::kAllGather ? bytes * comm.size : bytes;
  const auto* const send = static_cast<const char*>(work.send);
  const auto* const receive = static_cast<const char*>(work.receive);
  const int64_t apart = work.kind == Kind::kAllGather       ? -bytes * comm.rank
                        : work.kind == Kind::kReduceScatter ? bytes * comm.rank
                                                            : 0;
  if (receive - send == apart) return false;
  return send < receive + receive_bytes && receive < send + send_bytes;
}

ncclResult_t Check(ncclComm& comm, FakeNcclWork& work, Buffers buffers) {
  const auto refuse = [](const char* why) {
    return FakeNcclFail(ncclInvalidArgument, std::string("fake NCCL: ") + why);
  };
  if (farandole::FakeNcclSizeOf(work.datatype) == 0) return refuse("no such type in the fake");
  if (work.count < 0) return refuse("the count is too large");
  if (work.peer < 0 || work.peer >= comm.size) return refuse("no such root or peer");
  const bool lacks =
      (buffers.send && work.send == nullptr) || (buffers.receive && work.receive == nullptr);
  if (work.count > 0 && lacks) return refuse("a buffer is null");
  if (OverlapsWrongly(comm, work, buffers)) {
    farandole::FakeNcclJournal::Get().Misuse("buffers overlap and are not in place");
    return refuse("buffers overlap and are not in place");
  }
  if (work.op < 0 || work.op >= ncclNumOps) return refuse("no such operator");
  return ncclSuccess;
}

ncclResult_t Begin(const char* name, ncclComm_t comm, cudaStream_t stream, int shown,
                   FakeNcclWork work, Buffers buffers) {
  FakeNcclUse use(FakeNcclCall{.name = name,
                               .comm = comm,
                               .stream = stream,
                               .count = work.count,
                               .datatype = work.datatype,
                               .op = shown});
  ncclResult_t result = use.result();
  if (use.ok()) result = Check(*comm, work, buffers);
  if (result == ncclSuccess) {
    ncclComm::Launch launch{name, stream, {std::move(work)}};
    if (group.depth == 0) {
      result = farandole::LaunchFakeNccl(*comm, std::move(launch));
    } else {
      group.parts.push_back({comm, std::move(launch)});
    }
  } else if (group.depth > 0) {
    group.error = result;
  }
  return use.End(result);
}

FakeNcclWork Work(Kind kind, const void* send, void* receive, size_t count, int datatype) {
  return {.kind = kind,
          .send = send,
          .receive = receive,
          .count = static_cast<int64_t>(count),
          .datatype = datatype};
}

/// What a group holds for one communicator becomes one launch.
std::vector<Group::Part> Joined(std::vector<Group::Part> parts) {
  std::vector<Group::Part> joined;
  for (Group::Part& part : parts) {
    auto same = joined.begin();
    while (same != joined.end() && same->comm != part.comm) ++same;
    if (same == joined.end()) {
      part.launch.name = "ncclGroupEnd";
      joined.push_back(std::move(part));
      continue;
    }
    if (same->launch.stream != part.launch.stream) {
      farandole::FakeNcclJournal::Get().Misuse("ncclGroupEnd: one communicator on two streams");
    }
    same->launch.works.push_back(std::move(part.launch.works.front()));
  }
  return joined;
}

}  // namespace

// Since 2.24; before, an abort in a group was one at once.
bool farandole::DeferFakeNcclAbort(ncclComm& comm) {
  if (group.depth == 0 || FakeNcclVersion() < 22400) return false;
  group.aborted.push_back(&comm);
  return true;
}

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  FakeNcclWork work = Work(Kind::kAllReduce, sendbuff, recvbuff, count, datatype);
  work.op = op;
  return Begin("ncclAllReduce", comm, stream, op, std::move(work), {});
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  FakeNcclWork work = Work(Kind::kReduceScatter, sendbuff, recvbuff, recvcount, datatype);
  work.op = op;
  return Begin("ncclReduceScatter", comm, stream, op, std::move(work), {});
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
  return Begin("ncclAllGather", comm, stream, -1,
               Work(Kind::kAllGather, sendbuff, recvbuff, sendcount, datatype), {});
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  FakeNcclWork work = Work(Kind::kBroadcast, sendbuff, recvbuff, count, datatype);
  work.peer = root;
  const bool is_root = comm != nullptr && comm->rank == root;
  return Begin("ncclBroadcast", comm, stream, root, std::move(work), {.send = is_root});
}

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  FakeNcclWork work = Work(Kind::kSend, sendbuff, nullptr, count, datatype);
  work.peer = peer;
  return Begin("ncclSend", comm, stream, peer, std::move(work), {.receive = false});
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  FakeNcclWork work = Work(Kind::kReceive, nullptr, recvbuff, count, datatype);
  work.peer = peer;
  return Begin("ncclRecv", comm, stream, peer, std::move(work), {.send = false});
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  farandole::FakeNcclJournal::Get().Count("ncclGroupEnd");
  if (group.depth == 0) {
    farandole::FakeNcclJournal::Get().Misuse("ncclGroupEnd without ncclGroupStart");
    return FakeNcclFail(ncclInvalidUsage, "fake NCCL: ncclGroupEnd without ncclGroupStart");
  }
  if (--group.depth > 0) return ncclSuccess;
  std::vector<Group::Part> parts = Joined(std::exchange(group.parts, {}));
  for (ncclComm* comm : std::exchange(group.aborted, {})) farandole::TearDownFakeNccl(*comm);
  ncclResult_t result = std::exchange(group.error, ncclSuccess);
  if (result != ncclSuccess) return result;
  for (Group::Part& part : parts) {
    const ncclResult_t one = farandole::LaunchFakeNccl(*part.comm, std::move(part.launch));
    if (result == ncclSuccess) result = one;
  }
  return result;
}
