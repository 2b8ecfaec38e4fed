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
  if (packed_ == posted_) return Outcome::kNothing;
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

}  // namespace farandole
