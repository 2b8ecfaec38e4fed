#include "ops/mpi/collective.h"

#include <algorithm>

namespace farandole {
namespace {

// Steps without progress before polling becomes gentle: about half a millisecond.
constexpr int64_t kHotSteps = 1000;

size_t Index(Round round) { return static_cast<size_t>(round); }

}  // namespace

void MpiCollective::Begin() {
  posted_ = packed_ = reduced_ = unpacked_ = retired_ = idle_steps_ = 0;
  chunks_ = Prepare();
}

/// Runs the first stage that is possible. Peers wait for results and contributions, so these go
/// first; unpacking helps only this rank. Nothing starts before earlier sets with the same tags are
/// removed: see `class MpiSet` for why messages cannot be mismatched then.
Progress MpiCollective::Advance() {
  if (set().earlier != nullptr) return Progress::Waiting(kGentlePollNs);
  using Stage = Result<Outcome> (MpiCollective::*)();
  static constexpr Stage kStages[] = {&MpiCollective::RetireStage, &MpiCollective::PostStage,
                                      &MpiCollective::ReduceStage, &MpiCollective::PackStage,
                                      &MpiCollective::UnpackStage};
  for (const Stage stage : kStages) {
    Result<Outcome> outcome = (this->*stage)();
    if (!outcome.ok()) return Progress::Failed(outcome.status());
    if (outcome.value() == Outcome::kNothing) continue;
    idle_steps_ = 0;
    return Progress::Moved();
  }
  return retired_ == chunks_ ? Progress::Done() : Wait();
}

/// MPI has no event that rings a doorbell: first the engine asks at once, later every
/// kGentlePollNs.
Progress MpiCollective::Wait() {
  return Progress::Waiting(++idle_steps_ < kHotSteps ? 0 : kGentlePollNs);
}

/// A slot is used again only when nobody reads it any more: MPI does until the requests of
/// MPI_Isend are complete, and unpacking, which comes before, does as well.
Result<MpiCollective::Outcome> MpiCollective::RetireStage() {
  if (retired_ == unpacked_) return Outcome::kNothing;
  MpiSlot& slot = set().SlotOf(retired_);
  for (MemberRequests& requests : slot.sends) {
    Result<bool> complete = set().AllComplete(requests, "MPI_Testall (sends)");
    if (!complete.ok()) return complete.status();
    if (!complete.value()) return Outcome::kNothing;
  }
  ++retired_;
  return Outcome::kMoved;
}

/// As far ahead as there are slots: a short message that arrives before its receive is copied once
/// more, from a buffer of MPI's, and a long one waits for the receive.
Result<MpiCollective::Outcome> MpiCollective::PostStage() {
  const int64_t limit = std::min(chunks_, retired_ + kMpiSlots);
  if (posted_ >= limit) return Outcome::kNothing;
  for (; posted_ < limit; ++posted_) FARANDOLE_RETURN_IF_ERROR(PostReceives(posted_));
  return Outcome::kMoved;
}

Result<MpiCollective::Outcome> MpiCollective::PackStage() {
  if (packed_ == posted_ || (in_rounds_ && reduced_ < packed_)) return Outcome::kNothing;
  if (contributes_) FARANDOLE_RETURN_IF_ERROR(SendContributions(packed_));
  ++packed_;
  return Outcome::kMoved;
}

Result<MpiCollective::Outcome> MpiCollective::ReduceStage() {
  if (reduced_ == packed_) return Outcome::kNothing;
  MpiSlot& slot = set().SlotOf(reduced_);
  Result<bool> complete =
      set().AllComplete(slot.receives[Index(Round::kContribution)], "MPI_Testall (contributions)");
  if (!complete.ok()) return complete.status();
  if (!complete.value()) return Outcome::kNothing;
  FARANDOLE_RETURN_IF_ERROR(Reduce(reduced_));
  ++reduced_;
  return Outcome::kMoved;
}

/// Complete at once where a chunk has no results to receive: all requests are MPI_REQUEST_NULL
/// then.
Result<MpiCollective::Outcome> MpiCollective::UnpackStage() {
  if (unpacked_ == reduced_) return Outcome::kNothing;
  MpiSlot& slot = set().SlotOf(unpacked_);
  Result<bool> complete =
      set().AllComplete(slot.receives[Index(Round::kResult)], "MPI_Testall (results)");
  if (!complete.ok()) return complete.status();
  if (!complete.value()) return Outcome::kNothing;
  Unpack(unpacked_);
  ++unpacked_;
  return Outcome::kMoved;
}

/// Three cursors, since chunks in different stages stand at different elements of the same tensors.
int64_t MpiSharded::Prepare() {
  plan_.Reset(*batch_);
  pack_cursor_ = reduce_cursor_ = unpack_cursor_ = SegmentCursor(batch_->segments, batch_->dtype);
  return plan_.chunks();
}

/// From each contributor its contribution to the own shard, and from each member that forwards it
/// the result of that member's shard.
Status MpiSharded::PostReceives(int64_t chunk) {
  MpiSlot& slot = set().SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice mine = MyShard(count);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    if (mine.count > 0 && plan_.Contributes(from)) {
      FARANDOLE_RETURN_IF_ERROR(set().Receive(slot, Round::kContribution, from,
                                              ReceiveBuffer(slot, from, mine),
                                              mine.count * wire_bytes_));
    }
    const Slice theirs = plan_.ShardOf(from, count);
    if (theirs.count > 0 && plan_.Forwards(from, my_index())) {
      FARANDOLE_RETURN_IF_ERROR(set().Receive(slot, Round::kResult, from,
                                              slot.result + theirs.begin * wire_bytes_,
                                              theirs.count * wire_bytes_));
    }
  }
  return Status();
}

/// Packs what peers need of this rank's contribution; a shard that only this rank reduces stays in
/// the tensor until then. Starting after itself, each rank sends to another peer first.
Status MpiSharded::SendContributions(int64_t chunk) {
  MpiSlot& slot = set().SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  PackRuns(kernels(), *batch_, pack_cursor_, slot.packed, direct.begin);
  pack_cursor_.Skip(direct.count);
  PackRuns(kernels(), *batch_, pack_cursor_, slot.packed + after * wire_bytes_, count - after);
  CountCopied((count - direct.count) * wire_bytes_);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    const Slice shard = plan_.ShardOf(to, count);
    if (shard.count == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Send(slot, Round::kContribution, to,
                                         slot.packed + shard.begin * wire_bytes_,
                                         shard.count * wire_bytes_));
  }
  return Status();
}

/// ReduceShard runs also where the own shard is empty: an allreduce's cursor has to pass the chunk.
Status MpiSharded::Reduce(int64_t chunk) {
  MpiSlot& slot = set().SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  ReduceShard(slot, count);
  return MyShard(count).count > 0 ? SendResults(slot, count) : Status();
}

/// From slot.result, into which the other shards are being received meanwhile: shards do not
/// overlap.
Status MpiSharded::SendResults(MpiSlot& slot, int64_t count) {
  const Slice shard = MyShard(count);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    if (!plan_.Forwards(my_index(), to)) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Send(slot, Round::kResult, to,
                                         slot.result + shard.begin * wire_bytes_,
                                         shard.count * wire_bytes_));
  }
  return Status();
}

/// All of the chunk but the direct shard, which the reduction has written to the tensor.
void MpiSharded::Unpack(int64_t chunk) {
  const int64_t count = plan_.CountOf(chunk);
  const std::byte* from = CompleteChunk(set().SlotOf(chunk));
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  UnpackRuns(kernels(), *batch_, unpack_cursor_, from, direct.begin);
  unpack_cursor_.Skip(direct.count);
  UnpackRuns(kernels(), *batch_, unpack_cursor_, from + after * wire_bytes_, count - after);
  CountCopied(count * wire_bytes_);
}

/// The slices of one chunk, one per member, together fit into the room of a packed chunk.
int64_t MpiVariableSize::Prepare() {
  slice_bytes_ = set().size().slice_bytes;
  slices_.Begin(*batch_, slice_bytes_ / wire_bytes_);
  return slices_.chunks();
}

/// Receives have room for the longest slice: what comes may be more than is expected, which MPI
/// would otherwise report as truncation, without the sizes.
Status MpiVariableSize::PostReceives(int64_t chunk) {
  MpiSlot& slot = set().SlotOf(chunk);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index() || IsAbsent(*batch_, from) || !ReceivesFrom(from, chunk)) continue;
    FARANDOLE_RETURN_IF_ERROR(
        set().Receive(slot, Round::kContribution, from, Inbox(slot, from), slice_bytes_));
  }
  return Status();
}

/// Starting after itself, each rank sends to another peer first.
Status MpiVariableSize::SendContributions(int64_t chunk) {
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

const std::byte* MpiVariableSize::PackSlice(int to, int64_t chunk) {
  const Slice slice = slices_.Sent(to, chunk);
  std::byte* const packed = PackedSlice(to, chunk);
  if (slice.count == 0) return packed;
  kernels().Pack(packed, wire_, slices_.In(slice.begin), batch_->dtype, slice.count, prescale_);
  CountCopied(slice.count * wire_bytes_);
  return packed;
}

void MpiVariableSize::CopyReceived(int64_t chunk) {
  const MpiSlot& slot = set().SlotOf(chunk);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    CountCopied(slices_.Copy(kernels(), slices_.Received(from, chunk), Inbox(slot, from)));
  }
}

}  // namespace farandole
