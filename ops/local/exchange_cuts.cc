// Allgather, reducescatter and alltoall: one piece for each member, in one round.
#include <algorithm>

#include "ops/local/exchange.h"

namespace farandole {
namespace {

/// Pieces start at multiples of this, so that two of them never share a cache line.
constexpr int64_t kPieceAlign = 64;

}  // namespace

/// Chunks are as many as the longest part of all needs, so alike on all members.
void Exchange::BeginCut() {
  const int members = slots_.layout().members;
  chunk_elements_ = slots_.layout().slot_bytes / members / kPieceAlign * kPieceAlign / wire_bytes_;
  int64_t longest = batch_->count;
  if (batch_->kind == OpKind::kAlltoall) {
    LayEndToEnd(batch_->sends, sent_);
    LayEndToEnd(batch_->receives, taken_);
  } else {
    const bool gathers = batch_->kind == OpKind::kAllgather;
    longest = *std::max_element(batch_->parts.begin(), batch_->parts.end());
    LayEndToEnd(batch_->parts, gathers ? taken_ : sent_);
    const int64_t mine = batch_->parts[static_cast<size_t>(slots_.my_index())];
    std::vector<Range>& alike = gathers ? sent_ : taken_;
    std::fill(alike.begin(), alike.end(), Range{0, mine});
  }
  end_ = first_ + static_cast<uint64_t>(ChunksOf(longest));
  step_bytes_ = std::min(longest, chunk_elements_) * wire_bytes_ * members;
}

void Exchange::LayEndToEnd(std::span<const int64_t> counts, std::vector<Range>& parts) {
  int64_t end = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t begin = end;
    end += counts[i];
    parts[i] = {begin, end};
  }
}

bool Exchange::AdvanceCut() {
  if (consumed_ < packed_ && slots_.AllReached(Stage::kPacked, consumed_ + 1, present_)) {
    TakePieces();
    slots_.Publish(Stage::kReduced, ++reduced_);
    slots_.Publish(Stage::kConsumed, ++consumed_);
  } else if (packed_ < end_ && SlotIsFree()) {
    if (contributes_) WritePieces();
    slots_.Publish(Stage::kPacked, ++packed_);
  } else {
    return false;
  }
  slots_.RingPeers();
  return true;
}

/// What stays on this rank goes straight from tensor to tensor, unless it has to be rounded first.
void Exchange::WritePieces() {
  const bool reduces = batch_->kind == OpKind::kReducescatter;
  if (!reduces) CopyOwnPiece();
  if (batch_->kind == OpKind::kAllgather) return WritePiece(kForAll);
  for (int to = 0; to < slots_.layout().members; ++to) {
    if (to != slots_.my_index() || (reduces && !reads_input_)) WritePiece(to);
  }
}

void Exchange::WritePiece(int to) {
  const Range piece = PieceOf(sent_[static_cast<size_t>(to)], packed_);
  if (piece.begin == piece.end) return;
  std::byte* const slot = slots_.Slot(slots_.my_index(), packed_);
  WriteSlot(slot + to * chunk_elements_ * wire_bytes_,
            {In(piece.begin), nullptr, piece.end - piece.begin});
}

void Exchange::CopyOwnPiece() {
  const auto me = static_cast<size_t>(slots_.my_index());
  const Range from = PieceOf(sent_[me], packed_);
  CopyPiece(PieceOf(taken_[me], packed_), In(from.begin));
}

void Exchange::TakePieces() {
  if (batch_->kind == OpKind::kReducescatter) return ReduceOwnPiece();
  const int me = slots_.my_index();
  const int place = batch_->kind == OpKind::kAllgather ? kForAll : me;
  for (const int from : present_) {
    if (from == me) continue;
    const std::byte* const slot = slots_.Slot(from, consumed_);
    CopyPiece(PieceOf(taken_[static_cast<size_t>(from)], consumed_),
              slot + place * chunk_elements_ * wire_bytes_);
  }
}

void Exchange::CopyPiece(Range piece, const std::byte* from) {
  if (batch_->segments[0].out == nullptr || piece.begin == piece.end) return;
  kernels_.Unpack(Out(piece.begin), wire_, from, wire_, piece.end - piece.begin);
}

/// From the slots, and from the own tensor, straight into the result.
void Exchange::ReduceOwnPiece() {
  if (batch_->segments[0].out == nullptr) return;
  const auto me = static_cast<size_t>(slots_.my_index());
  const Range own = PieceOf(sent_[me], consumed_);
  const Range piece = PieceOf(taken_[me], consumed_);
  const bool casts = wire_ != batch_->dtype;
  for (int64_t at = 0; at < piece.end - piece.begin;) {
    const int64_t count = std::min(kInCacheBytes / wire_bytes_, piece.end - piece.begin - at);
    const std::span<const void*> sources =
        Sources(consumed_, slots_.my_index() * chunk_elements_ + at);
    if (reads_input_) sources[own_source_] = In(own.begin + at);
    std::byte* const out = Out(piece.begin + at);
    std::byte* const result = casts ? scratch_.data() : out;
    kernels_.Reduce(result, sources, count, spec_);
    if (casts) kernels_.Unpack(out, batch_->dtype, result, wire_, count);
    at += count;
  }
}

Exchange::Range Exchange::PieceOf(Range part, uint64_t chunk) const {
  const int64_t begin = part.begin + static_cast<int64_t>(chunk - first_) * chunk_elements_;
  return {std::min(part.end, begin), std::min(part.end, begin + chunk_elements_)};
}

const std::byte* Exchange::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments[0].in) + element * SizeOf(batch_->dtype);
}

std::byte* Exchange::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments[0].out) + element * SizeOf(batch_->dtype);
}

}  // namespace farandole
