#include "ops/p2p/collective.h"

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
  bell = link_->bell();
  return Status();
}

P2pSet::~P2pSet() {
  if (!queue.empty()) Quarantine();
  link_.reset();  // it may still use the staging memory
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

/// It is leaked on purpose where the link cannot cancel: a peer that has not failed may still send
/// to it or receive from it.
void P2pSet::Quarantine() {
  const auto is_used = [](const P2pSlot& slot) {
    return std::ranges::any_of(slot.is_pending, std::identity());
  };
  if (staging_ == nullptr || std::ranges::none_of(slots_, is_used)) return;
  if (link_->Cancel()) return;
  Count(Counter::kQuarantinedBytes, staging_bytes_);
  staging_ = nullptr;  // never freed: the link may write to it at any later time
}

void P2pCollective::Begin() {
  posted_ = packed_ = reduced_ = unpacked_ = retired_ = 0;
  chunks_ = Prepare();
}

/// Nothing starts before earlier sets with the same number are removed: see `class P2pSet` for why
/// messages cannot be mismatched then.
Progress P2pCollective::Advance() {
  if (set().earlier != nullptr) return Progress::Waiting(kGentlePollNs);
  if (AdvanceStage()) return Progress::Moved();
  if (retired_ == chunks_) return Progress::Done();
  return Progress::Waiting(set().PollAfterNs());
}

/// Runs the first stage that is possible. Peers wait for results and contributions, so these go
/// first; unpacking helps only this rank. @return Whether there was one.
bool P2pCollective::AdvanceStage() {
  // A slot is used again only when nobody reads it any more: the link does until all sends are
  // complete, and unpacking, which comes before, does as well.
  if (retired_ < unpacked_ && AllComplete(retired_, Group::kSends)) {
    ++retired_;
    return true;
  }
  // As far ahead as there are slots: a short message that arrives before its receive is copied once
  // more, from a buffer of the link's, and a long one waits for the receive.
  const int64_t limit = std::min(chunks_, retired_ + kLinkSlots);
  if (posted_ < limit) {
    while (posted_ < limit && failure_.ok()) failure_ = PostReceives(posted_++);
    return true;
  }
  if (reduced_ < packed_ && AllComplete(reduced_, Group::kContributions)) {
    failure_ = Reduce(reduced_++);
    return true;
  }
  if (packed_ < posted_ && !(in_rounds_ && reduced_ < packed_) && failure_.ok()) {
    if (contributes_) failure_ = SendContributions(packed_);
    ++packed_;
    return true;
  }
  // Complete at once where a chunk has no results to receive.
  if (unpacked_ < reduced_ && AllComplete(unpacked_, Group::kResults)) {
    Unpack(unpacked_++);
    return true;
  }
  return false;
}

bool P2pCollective::AllComplete(int64_t chunk, Group group) {
  if (!failure_.ok()) return false;
  const Result<bool> complete = set().AllComplete(set().SlotOf(chunk), group);
  failure_ = complete.status();
  return complete.ok() && complete.value();
}

/// Three cursors, since chunks in different stages stand at different elements of the same tensors.
int64_t P2pSharded::Prepare() {
  plan_.Reset(*batch_);
  pack_cursor_ = reduce_cursor_ = unpack_cursor_ = SegmentCursor(batch_->segments, batch_->dtype);
  return plan_.chunks();
}

/// From each contributor its contribution to the own shard, and from each member that forwards it
/// the result of that member's shard.
Status P2pSharded::PostReceives(int64_t chunk) {
  P2pSlot& slot = set().SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice mine = MyShard(count);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    if (mine.count > 0 && Contributes(*batch_, from)) {
      FARANDOLE_RETURN_IF_ERROR(set().Receive(
          slot, Round::kContribution, from, ReceiveBuffer(slot, from, mine), BytesOf(mine.count)));
    }
    const Slice theirs = plan_.ShardOf(from, count);
    if (theirs.count > 0 && plan_.Forwards(from, my_index())) {
      FARANDOLE_RETURN_IF_ERROR(set().Receive(
          slot, Round::kResult, from, slot.result + BytesOf(theirs.begin), BytesOf(theirs.count)));
    }
  }
  return Status();
}

/// Packs what peers need of this rank's contribution; a shard that only this rank reduces stays in
/// the tensor until then. Starting after itself, each rank sends to another peer first.
Status P2pSharded::SendContributions(int64_t chunk) {
  P2pSlot& slot = set().SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  PackElements(pack_cursor_, slot.packed, direct.begin);
  pack_cursor_.Skip(direct.count);
  PackElements(pack_cursor_, slot.packed + BytesOf(after), count - after);
  CountCopied(BytesOf(count - direct.count));
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    const Slice shard = plan_.ShardOf(to, count);
    if (shard.count == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Send(slot, Round::kContribution, to,
                                         slot.packed + BytesOf(shard.begin), BytesOf(shard.count)));
  }
  return Status();
}

/// ReduceShard runs also where the own shard is empty: an allreduce's cursor has to pass the chunk.
Status P2pSharded::Reduce(int64_t chunk) {
  P2pSlot& slot = set().SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  ReduceShard(slot, count);
  return MyShard(count).count > 0 ? SendResults(slot, count) : Status();
}

/// From slot.result, into which the other shards are being received meanwhile: shards do not
/// overlap.
Status P2pSharded::SendResults(P2pSlot& slot, int64_t count) {
  const Slice shard = MyShard(count);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    if (!plan_.Forwards(my_index(), to)) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Send(slot, Round::kResult, to,
                                         slot.result + BytesOf(shard.begin), BytesOf(shard.count)));
  }
  return Status();
}

/// All of the chunk but the direct shard, which the reduction has written to the tensor.
void P2pSharded::Unpack(int64_t chunk) {
  const int64_t count = plan_.CountOf(chunk);
  const std::byte* from = CompleteChunk(set().SlotOf(chunk));
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  UnpackElements(unpack_cursor_, from, direct.begin);
  unpack_cursor_.Skip(direct.count);
  UnpackElements(unpack_cursor_, from + BytesOf(after), count - after);
  CountCopied(BytesOf(count));
}

/// The slices of one chunk, one per member, together fit into the room of a packed chunk.
int64_t P2pVariableSize::Prepare() {
  slice_bytes_ = set().size().slice_bytes;
  slices_.Begin(*batch_, slice_bytes_ / wire_bytes_);
  return slices_.chunks();
}

/// Receives have room for the longest slice: what comes may be more than is expected, which a link
/// would otherwise report as truncation, without the sizes.
Status P2pVariableSize::PostReceives(int64_t chunk) {
  P2pSlot& slot = set().SlotOf(chunk);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index() || IsAbsent(*batch_, from) || !ReceivesFrom(from, chunk)) continue;
    FARANDOLE_RETURN_IF_ERROR(
        set().Receive(slot, Round::kContribution, from, Inbox(slot, from), slice_bytes_));
  }
  return Status();
}

/// Starting after itself, each rank sends to another peer first.
Status P2pVariableSize::SendContributions(int64_t chunk) {
  BeforeSends(chunk);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    if (!SendsTo(to, chunk)) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Send(set().SlotOf(chunk), Round::kContribution, to,
                                         Packed(to, chunk),
                                         slices_.Sent(to, chunk).count * wire_bytes_));
  }
  return Status();
}

const std::byte* P2pVariableSize::PackSlice(int to, int64_t chunk) {
  const Slice slice = slices_.Sent(to, chunk);
  std::byte* const packed = PackedSlice(to, chunk);
  if (slice.count == 0) return packed;
  kernels().Pack(packed, wire_, slices_.In(slice.begin), batch_->dtype, slice.count, prescale_);
  CountCopied(slice.count * wire_bytes_);
  return packed;
}

void P2pVariableSize::CopyReceived(int64_t chunk) {
  const P2pSlot& slot = set().SlotOf(chunk);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    CountCopied(slices_.Copy(kernels(), slices_.Received(from, chunk), Inbox(slot, from)));
  }
}

}  // namespace farandole
