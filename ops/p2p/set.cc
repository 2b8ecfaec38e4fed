#include "ops/p2p/set.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>

namespace farandole {
namespace {

/// MPI copies between processes page by page: a third of the time of a chunk with small ones.
constexpr size_t kHugePage = 2 << 20;

}  // namespace

/// One block for all slots: of each, the packed contribution, the result, and an inbox per member.
/// 4 MiB up to 16 members, and never more than 16 MiB.
Status P2pSet::Open(const P2pLinkFactory& links) {
  if (link_ != nullptr || members() == 1) return Status();
  const int64_t slot_bytes = 2 * size_.chunk_bytes + members() * size_.inbox_bytes;
  staging_bytes_ =
      (kLinkSlots * slot_bytes + int64_t{kHugePage} - 1) / int64_t{kHugePage} * int64_t{kHugePage};
  staging_ =
      static_cast<std::byte*>(std::aligned_alloc(kHugePage, static_cast<size_t>(staging_bytes_)));
  if (staging_ == nullptr) {
    return ResourceExhausted("no memory for the staging buffers of process set " +
                             std::to_string(uid) + ": " + std::to_string(staging_bytes_) +
                             " bytes");
  }
  // Only a better speed, where the kernel can.
  (void)madvise(staging_, static_cast<size_t>(staging_bytes_), MADV_HUGEPAGE);
  for (size_t i = 0; i < slots_.size(); ++i) {
    P2pSlot& slot = slots_[i];
    slot.number = static_cast<int>(i);
    slot.packed = staging_ + static_cast<int64_t>(i) * slot_bytes;
    slot.result = slot.packed + size_.chunk_bytes;
    slot.inbox = slot.result + size_.chunk_bytes;
  }
  link_ = links(uid, ranks);
  return Status();
}

P2pSet::~P2pSet() {
  if (!queue.empty()) Quarantine();
  std::free(staging_);
}

Status P2pSet::Send(P2pSlot& slot, P2pLink::Round round, int to, const std::byte* data,
                    int64_t bytes) {
  Count(Counter::kBulkBytesSent, bytes);
  Count(Counter::kBulkMessagesSent, 1);
  slot.is_pending[static_cast<size_t>(P2pLink::Group::kSends)] = true;
  return link_->Send(slot.number, round, to, data, bytes);
}

Status P2pSet::Receive(P2pSlot& slot, P2pLink::Round round, int from, std::byte* data,
                       int64_t bytes) {
  slot.is_pending[static_cast<size_t>(round)] = true;
  return link_->Receive(slot.number, round, from, data, bytes);
}

Result<bool> P2pSet::AllComplete(P2pSlot& slot, P2pLink::Group group) {
  bool& is_pending = slot.is_pending[static_cast<size_t>(group)];
  if (!is_pending) return true;
  Result<bool> complete = link_->AllComplete(slot.number, group);
  if (complete.ok() && complete.value()) is_pending = false;
  return complete;
}

/// It is leaked on purpose: a peer that has not failed may still send to it
/// or receive from it, and no network has a reliable way to cancel a send.
void P2pSet::Quarantine() {
  const auto is_used = [](const P2pSlot& slot) {
    return std::ranges::any_of(slot.is_pending, std::identity());
  };
  if (staging_ == nullptr || std::ranges::none_of(slots_, is_used)) return;
  Count(Counter::kQuarantinedBytes, staging_bytes_);
  staging_ = nullptr;  // never freed: the link may write to it at any later time
}

}  // namespace farandole
