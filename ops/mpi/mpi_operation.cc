#include "ops/mpi/mpi_operation.h"

#include <algorithm>

namespace farandole {
namespace {

// Steps without news before polling becomes gentle: about half a millisecond.
constexpr int64_t kHotSteps = 1000;
constexpr int64_t kGentlePollNs = 50'000;

size_t Index(Round round) { return static_cast<size_t>(round); }

}  // namespace

void MpiOperation::Begin(const Batch& batch, MpiSet& set) {
  batch_ = &batch;
  set_ = &set;
  next_ = nullptr;
  (set.queue_tail != nullptr ? set.queue_tail->next_ : set.queue_head) = this;
  set.queue_tail = this;
  posted_ = packed_ = reduced_ = unpacked_ = retired_ = idle_steps_ = 0;
  if (set.members() == 1) {
    solo_ = SoloRun(batch);
    return;
  }
  travel_ = TravelDType(batch);
  element_bytes_ = SizeOf(travel_);
  casts_ = travel_ != batch.dtype || (Reduces(batch.kind) && batch.prescale != 1.0);
  variable_size_ = IsVariableSize(batch.kind);
  if (variable_size_) return BeginVariableSize();
  plan_.Reset(batch);
  chunks_ = plan_.chunks();
  contributes_ = plan_.Contributes(set.my_index());
  pack_cursor_ = reduce_cursor_ = unpack_cursor_ = SegmentCursor(batch.segments, batch.dtype);
}

Progress MpiOperation::Step() {
  if (set_->broken()) {
    const uint32_t uid = set_->uid();
    End();
    return Progress::Failed(Internal("an earlier batch of process set " + std::to_string(uid) +
                                     " failed or was abandoned"));
  }
  if (set_->queue_head != this || set_->earlier != nullptr) {
    return Progress::Waiting(kGentlePollNs);
  }
  Progress progress = set_->members() == 1 ? (solo_.Step(*set_->bulk().kernels) ? Progress::Done()
                                                                                : Progress::Moved())
                                           : Advance();
  if (progress.state == Progress::State::kFailed) set_->Break();
  if (progress.state == Progress::State::kFailed || progress.state == Progress::State::kDone) {
    End();
  }
  return progress;
}

void MpiOperation::Abandon() {
  if (set_ == nullptr) return;
  set_->Break();
  End();
}

void MpiOperation::End() {
  MpiOperation** link = &set_->queue_head;
  MpiOperation* before = nullptr;
  while (*link != this) {
    before = *link;
    link = &before->next_;
  }
  *link = next_;
  if (set_->queue_tail == this) set_->queue_tail = before;
  set_ = nullptr;
}

// Peers wait for results and contributions, so these go first; unpacking helps only this rank.
Progress MpiOperation::Advance() {
  using Stage = Result<Outcome> (MpiOperation::*)();
  static constexpr Stage kStages[] = {&MpiOperation::Retire, &MpiOperation::Post,
                                      &MpiOperation::Reduce, &MpiOperation::Pack,
                                      &MpiOperation::Unpack};
  for (const Stage stage : kStages) {
    Result<Outcome> outcome = (this->*stage)();
    if (!outcome.ok()) return Progress::Failed(outcome.status());
    if (outcome.value() == Outcome::kNothing) continue;
    idle_steps_ = 0;
    return Progress::Moved();
  }
  return retired_ == chunks_ ? Progress::Done() : Wait();
}

Progress MpiOperation::Wait() {
  return Progress::Waiting(++idle_steps_ < kHotSteps ? 0 : kGentlePollNs);
}

Result<MpiOperation::Outcome> MpiOperation::Retire() {
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

Result<MpiOperation::Outcome> MpiOperation::Post() {
  const int64_t limit = std::min(chunks_, retired_ + kMpiSlots);
  if (posted_ >= limit) return Outcome::kNothing;
  for (; posted_ < limit; ++posted_) {
    FARANDOLE_RETURN_IF_ERROR(variable_size_ ? PostSlices(posted_) : PostReceives(posted_));
  }
  return Outcome::kMoved;
}

Status MpiOperation::PostReceives(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Shard mine = MyShard(count);
  for (int from = 0; from < plan_.members(); ++from) {
    if (from == set_->my_index()) continue;
    if (mine.count > 0 && plan_.Contributes(from)) {
      // A broadcast is not reduced: its contribution is the result.
      std::byte* const into = plan_.is_broadcast() ? slot.result + mine.begin * element_bytes_
                                                   : slot.inbox + from * set_->inbox_bytes();
      FARANDOLE_RETURN_IF_ERROR(
          set_->Receive(slot, Round::kContribution, from, into, mine.count * element_bytes_));
    }
    const Shard theirs = plan_.ShardOf(from, count);
    if (theirs.count > 0 && plan_.Forwards(from, set_->my_index())) {
      FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kResult, from,
                                              slot.result + theirs.begin * element_bytes_,
                                              theirs.count * element_bytes_));
    }
  }
  return Status();
}

Result<MpiOperation::Outcome> MpiOperation::Pack() {
  if (packed_ == posted_) return Outcome::kNothing;
  if (contributes_) {
    FARANDOLE_RETURN_IF_ERROR(variable_size_ ? SendSlices(packed_) : SendChunk(packed_));
  }
  ++packed_;
  return Outcome::kMoved;
}

/// What peers need of this rank's contribution. A shard that only this rank reduces stays in the
/// tensor until then.
Status MpiOperation::SendChunk(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Shard direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  PackElements(slot.packed, direct.begin);
  pack_cursor_.Skip(direct.count);
  PackElements(slot.packed + after * element_bytes_, count - after);
  set_->bulk().Count(Counter::kBytesCopied, (count - direct.count) * element_bytes_);
  return SendContributions(slot, count);
}

void MpiOperation::PackElements(std::byte* to, int64_t count) {
  const double prescale = plan_.is_broadcast() ? 1.0 : batch_->prescale;
  while (count > 0) {
    const Run run = pack_cursor_.Next(count);
    set_->bulk().kernels->Pack(to, travel_, run.in, batch_->dtype, run.count, prescale);
    to += run.count * element_bytes_;
    count -= run.count;
  }
}

Status MpiOperation::SendContributions(MpiSlot& slot, int64_t count) {
  // Starting after itself, each rank hits another peer first.
  for (int step = 1; step < plan_.members(); ++step) {
    const int to = (set_->my_index() + step) % plan_.members();
    const Shard shard = plan_.ShardOf(to, count);
    if (shard.count == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(slot, Round::kContribution, to,
                                         slot.packed + shard.begin * element_bytes_,
                                         shard.count * element_bytes_));
  }
  return Status();
}

Result<MpiOperation::Outcome> MpiOperation::Reduce() {
  if (reduced_ == packed_) return Outcome::kNothing;
  MpiSlot& slot = set_->SlotOf(reduced_);
  Result<bool> complete =
      set_->AllComplete(slot.receives[Index(Round::kContribution)], "MPI_Testall (contributions)");
  if (!complete.ok()) return complete.status();
  if (!complete.value()) return Outcome::kNothing;
  if (variable_size_) {
    FARANDOLE_RETURN_IF_ERROR(CheckSlices(reduced_));
    TakeSlices(reduced_);
  } else {
    FARANDOLE_RETURN_IF_ERROR(ReduceChunk(slot, plan_.CountOf(reduced_)));
  }
  ++reduced_;
  return Outcome::kMoved;
}

Status MpiOperation::ReduceChunk(MpiSlot& slot, int64_t count) {
  const Shard shard = MyShard(count);
  if (plan_.ReducesOwnShard()) {
    ReduceOwnShard(slot, shard, count);
  } else if (!plan_.is_broadcast()) {
    ReduceWholeChunk(slot, count);
  }
  return shard.count > 0 ? SendResults(slot, count) : Status();
}

void MpiOperation::ReduceWholeChunk(MpiSlot& slot, int64_t count) {
  set_->bulk().kernels->Reduce(slot.result, Sources(slot, 0, slot.packed), count,
                               {travel_, batch_->op, plan_.members(), batch_->postscale});
}

void MpiOperation::ReduceOwnShard(MpiSlot& slot, Shard shard, int64_t count) {
  const int64_t end = shard.begin + shard.count;
  reduce_cursor_.Skip(shard.begin);
  for (int64_t at = shard.begin; at < end;) {
    const Run run = reduce_cursor_.Next(std::min(kInCacheBytes / element_bytes_, end - at));
    ReduceRun(slot, shard, at, run);
    at += run.count;
  }
  reduce_cursor_.Skip(count - end);
}

/// Elements of the own shard from `at` on, from the tensor to the result that is sent, and back.
void MpiOperation::ReduceRun(MpiSlot& slot, Shard shard, int64_t at, const Run& run) {
  const CpuKernels& kernels = *set_->bulk().kernels;
  const void* own = run.in;
  if (contributes_ && casts_) {
    std::byte* const packed = slot.packed + at * element_bytes_;
    kernels.Pack(packed, travel_, run.in, batch_->dtype, run.count, batch_->prescale);
    own = packed;
  }
  std::byte* const result = slot.result + at * element_bytes_;
  kernels.Reduce(result, Sources(slot, at - shard.begin, own), run.count,
                 {travel_, batch_->op, plan_.members(), batch_->postscale});
  if (run.out != nullptr) {
    kernels.Unpack(run.out, batch_->dtype, result, travel_, run.count);
  }
}

std::span<const void* const> MpiOperation::Sources(const MpiSlot& slot, int64_t at,
                                                   const void* own) {
  const std::span<const void*> sources = set_->sources();
  size_t present = 0;
  for (int from = 0; from < set_->members(); ++from) {
    if (IsAbsent(*batch_, from)) continue;
    const std::byte* const received = slot.inbox + from * set_->inbox_bytes() + at * element_bytes_;
    sources[present++] = from == set_->my_index() ? own : received;
  }
  return sources.first(present);
}

Status MpiOperation::SendResults(MpiSlot& slot, int64_t count) {
  const Shard shard = MyShard(count);
  for (int step = 1; step < plan_.members(); ++step) {
    const int to = (set_->my_index() + step) % plan_.members();
    if (!plan_.Forwards(set_->my_index(), to)) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(slot, Round::kResult, to,
                                         slot.result + shard.begin * element_bytes_,
                                         shard.count * element_bytes_));
  }
  return Status();
}

Result<MpiOperation::Outcome> MpiOperation::Unpack() {
  if (unpacked_ == reduced_) return Outcome::kNothing;
  MpiSlot& slot = set_->SlotOf(unpacked_);
  Result<bool> complete =
      set_->AllComplete(slot.receives[Index(Round::kResult)], "MPI_Testall (results)");
  if (!complete.ok()) return complete.status();
  if (!complete.value()) return Outcome::kNothing;
  if (!variable_size_) UnpackChunk(slot, plan_.CountOf(unpacked_));
  ++unpacked_;
  return Outcome::kMoved;
}

void MpiOperation::UnpackChunk(MpiSlot& slot, int64_t count) {
  const bool is_root = plan_.is_broadcast() && contributes_;
  const std::byte* from = is_root ? slot.packed : slot.result;
  const Shard direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  UnpackElements(from, direct.begin);
  unpack_cursor_.Skip(direct.count);
  UnpackElements(from + after * element_bytes_, count - after);
  set_->bulk().Count(Counter::kBytesCopied, count * element_bytes_);
}

void MpiOperation::UnpackElements(const std::byte* from, int64_t count) {
  const bool is_root = plan_.is_broadcast() && contributes_;
  while (count > 0) {
    const Run run = unpack_cursor_.Next(count);
    if (run.out != nullptr && !(is_root && run.out == run.in)) {
      set_->bulk().kernels->Unpack(run.out, batch_->dtype, from, travel_, run.count);
    }
    from += run.count * element_bytes_;
    count -= run.count;
  }
}

}  // namespace farandole
