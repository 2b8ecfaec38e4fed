#include "ops/cpu/collective.h"

#include <algorithm>

namespace farandole {

PlaneOperation* CpuCollective::Enqueue(const Batch& batch, CpuSet& set, Pool& pool) {
  batch_ = &batch;
  set_ = &set;
  pool_ = &pool;
  has_begun_ = false;
  set.queue.push_back(this);
  return this;
}

/// Only the first batch in the queue advances. It begins with its first step and not when it is
/// queued, since the chunks of a set are numbered through its batches.
Progress CpuCollective::Step() {
  if (set_->is_broken) {
    Progress failed = Progress::Failed(set_->Broken());
    Leave();
    return failed;
  }
  if (set_->queue.front() != this) {
    return Progress::Waiting(set_->bell != nullptr ? kByDoorbell : kGentlePollNs);
  }
  if (!has_begun_) {
    has_begun_ = true;
    Describe();
    members() == 1 ? void(solo_ = SoloRun(*batch_)) : Begin();
  }
  Progress progress = members() > 1           ? Advance()
                      : solo_.Step(kernels()) ? Progress::Done()
                                              : Progress::Moved();
  if (!failure_.ok()) progress = Progress::Failed(failure_);
  using State = Progress::State;
  if (progress.state == State::kFailed) Break();
  if (progress.state == State::kFailed || progress.state == State::kDone) Leave();
  return progress;
}

void CpuCollective::Abandon() {
  Break();
  Leave();
}

void CpuCollective::Break() {
  set_->is_broken = true;
  Cancel();
}

/// From anywhere in the queue: an abandoned batch need not be the first. The next one may have
/// returned kWaiting before, so the bell is rung.
void CpuCollective::Leave() {
  std::erase(set_->queue, this);
  if (!set_->queue.empty() && set_->bell != nullptr) set_->bell->Ring();
  set_ = nullptr;
  pool_->Return(this);
}

void CpuCollective::Describe() {
  wire_ = WireOf(*batch_);
  wire_bytes_ = SizeOf(wire_);
  prescale_ = PrescaleOf(*batch_);
  casts_ = wire_ != batch_->dtype || prescale_ != 1.0;
  contributes_ = Contributes(*batch_, my_index());
  failure_ = Status();
  present_.clear();
  for (int i = 0; i < members(); ++i) {
    if (Contributes(*batch_, i)) present_.push_back(i);
  }
  merges_.clear();
  if (!batch_->slots.empty()) FindMerges(batch_->slots, present_, merges_);
  const int64_t divisor = batch_->divisor > 0 ? batch_->divisor : members();
  spec_ = {wire_, batch_->op, divisor, batch_->postscale, merges_};
}

void CpuCollective::ReduceInto(std::byte* out, std::byte* scratch,
                               std::span<const void* const> sources, int64_t count) const {
  std::byte* const result = wire_ == batch_->dtype ? out : scratch;
  kernels().Reduce(result, sources, count, spec_);
  if (result != out) kernels().Unpack(out, batch_->dtype, result, wire_, count);
}

void SliceCopier::Begin(const Batch& batch, int64_t slice_elements) {
  Partition::Reset(batch, slice_elements);
  batch_ = &batch;
  const int64_t bytes = OutputCount(batch, batch.segments[0]) * SizeOf(WireOf(batch));
  streams_ = bytes >= kLargeResultBytes;
}

const std::byte* SliceCopier::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* SliceCopier::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

/// Unpack from a type to itself is a copy through the cache; Stream is one past it, for results
/// that no cache holds.
int64_t SliceCopier::Copy(const CpuKernels& kernels, Slice slice, const std::byte* from) const {
  if (!TakesResult() || slice.count == 0) return 0;
  const int64_t bytes = slice.count * SizeOf(batch_->dtype);
  if (streams_) {
    kernels.Stream(Out(slice.begin), from, bytes);
  } else {
    kernels.Unpack(Out(slice.begin), batch_->dtype, from, batch_->dtype, slice.count);
  }
  return bytes;
}

int64_t SliceCopier::CopyOwn(const CpuKernels& kernels, int64_t chunk) const {
  const int me = batch_->my_index;
  return Copy(kernels, Received(me, chunk), In(Sent(me, chunk).begin));
}

Status UnlikeSplits(const Batch& batch, int from, const std::string& sent) {
  const std::string me = std::to_string(batch.ranks[static_cast<size_t>(batch.my_index)]);
  const auto sender = static_cast<size_t>(from);
  return Internal("alltoall: rank " + std::to_string(batch.ranks[sender]) + " sends rank " + me +
                  " " + sent + " bytes, rank " + me + " expects " +
                  std::to_string(batch.receives[sender] * SizeOf(batch.dtype)));
}

}  // namespace farandole
