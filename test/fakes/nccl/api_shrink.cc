// The fake libnccl's ncclCommShrink, which came with 2.27.
#include <cstdint>
#include <span>
#include <string>

#include "test/fakes/nccl/comm.h"
#include "test/fakes/nccl/journal.h"

using farandole::FakeNcclFail;
using farandole::FakeNcclJournal;
using farandole::FakeNcclUse;

namespace {

/// One bit per rank that stays; 0 if the list is wrong.
uint64_t Remaining(const ncclComm& comm, std::span<const int> excluded) {
  uint64_t left = (uint64_t{1} << comm.size) - 1;
  for (const int rank : excluded) {
    const uint64_t bit = rank < 0 || rank >= comm.size ? 0 : uint64_t{1} << rank;
    if ((left & bit) == 0 || rank == comm.rank) return 0;
    left &= ~bit;
  }
  return excluded.empty() ? 0 : left;
}

int CountBits(uint64_t bits) { return __builtin_popcountll(bits); }

}  // namespace

ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* newcomm, ncclConfig_t*, int shrinkFlags) {
  FakeNcclUse use({.name = "ncclCommShrink", .comm = comm, .count = excludeRanksCount});
  if (!use.ok()) return use.result();
  const uint64_t left =
      excludeRanksList == nullptr || excludeRanksCount < 1
          ? 0
          : Remaining(*comm, {excludeRanksList, static_cast<size_t>(excludeRanksCount)});
  if (left == 0 || newcomm == nullptr || shrinkFlags != 0) {
    return use.End(FakeNcclFail(ncclInvalidArgument, "fake NCCL: a wrong list of ranks or flags"));
  }
  if (comm->outstanding > 0) {
    FakeNcclJournal::Get().Misuse("ncclCommShrink: the communicator has work in flight");
    return use.End(FakeNcclFail(ncclInvalidUsage, "fake NCCL: the communicator is busy"));
  }
  std::lock_guard lock(comm->mutex);
  const std::string name =
      comm->name + "-" + std::to_string(left) + "." + std::to_string(comm->shrunk[left]++);
  const int place = CountBits(left & ((uint64_t{1} << comm->rank) - 1));
  int result = ncclSuccess;
  ncclComm* const made =
      farandole::EnterFakeNccl(name, place, CountBits(left), comm->blocking, &result);
  if (made == nullptr) return use.End(static_cast<ncclResult_t>(result));
  // As the real one: told when the parent is through with the call.
  comm->child = made;
  comm->child_place = newcomm;
  comm->looks_left = FakeNcclJournal::Get().NumberFor(comm->rank, "BUSY_POLLS", 0);
  return use.End(ncclInProgress);
}
