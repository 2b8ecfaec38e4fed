#include "ops/mpi/variable_size.h"

#include "ops/mpi/chunk_plan.h"

namespace farandole {
namespace {

/// Slices start at multiples of this, so that two of them never share a cache line.
constexpr int64_t kSliceAlign = 64;

}  // namespace

/// The slices of one chunk, one per member, together fit into the room of a packed chunk.
int64_t MpiVariableSize::Prepare() {
  slice_bytes_ = StagingFor(members()).chunk_bytes / members() / kSliceAlign * kSliceAlign;
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
