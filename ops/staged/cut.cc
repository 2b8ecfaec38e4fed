#include "ops/staged/cut.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace farandole {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

void Add(std::vector<StagedRun>& runs, const StagedRun& run) {
  if (run.count > 0) runs.push_back(run);
}

}  // namespace

Status StagedCut::Begin(const Batch& batch, int64_t slot_bytes) {
  batch_ = &batch;
  next_ = 0;
  room_ = slot_bytes / SizeOf(TravelDType(batch));
  int64_t at_once = room_;  // of batch.count
  if (IsVariableSize(batch.kind)) {
    const auto members = static_cast<int64_t>(batch.ranks.size());
    room_ /= 2;
    // A share of each part may be one element more than its fraction.
    at_once = batch.kind == OpKind::kAlltoall ? room_ / members : room_ - members;
    if (at_once <= 0) {
      return ResourceExhausted(std::string(Name(batch.kind)) + " among " + std::to_string(members) +
                               " ranks: staging slots of " + std::to_string(slot_bytes) +
                               " bytes are too small for as many");
    }
  } else {
    cursor_ = SegmentCursor(batch.segments, batch.dtype);
  }
  pieces_ = CeilDivide(batch.count, at_once);
  return {};
}

void StagedCut::Next(StagedPiece& piece) {
  piece.down.clear();
  piece.up.clear();
  piece.parts.clear();
  piece.sends.clear();
  piece.receives.clear();
  piece.in_count = piece.out_count = 0;
  piece.out_begin = IsVariableSize(batch_->kind) ? room_ : 0;
  switch (batch_->kind) {
    case OpKind::kReducescatter:
      NextOfScatter(piece);
      break;
    case OpKind::kAllgather:
      NextOfGather(piece);
      break;
    case OpKind::kAlltoall:
      NextOfExchange(piece);
      break;
    default:
      NextOfTensors(piece);
      break;
  }
  ++next_;
}

bool StagedCut::IsRoot() const {
  return batch_->kind == OpKind::kBroadcast && batch_->my_index == batch_->root_index;
}

void StagedCut::NextOfTensors(StagedPiece& piece) {
  const bool broadcast = batch_->kind == OpKind::kBroadcast;
  piece.gives = broadcast ? IsRoot() : !IsAbsent(*batch_, batch_->my_index);
  piece.takes = piece.gives;
  piece.count = std::min(room_, batch_->count - next_ * room_);
  for (int64_t at = 0; at < piece.count;) {
    const Run run = cursor_.Next(piece.count - at);
    if (piece.gives) Add(piece.down, {run.in, nullptr, at, run.count});
    if (run.out != nullptr && !IsRoot()) Add(piece.up, {nullptr, run.out, at, run.count});
    piece.takes = piece.takes || run.out != nullptr;
    at += run.count;
  }
  piece.in_count = piece.out_count = piece.count;
}

// Monotonous in `total`, so that the share of the largest is the largest.
StagedCut::Share StagedCut::ShareOf(int64_t total) const {
  const int64_t each = total / pieces_;
  const int64_t rest = total % pieces_;
  return {next_ * each + std::min(next_, rest), each + (next_ < rest ? 1 : 0)};
}

const std::byte* StagedCut::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments.front().in) +
         element * SizeOf(batch_->dtype);
}

std::byte* StagedCut::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments.front().out) + element * SizeOf(batch_->dtype);
}

void StagedCut::NextOfScatter(StagedPiece& piece) const {
  piece.gives = !IsAbsent(*batch_, batch_->my_index);
  int64_t part_begin = 0;
  for (const int64_t part : batch_->splits) {
    const Share share = ShareOf(part);
    if (piece.gives) {
      Add(piece.down, {In(part_begin + share.begin), nullptr, piece.in_count, share.count});
    }
    piece.parts.push_back(share.count);
    piece.in_count += share.count;
    part_begin += part;
  }
  piece.count = piece.in_count;
  const Share mine = ShareOf(batch_->splits[static_cast<size_t>(batch_->my_index)]);
  piece.out_count = mine.count;
  piece.takes = batch_->segments.front().out != nullptr;
  if (piece.takes) Add(piece.up, {nullptr, Out(mine.begin), 0, mine.count});
}

void StagedCut::NextOfGather(StagedPiece& piece) const {
  const Share mine = ShareOf(batch_->splits[static_cast<size_t>(batch_->my_index)]);
  piece.gives = mine.count > 0;
  if (piece.gives) Add(piece.down, {In(mine.begin), nullptr, 0, mine.count});
  piece.in_count = mine.count;
  piece.takes = batch_->segments.front().out != nullptr;
  int64_t part_begin = 0;
  for (const int64_t part : batch_->splits) {
    const Share share = ShareOf(part);
    if (piece.takes) {
      Add(piece.up, {nullptr, Out(part_begin + share.begin), piece.out_count, share.count});
    }
    piece.parts.push_back(share.count);
    piece.out_count += share.count;
    part_begin += part;
  }
  piece.count = piece.out_count;
}

void StagedCut::NextOfExchange(StagedPiece& piece) const {
  const auto me = static_cast<size_t>(batch_->my_index);
  const Segment& segment = batch_->segments.front();
  piece.takes = segment.out != nullptr;
  piece.gives = segment.in != nullptr;
  piece.count = ShareOf(batch_->count).count;
  int64_t send_begin = 0;
  int64_t receive_begin = 0;
  for (size_t member = 0; member < batch_->sends.size(); ++member) {
    const Share sent = member == me ? Share() : ShareOf(batch_->sends[member]);
    const Share received = member == me ? Share() : ShareOf(batch_->receives[member]);
    if (piece.gives) {
      Add(piece.down, {In(send_begin + sent.begin), nullptr, piece.in_count, sent.count});
    }
    if (piece.takes) {
      Add(piece.up,
          {nullptr, Out(receive_begin + received.begin), piece.out_count, received.count});
    }
    piece.sends.push_back(sent.count);
    piece.receives.push_back(received.count);
    piece.in_count += sent.count;
    piece.out_count += received.count;
    send_begin += batch_->sends[member];
    receive_begin += batch_->receives[member];
  }
}

void StagedCut::Stays(std::vector<DeviceMove>& moves) const {
  moves.clear();
  if (IsRoot()) {
    for (const Segment& segment : batch_->segments) {
      if (segment.out == nullptr || segment.out == segment.in || segment.count == 0) continue;
      moves.push_back({segment.in, segment.out, segment.count});
    }
  }
  if (batch_->kind != OpKind::kAlltoall || batch_->segments.front().out == nullptr) return;
  const auto me = static_cast<size_t>(batch_->my_index);
  if (batch_->sends[me] == 0) return;
  const auto before = [me](std::span<const int64_t> counts) {
    return std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(me),
                           int64_t{0});
  };
  moves.push_back({In(before(batch_->sends)), Out(before(batch_->receives)), batch_->sends[me]});
}

}  // namespace farandole
