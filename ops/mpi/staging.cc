#include "ops/mpi/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "ops/mpi/status.h"

namespace farandole {
namespace {

/// MPI copies between processes page by page: a third of the time of a chunk with small ones.
constexpr size_t kHugePage = 2 << 20;

bool AnyLive(const MemberRequests& requests) {
  return std::any_of(requests.begin(), requests.end(),
                     [](MPI_Request request) { return request != MPI_REQUEST_NULL; });
}

/// The engine has failed the operation by now and does not report this status.
Status TooLate(const char* what) {
  return Aborted(std::string(what) + " returned after the tensors were released");
}

}  // namespace

/// One block for all slots: of each, the packed contribution, the result, and an inbox per member.
/// 4 MiB up to 16 members, and never more than 16 MiB.
Status MpiSet::AllocateStaging() {
  if (staging_ != nullptr || members() == 1) return Status();
  const int64_t slot_bytes = 2 * size_.chunk_bytes + members() * size_.inbox_bytes;
  staging_bytes_ =
      (kMpiSlots * slot_bytes + int64_t{kHugePage} - 1) / int64_t{kHugePage} * int64_t{kHugePage};
  staging_ =
      static_cast<std::byte*>(std::aligned_alloc(kHugePage, static_cast<size_t>(staging_bytes_)));
  if (staging_ == nullptr) {
    return ResourceExhausted("no memory for the staging buffers of process set " +
                             std::to_string(uid) + ": " + std::to_string(staging_bytes_) +
                             " bytes");
  }
  // Only a better speed, where the kernel can.
  (void)madvise(staging_, static_cast<size_t>(staging_bytes_), MADV_HUGEPAGE);
  const auto count = static_cast<size_t>(members());
  for (size_t i = 0; i < slots_.size(); ++i) {
    MpiSlot& slot = slots_[i];
    slot.packed = staging_ + static_cast<int64_t>(i) * slot_bytes;
    slot.result = slot.packed + size_.chunk_bytes;
    slot.inbox = slot.result + size_.chunk_bytes;
    for (MemberRequests& requests : slot.sends) requests.assign(count, MPI_REQUEST_NULL);
    for (MemberRequests& requests : slot.receives) requests.assign(count, MPI_REQUEST_NULL);
  }
  statuses_.resize(count);
  return Status();
}

MpiSet::~MpiSet() {
  if (!queue.empty()) Quarantine();
  std::free(staging_);
}

/// Two tags per set, one per round; sets that share tags are ordered by `earlier`.
int MpiSet::TagOf(Round round) const {
  return static_cast<int>(2 * (uid % kMaxLiveSets)) + static_cast<int>(round);
}

/// LibraryCall releases the users' tensors while MPI runs: should the call hang, they can be freed.
Status MpiSet::Send(MpiSlot& slot, Round round, int to, const std::byte* data, int64_t bytes) {
  const auto member = static_cast<size_t>(to);
  bulk_.Count(Counter::kBulkBytesSent, bytes);
  bulk_.Count(Counter::kBulkMessagesSent, 1);
  const LibraryCall call(bulk_.memory);
  const int code = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, ranks[member], TagOf(round),
                             bulk_.comm, &slot.sends[static_cast<size_t>(round)][member]);
  if (!call.ReturnedInTime()) return TooLate("MPI_Isend");
  return FromMpi(code, {"MPI_Isend (data plane)", ranks[member], bytes});
}

Status MpiSet::Receive(MpiSlot& slot, Round round, int from, std::byte* data, int64_t bytes) {
  const auto member = static_cast<size_t>(from);
  const LibraryCall call(bulk_.memory);
  const int code = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, ranks[member], TagOf(round),
                             bulk_.comm, &slot.receives[static_cast<size_t>(round)][member]);
  if (!call.ReturnedInTime()) return TooLate("MPI_Irecv");
  return FromMpi(code, {"MPI_Irecv (data plane)", ranks[member], bytes});
}

/// MPI_Testall completes all or none; requests of members without a message are MPI_REQUEST_NULL.
Result<bool> MpiSet::AllComplete(MemberRequests& requests, const char* what) {
  int done = 0;
  const LibraryCall call(bulk_.memory);
  const int code =
      MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, statuses_.data());
  if (!call.ReturnedInTime()) return TooLate(what);
  if (code != MPI_SUCCESS) return FromMpi(code, {what}, statuses_);
  return done != 0;
}

/// Reads what the last AllComplete of the set left, so it has to follow at once. A member without a
/// message has an empty status, whose count is 0 (MPI 4.0, section 3.7.3).
int64_t MpiSet::BytesFrom(int member) const {
  int bytes = 0;
  MPI_Get_count(&statuses_[static_cast<size_t>(member)], MPI_BYTE, &bytes);
  return bytes;
}

bool MpiSet::HasLiveRequests() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const MpiSlot& slot) {
    return AnyLive(slot.sends[0]) || AnyLive(slot.sends[1]) || AnyLive(slot.receives[0]) ||
           AnyLive(slot.receives[1]);
  });
}

/// Staging with live requests is leaked on purpose: a peer that has not failed may still send to it
/// or receive from it, and MPI has no reliable way to cancel a send.
void MpiSet::Quarantine() {
  if (staging_ == nullptr || !HasLiveRequests()) return;
  bulk_.Count(Counter::kQuarantinedBytes, staging_bytes_);
  staging_ = nullptr;  // never freed: MPI may write to it at any later time
}

}  // namespace farandole
