// Allgather, reducescatter and alltoall: one slice from each member to each other, in one round.
#include <algorithm>
#include <string>

#include "ops/mpi/mpi_operation.h"

namespace farandole {
namespace {

constexpr int64_t kSliceAlign = 64;

/// Where in `packed` the slice lies that all members get: an allgather's.
constexpr int kForAll = 0;

}  // namespace

void MpiOperation::BeginVariableSize() {
  const int members = set_->members();
  slice_bytes_ = StagingFor(members).chunk_bytes / members / kSliceAlign * kSliceAlign;
  partition_.Reset(*batch_, slice_bytes_ / element_bytes_);
  chunks_ = partition_.chunks();
  contributes_ = !IsAbsent(*batch_, set_->my_index());
  const int64_t result_bytes = OutputCount(*batch_, batch_->segments[0]) * element_bytes_;
  streams_out_ = result_bytes >= kLargeResultBytes;
}

/// An alltoall's split is known to its two ranks alone. Its last message is the first that is not
/// full, be it empty: so each message is expected by its receiver, who sees if they disagree.
bool MpiOperation::EndsEmpty(std::span<const int64_t> splits, int member, int64_t chunk) const {
  return batch_->kind == OpKind::kAlltoall &&
         splits[static_cast<size_t>(member)] == chunk * (slice_bytes_ / element_bytes_);
}

Status MpiOperation::PostSlices(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  for (int from = 0; from < set_->members(); ++from) {
    const bool empty = partition_.Received(from, chunk).count == 0;
    if (from == set_->my_index() || IsAbsent(*batch_, from)) continue;
    if (empty && !EndsEmpty(batch_->receives, from, chunk)) continue;
    // Room for the longest: what comes may be more than is expected.
    FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kContribution, from,
                                            slot.inbox + from * set_->inbox_bytes(), slice_bytes_));
  }
  return Status();
}

Status MpiOperation::CheckSlices(int64_t chunk) {
  if (batch_->kind != OpKind::kAlltoall) return Status();
  for (int from = 0; from < set_->members(); ++from) {
    if (from == set_->my_index()) continue;
    const int64_t came = set_->BytesFrom(from);
    if (came == partition_.Received(from, chunk).count * element_bytes_) continue;
    const int64_t expected = batch_->receives[static_cast<size_t>(from)] * element_bytes_;
    const std::string me = std::to_string(batch_->ranks[static_cast<size_t>(set_->my_index())]);
    const int64_t sent = chunk * slice_bytes_ + came;
    return Internal("alltoall: rank " + std::to_string(batch_->ranks[static_cast<size_t>(from)]) +
                    " sends rank " + me + (came == slice_bytes_ ? " at least " : " ") +
                    std::to_string(sent) + " bytes, rank " + me + " expects " +
                    std::to_string(expected));
  }
  return Status();
}

/// What stays on this rank goes straight from tensor to tensor, unless it is reduced.
Status MpiOperation::SendSlices(int64_t chunk) {
  const int me = set_->my_index();
  const bool gathers = batch_->kind == OpKind::kAllgather;
  if (!Reduces(batch_->kind))
    CopySlice(partition_.Received(me, chunk), In(partition_.Sent(me, chunk).begin));
  const std::byte* packed = gathers ? PackSlice(kForAll, chunk) : nullptr;
  // Starting after itself, each rank hits another peer first.
  for (int step = 1; step < set_->members(); ++step) {
    const int to = (me + step) % set_->members();
    const int64_t count = partition_.Sent(to, chunk).count;
    if (count == 0 && !EndsEmpty(batch_->sends, to, chunk)) continue;
    if (!gathers) packed = PackSlice(to, chunk);
    FARANDOLE_RETURN_IF_ERROR(
        set_->Send(set_->SlotOf(chunk), Round::kContribution, to, packed, count * element_bytes_));
  }
  return Status();
}

const std::byte* MpiOperation::PackSlice(int to, int64_t chunk) {
  const Slice slice = partition_.Sent(to, chunk);
  std::byte* const packed = set_->SlotOf(chunk).packed + to * slice_bytes_;
  if (slice.count == 0) return packed;
  const double prescale = Reduces(batch_->kind) ? batch_->prescale : 1.0;
  set_->bulk().kernels->Pack(packed, travel_, In(slice.begin), batch_->dtype, slice.count,
                             prescale);
  set_->bulk().Count(Counter::kBytesCopied, slice.count * element_bytes_);
  return packed;
}

void MpiOperation::TakeSlices(int64_t chunk) {
  if (batch_->kind == OpKind::kReducescatter) return ReduceOwnSlice(chunk);
  const MpiSlot& slot = set_->SlotOf(chunk);
  for (int from = 0; from < set_->members(); ++from) {
    if (from == set_->my_index()) continue;
    CopySlice(partition_.Received(from, chunk), slot.inbox + from * set_->inbox_bytes());
  }
}

void MpiOperation::CopySlice(Slice slice, const std::byte* from) {
  if (batch_->segments[0].out == nullptr || slice.count == 0) return;
  const int64_t bytes = slice.count * element_bytes_;
  set_->bulk().Count(Counter::kBytesCopied, bytes);
  if (streams_out_) return set_->bulk().kernels->Stream(Out(slice.begin), from, bytes);
  set_->bulk().kernels->Unpack(Out(slice.begin), travel_, from, travel_, slice.count);
}

/// From the inbox, and from the own tensor, straight into the result, without leaving the cache.
void MpiOperation::ReduceOwnSlice(int64_t chunk) {
  if (batch_->segments[0].out == nullptr) return;
  const CpuKernels& kernels = *set_->bulk().kernels;
  MpiSlot& slot = set_->SlotOf(chunk);
  const Slice own = partition_.Sent(set_->my_index(), chunk);
  const Slice slice = partition_.Received(set_->my_index(), chunk);
  const bool widens = travel_ != batch_->dtype;
  for (int64_t at = 0; at < slice.count;) {
    const int64_t count = std::min(kInCacheBytes / element_bytes_, slice.count - at);
    const void* contribution = contributes_ ? In(own.begin + at) : nullptr;
    if (contributes_ && casts_) {
      kernels.Pack(slot.packed + set_->my_index() * slice_bytes_, travel_, contribution,
                   batch_->dtype, count, batch_->prescale);
      contribution = slot.packed + set_->my_index() * slice_bytes_;
    }
    std::byte* const out = Out(slice.begin + at);
    std::byte* const result = widens ? slot.result : out;
    kernels.Reduce(result, Sources(slot, at, contribution), count,
                   {travel_, batch_->op, set_->members(), batch_->postscale});
    if (widens) kernels.Unpack(out, batch_->dtype, result, travel_, count);
    at += count;
  }
  set_->bulk().Count(Counter::kBytesCopied, slice.count * element_bytes_);
}

const std::byte* MpiOperation::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* MpiOperation::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

}  // namespace farandole
