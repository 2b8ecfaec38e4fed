#include "ops/mpi/collective.h"

#include <algorithm>

namespace farandole {
namespace {

// Steps without progress before polling becomes gentle: about half a millisecond.
constexpr int64_t kHotSteps = 1000;
constexpr int64_t kGentlePollNs = 50'000;

size_t Index(Round round) { return static_cast<size_t>(round); }

}  // namespace

void MpiCollective::Begin(const Batch& batch, MpiSet& set) {
  batch_ = &batch;
  set_ = &set;
  next_ = nullptr;
  // The queue is linked through the collectives themselves, so that a start allocates nothing.
  (set.queue_tail != nullptr ? set.queue_tail->next_ : set.queue_head) = this;
  set.queue_tail = this;
  posted_ = packed_ = reduced_ = unpacked_ = retired_ = idle_steps_ = 0;
  if (set.members() == 1) {
    solo_ = SoloRun(batch);
    return;
  }
  travel_ = TravelDType(batch);
  element_bytes_ = SizeOf(travel_);
  prescale_ = Reduces(batch.kind) ? batch.prescale : 1.0;
  casts_ = travel_ != batch.dtype || prescale_ != 1.0;
  chunks_ = Prepare();
}

/// Only the first batch in the set's queue advances, and only when earlier sets with the same tags
/// are removed: see `class MpiSet` for why messages cannot be mismatched then.
Progress MpiCollective::Step() {
  if (set_->broken()) {
    const uint32_t uid = set_->uid();
    End();
    return Progress::Failed(Internal("an earlier batch of process set " + std::to_string(uid) +
                                     " failed or was abandoned"));
  }
  // Nothing rings when that changes, so the engine asks again.
  if (set_->queue_head != this || set_->earlier != nullptr) {
    return Progress::Waiting(kGentlePollNs);
  }
  Progress progress = set_->members() == 1
                          ? (solo_.Step(kernels()) ? Progress::Done() : Progress::Moved())
                          : Advance();
  if (progress.state == Progress::State::kFailed) set_->Break();
  if (progress.state == Progress::State::kFailed || progress.state == Progress::State::kDone) {
    End();
  }
  return progress;
}

void MpiCollective::Abandon() {
  if (set_ == nullptr) return;
  set_->Break();
  End();
}

/// Leaves the queue, from any position: an abandoned batch need not be the first.
void MpiCollective::End() {
  MpiCollective** link = &set_->queue_head;
  MpiCollective* before = nullptr;
  while (*link != this) {
    before = *link;
    link = &before->next_;
  }
  *link = next_;
  if (set_->queue_tail == this) set_->queue_tail = before;
  set_ = nullptr;
}

/// Runs the first stage that is possible. Peers wait for results and contributions, so these go
/// first; unpacking helps only this rank.
Progress MpiCollective::Advance() {
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
  MpiSlot& slot = set_->SlotOf(retired_);
  for (MemberRequests& requests : slot.sends) {
    Result<bool> complete = set_->AllComplete(requests, "MPI_Testall (sends)");
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
  MpiSlot& slot = set_->SlotOf(reduced_);
  Result<bool> complete =
      set_->AllComplete(slot.receives[Index(Round::kContribution)], "MPI_Testall (contributions)");
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
  MpiSlot& slot = set_->SlotOf(unpacked_);
  Result<bool> complete =
      set_->AllComplete(slot.receives[Index(Round::kResult)], "MPI_Testall (results)");
  if (!complete.ok()) return complete.status();
  if (!complete.value()) return Outcome::kNothing;
  Unpack(unpacked_);
  ++unpacked_;
  return Outcome::kMoved;
}

std::span<const void* const> MpiCollective::Sources(const MpiSlot& slot, int64_t at,
                                                    const void* own) {
  const std::span<const void*> sources = set_->sources();
  size_t present = 0;
  for (int from = 0; from < members(); ++from) {
    if (IsAbsent(*batch_, from)) continue;
    const std::byte* const received = Inbox(slot, from) + at * element_bytes_;
    sources[present++] = from == my_index() ? own : received;
  }
  return sources.first(present);
}

void MpiCollective::PackElements(SegmentCursor& cursor, std::byte* to, int64_t count) {
  while (count > 0) {
    const Run run = cursor.Next(count);
    kernels().Pack(to, travel_, run.in, batch_->dtype, run.count, prescale_);
    to += run.count * element_bytes_;
    count -= run.count;
  }
}

void MpiCollective::UnpackElements(SegmentCursor& cursor, const std::byte* from, int64_t count) {
  while (count > 0) {
    const Run run = cursor.Next(count);
    if (NeedsCopy(run)) kernels().Unpack(run.out, batch_->dtype, from, travel_, run.count);
    from += run.count * element_bytes_;
    count -= run.count;
  }
}

/// Three cursors, since chunks in different stages stand at different elements of the same tensors.
int64_t MpiSharded::Prepare() {
  plan_.Reset(*batch_);
  contributes_ = plan_.Contributes(my_index());
  pack_cursor_ = reduce_cursor_ = unpack_cursor_ = SegmentCursor(batch_->segments, batch_->dtype);
  return plan_.chunks();
}

/// From each contributor its contribution to the own shard, and from each member that forwards it
/// the result of that member's shard.
Status MpiSharded::PostReceives(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice mine = MyShard(count);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    if (mine.count > 0 && plan_.Contributes(from)) {
      FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kContribution, from,
                                              ReceiveBuffer(slot, from, mine),
                                              mine.count * element_bytes_));
    }
    const Slice theirs = plan_.ShardOf(from, count);
    if (theirs.count > 0 && plan_.Forwards(from, my_index())) {
      FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kResult, from,
                                              slot.result + theirs.begin * element_bytes_,
                                              theirs.count * element_bytes_));
    }
  }
  return Status();
}

/// Packs what peers need of this rank's contribution; a shard that only this rank reduces stays in
/// the tensor until then. Starting after itself, each rank sends to another peer first.
Status MpiSharded::SendContributions(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  PackElements(pack_cursor_, slot.packed, direct.begin);
  pack_cursor_.Skip(direct.count);
  PackElements(pack_cursor_, slot.packed + after * element_bytes_, count - after);
  CountCopied((count - direct.count) * element_bytes_);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    const Slice shard = plan_.ShardOf(to, count);
    if (shard.count == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(slot, Round::kContribution, to,
                                         slot.packed + shard.begin * element_bytes_,
                                         shard.count * element_bytes_));
  }
  return Status();
}

/// ReduceShard runs also where the own shard is empty: an allreduce's cursor has to pass the chunk.
Status MpiSharded::Reduce(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
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
    FARANDOLE_RETURN_IF_ERROR(set_->Send(slot, Round::kResult, to,
                                         slot.result + shard.begin * element_bytes_,
                                         shard.count * element_bytes_));
  }
  return Status();
}

/// All of the chunk but the direct shard, which the reduction has written to the tensor.
void MpiSharded::Unpack(int64_t chunk) {
  const int64_t count = plan_.CountOf(chunk);
  const std::byte* from = CompleteChunk(set_->SlotOf(chunk));
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  UnpackElements(unpack_cursor_, from, direct.begin);
  unpack_cursor_.Skip(direct.count);
  UnpackElements(unpack_cursor_, from + after * element_bytes_, count - after);
  CountCopied(count * element_bytes_);
}

/// The slices of one chunk, one per member, together fit into the room of a packed chunk.
int64_t MpiVariableSize::Prepare() {
  slice_bytes_ = set_->size().slice_bytes;
  partition_.Reset(*batch_, slice_bytes_ / element_bytes_);
  contributes_ = !IsAbsent(*batch_, my_index());
  const int64_t result_bytes = OutputCount(*batch_, batch_->segments[0]) * element_bytes_;
  streams_out_ = result_bytes >= kLargeResultBytes;
  return partition_.chunks();
}

/// Receives have room for the longest slice: what comes may be more than is expected, which MPI
/// would otherwise report as truncation, without the sizes.
Status MpiVariableSize::PostReceives(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index() || IsAbsent(*batch_, from) || !ReceivesFrom(from, chunk)) continue;
    FARANDOLE_RETURN_IF_ERROR(
        set_->Receive(slot, Round::kContribution, from, Inbox(slot, from), slice_bytes_));
  }
  return Status();
}

/// Starting after itself, each rank sends to another peer first.
Status MpiVariableSize::SendContributions(int64_t chunk) {
  BeforeSends(chunk);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    if (!SendsTo(to, chunk)) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(set_->SlotOf(chunk), Round::kContribution, to,
                                         Packed(to, chunk),
                                         partition_.Sent(to, chunk).count * element_bytes_));
  }
  return Status();
}

const std::byte* MpiVariableSize::PackSlice(int to, int64_t chunk) {
  const Slice slice = partition_.Sent(to, chunk);
  std::byte* const packed = PackedSlice(to, chunk);
  if (slice.count == 0) return packed;
  kernels().Pack(packed, travel_, In(slice.begin), batch_->dtype, slice.count, prescale_);
  CountCopied(slice.count * element_bytes_);
  return packed;
}

void MpiVariableSize::CopyOwnSlice(int64_t chunk) {
  const int me = my_index();
  CopySlice(partition_.Received(me, chunk), In(partition_.Sent(me, chunk).begin));
}

void MpiVariableSize::CopyReceived(int64_t chunk) {
  const MpiSlot& slot = set_->SlotOf(chunk);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    CopySlice(partition_.Received(from, chunk), Inbox(slot, from));
  }
}

void MpiVariableSize::CopySlice(Slice slice, const std::byte* from) {
  if (batch_->segments[0].out == nullptr || slice.count == 0) return;
  const int64_t bytes = slice.count * element_bytes_;
  CountCopied(bytes);
  if (streams_out_) return kernels().Stream(Out(slice.begin), from, bytes);
  kernels().Unpack(Out(slice.begin), travel_, from, travel_, slice.count);
}

const std::byte* MpiVariableSize::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* MpiVariableSize::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

}  // namespace farandole
