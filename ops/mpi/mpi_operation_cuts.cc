// Allgather, reducescatter and alltoall: one piece from each member to each other, in one round.
#include <algorithm>
#include <string>

#include "ops/mpi/mpi_operation.h"

namespace farandole {
namespace {

constexpr int64_t kPieceAlign = 64;

/// Where in `packed` the piece lies that all members get: an allgather's.
constexpr int kForAll = 0;

}  // namespace

void MpiOperation::BeginCut() {
  const int members = set_->members();
  piece_bytes_ = StagingFor(members).chunk_bytes / members / kPieceAlign * kPieceAlign;
  cut_.Reset(*batch_, piece_bytes_ / element_bytes_);
  chunks_ = cut_.chunks();
  contributes_ = !IsAbsent(*batch_, set_->my_index());
  const int64_t result_bytes = OutputCount(*batch_, batch_->segments[0]) * element_bytes_;
  streams_out_ = result_bytes >= kLargeResultBytes;
}

/// An alltoall's split is known to its two ranks alone. Its last message is the first that is not
/// full, be it empty: so each message is expected by its receiver, who sees if they disagree.
bool MpiOperation::EndsEmpty(std::span<const int64_t> splits, int member, int64_t chunk) const {
  return batch_->kind == OpKind::kAlltoall &&
         splits[static_cast<size_t>(member)] == chunk * (piece_bytes_ / element_bytes_);
}

Status MpiOperation::PostPieces(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  for (int from = 0; from < set_->members(); ++from) {
    const bool empty = cut_.Taken(from, chunk).count == 0;
    if (from == set_->my_index() || IsAbsent(*batch_, from)) continue;
    if (empty && !EndsEmpty(batch_->receives, from, chunk)) continue;
    // Room for the longest: what comes may be more than is expected.
    FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kContribution, from,
                                            slot.inbox + from * set_->inbox_bytes(), piece_bytes_));
  }
  return Status();
}

Status MpiOperation::CheckPieces(int64_t chunk) {
  if (batch_->kind != OpKind::kAlltoall) return Status();
  for (int from = 0; from < set_->members(); ++from) {
    if (from == set_->my_index()) continue;
    const int64_t came = set_->BytesFrom(from);
    if (came == cut_.Taken(from, chunk).count * element_bytes_) continue;
    const int64_t expected = batch_->receives[static_cast<size_t>(from)] * element_bytes_;
    const std::string me = std::to_string(batch_->ranks[static_cast<size_t>(set_->my_index())]);
    const int64_t sent = chunk * piece_bytes_ + came;
    return Internal("alltoall: rank " + std::to_string(batch_->ranks[static_cast<size_t>(from)]) +
                    " sends rank " + me + (came == piece_bytes_ ? " at least " : " ") +
                    std::to_string(sent) + " bytes, rank " + me + " expects " +
                    std::to_string(expected));
  }
  return Status();
}

/// What stays on this rank goes straight from tensor to tensor, unless it is reduced.
Status MpiOperation::SendPieces(int64_t chunk) {
  const int me = set_->my_index();
  const bool gathers = batch_->kind == OpKind::kAllgather;
  if (!Reduces(batch_->kind)) CopyPiece(cut_.Taken(me, chunk), In(cut_.Sent(me, chunk).begin));
  const std::byte* packed = gathers ? PackPiece(kForAll, chunk) : nullptr;
  // Starting after itself, each rank hits another peer first.
  for (int step = 1; step < set_->members(); ++step) {
    const int to = (me + step) % set_->members();
    const int64_t count = cut_.Sent(to, chunk).count;
    if (count == 0 && !EndsEmpty(batch_->sends, to, chunk)) continue;
    if (!gathers) packed = PackPiece(to, chunk);
    FARANDOLE_RETURN_IF_ERROR(
        set_->Send(set_->SlotOf(chunk), Round::kContribution, to, packed, count * element_bytes_));
  }
  return Status();
}

const std::byte* MpiOperation::PackPiece(int to, int64_t chunk) {
  const Piece piece = cut_.Sent(to, chunk);
  std::byte* const packed = set_->SlotOf(chunk).packed + to * piece_bytes_;
  if (piece.count == 0) return packed;
  const double prescale = Reduces(batch_->kind) ? batch_->prescale : 1.0;
  set_->bulk().kernels->Pack(packed, travel_, In(piece.begin), batch_->dtype, piece.count,
                             prescale);
  set_->bulk().Count(Counter::kBytesCopied, piece.count * element_bytes_);
  return packed;
}

void MpiOperation::TakePieces(int64_t chunk) {
  if (batch_->kind == OpKind::kReducescatter) return ReduceOwnPiece(chunk);
  const MpiSlot& slot = set_->SlotOf(chunk);
  for (int from = 0; from < set_->members(); ++from) {
    if (from == set_->my_index()) continue;
    CopyPiece(cut_.Taken(from, chunk), slot.inbox + from * set_->inbox_bytes());
  }
}

void MpiOperation::CopyPiece(Piece piece, const std::byte* from) {
  if (batch_->segments[0].out == nullptr || piece.count == 0) return;
  const int64_t bytes = piece.count * element_bytes_;
  set_->bulk().Count(Counter::kBytesCopied, bytes);
  if (streams_out_) return set_->bulk().kernels->Stream(Out(piece.begin), from, bytes);
  set_->bulk().kernels->Unpack(Out(piece.begin), travel_, from, travel_, piece.count);
}

/// From the inbox, and from the own tensor, straight into the result, without leaving the cache.
void MpiOperation::ReduceOwnPiece(int64_t chunk) {
  if (batch_->segments[0].out == nullptr) return;
  const CpuKernels& kernels = *set_->bulk().kernels;
  MpiSlot& slot = set_->SlotOf(chunk);
  const Piece own = cut_.Sent(set_->my_index(), chunk);
  const Piece piece = cut_.Taken(set_->my_index(), chunk);
  const bool widens = travel_ != batch_->dtype;
  for (int64_t at = 0; at < piece.count;) {
    const int64_t count = std::min(kInCacheBytes / element_bytes_, piece.count - at);
    const void* contribution = contributes_ ? In(own.begin + at) : nullptr;
    if (contributes_ && casts_) {
      kernels.Pack(slot.packed + set_->my_index() * piece_bytes_, travel_, contribution,
                   batch_->dtype, count, batch_->prescale);
      contribution = slot.packed + set_->my_index() * piece_bytes_;
    }
    std::byte* const out = Out(piece.begin + at);
    std::byte* const result = widens ? slot.result : out;
    kernels.Reduce(result, Sources(slot, at, contribution), count,
                   {travel_, batch_->op, set_->members(), batch_->postscale});
    if (widens) kernels.Unpack(out, batch_->dtype, result, travel_, count);
    at += count;
  }
  set_->bulk().Count(Counter::kBytesCopied, piece.count * element_bytes_);
}

const std::byte* MpiOperation::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* MpiOperation::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

}  // namespace farandole
