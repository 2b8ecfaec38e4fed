// How a rank comes into a communicator of the fake NCCL.
#include <cstdio>
#include <utility>

#include "test/fakes/nccl/comm.h"
#include "test/fakes/nccl/journal.h"

namespace farandole {
namespace {

/// Takes the rank's place among its peers.
bool Arrive(FakeNcclShared& shared, int rank, int size, int max_ctas) {
  FakeNcclShared::Rank& me = shared.ranks[rank];
  if (me.taken.exchange(1) != 0) return false;
  const FarandoleFakeDevice* device = farandole_fake_current_device();
  me.size = size;
  me.max_ctas = max_ctas;
  me.version = FakeNcclVersion();
  std::snprintf(me.bus_id, sizeof me.bus_id, "%s", device->bus_id);
  return true;
}

}  // namespace

ncclComm* EnterFakeNccl(const std::string& name, int rank, int size, int* result, int max_ctas) {
  std::shared_ptr<FakeNcclSegment> segment = FakeNcclSegment::Open(name);
  if (segment == nullptr) {
    *result = FakeNcclFail(ncclSystemError, "fake NCCL: no shared memory");
    return nullptr;
  }
  if (!Arrive(segment->shared(), rank, size, max_ctas)) {
    *result = FakeNcclFail(ncclInvalidUsage, "fake NCCL: this rank is in already");
    return nullptr;
  }
  ncclComm& made = *NewFakeNcclComm();
  made.name = name;
  made.rank = rank;
  made.size = size;
  made.device = farandole_fake_current_device();
  made.exchange = std::make_shared<FakeNcclExchange>(
      segment, rank, size, [](const std::string& what) { FakeNcclJournal::Get().Misuse(what); });
  // The last one closes the door.
  const auto before = segment->shared().arrived.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == static_cast<uint32_t>(size)) segment->Unlink();
  return &made;
}

}  // namespace farandole
