#include "ops/gpu/staged/slices.h"

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

Status StagedSlices::Begin(const Batch& batch, int64_t slot_bytes) {
  batch_ = &batch;
  next_ = 0;
  room_ = slot_bytes / SizeOf(TravelDType(batch));
  int64_t at_once = room_;  // of batch.count
  if (IsVariableSize(batch.kind)) {
    const auto members = static_cast<int64_t>(batch.ranks.size());
    room_ /= 2;
    // A share of each split may be one element more than its fraction.
    at_once = batch.kind == OpKind::kAlltoall ? room_ / members : room_ - members;
    if (at_once <= 0) {
      return ResourceExhausted(std::string(Name(batch.kind)) + " among " + std::to_string(members) +
                               " ranks: staging slots of " + std::to_string(slot_bytes) +
                               " bytes are too small for as many");
    }
  } else {
    cursor_ = SegmentCursor(batch.segments, batch.dtype);
  }
  count_ = CeilDivide(batch.count, at_once);
  return {};
}

void StagedSlices::Next(StagedSlice& slice) {
  slice.down.clear();
  slice.up.clear();
  slice.splits.clear();
  slice.sends.clear();
  slice.receives.clear();
  slice.in_count = slice.out_count = 0;
  slice.out_begin = IsVariableSize(batch_->kind) ? room_ : 0;
  switch (batch_->kind) {
    case OpKind::kReducescatter:
      NextOfReducescatter(slice);
      break;
    case OpKind::kAllgather:
      NextOfAllgather(slice);
      break;
    case OpKind::kAlltoall:
      NextOfAlltoall(slice);
      break;
    default:
      NextOfTensors(slice);
      break;
  }
  ++next_;
}

bool StagedSlices::IsRoot() const {
  return batch_->kind == OpKind::kBroadcast && batch_->my_index == batch_->root_index;
}

void StagedSlices::NextOfTensors(StagedSlice& slice) {
  const bool broadcast = batch_->kind == OpKind::kBroadcast;
  slice.gives = broadcast ? IsRoot() : !IsAbsent(*batch_, batch_->my_index);
  slice.takes = slice.gives;
  slice.count = std::min(room_, batch_->count - next_ * room_);
  for (int64_t at = 0; at < slice.count;) {
    const Run run = cursor_.Next(slice.count - at);
    if (slice.gives) Add(slice.down, {run.in, nullptr, at, run.count});
    if (run.out != nullptr && !IsRoot()) Add(slice.up, {nullptr, run.out, at, run.count});
    slice.takes = slice.takes || run.out != nullptr;
    at += run.count;
  }
  slice.in_count = slice.out_count = slice.count;
}

// Monotonous in `total`, so that the share of the largest is the largest.
StagedSlices::Share StagedSlices::ShareOf(int64_t total) const {
  const int64_t each = total / count_;
  const int64_t rest = total % count_;
  return {next_ * each + std::min(next_, rest), each + (next_ < rest ? 1 : 0)};
}

const std::byte* StagedSlices::In(int64_t element) const {
  return static_cast<const std::byte*>(batch_->segments.front().in) +
         element * SizeOf(batch_->dtype);
}

std::byte* StagedSlices::Out(int64_t element) const {
  return static_cast<std::byte*>(batch_->segments.front().out) + element * SizeOf(batch_->dtype);
}

void StagedSlices::NextOfReducescatter(StagedSlice& slice) const {
  slice.gives = !IsAbsent(*batch_, batch_->my_index);
  int64_t split_begin = 0;
  for (const int64_t split : batch_->splits) {
    const Share share = ShareOf(split);
    if (slice.gives) {
      Add(slice.down, {In(split_begin + share.begin), nullptr, slice.in_count, share.count});
    }
    slice.splits.push_back(share.count);
    slice.in_count += share.count;
    split_begin += split;
  }
  slice.count = slice.in_count;
  const Share mine = ShareOf(batch_->splits[static_cast<size_t>(batch_->my_index)]);
  slice.out_count = mine.count;
  slice.takes = batch_->segments.front().out != nullptr;
  if (slice.takes) Add(slice.up, {nullptr, Out(mine.begin), 0, mine.count});
}

void StagedSlices::NextOfAllgather(StagedSlice& slice) const {
  const Share mine = ShareOf(batch_->splits[static_cast<size_t>(batch_->my_index)]);
  slice.gives = mine.count > 0;
  if (slice.gives) Add(slice.down, {In(mine.begin), nullptr, 0, mine.count});
  slice.in_count = mine.count;
  slice.takes = batch_->segments.front().out != nullptr;
  int64_t split_begin = 0;
  for (const int64_t split : batch_->splits) {
    const Share share = ShareOf(split);
    if (slice.takes) {
      Add(slice.up, {nullptr, Out(split_begin + share.begin), slice.out_count, share.count});
    }
    slice.splits.push_back(share.count);
    slice.out_count += share.count;
    split_begin += split;
  }
  slice.count = slice.out_count;
}

void StagedSlices::NextOfAlltoall(StagedSlice& slice) const {
  const auto me = static_cast<size_t>(batch_->my_index);
  const Segment& segment = batch_->segments.front();
  slice.takes = segment.out != nullptr;
  slice.gives = segment.in != nullptr;
  slice.count = ShareOf(batch_->count).count;
  int64_t send_begin = 0;
  int64_t receive_begin = 0;
  for (size_t member = 0; member < batch_->sends.size(); ++member) {
    const Share sent = member == me ? Share() : ShareOf(batch_->sends[member]);
    const Share received = member == me ? Share() : ShareOf(batch_->receives[member]);
    if (slice.gives) {
      Add(slice.down, {In(send_begin + sent.begin), nullptr, slice.in_count, sent.count});
    }
    if (slice.takes) {
      Add(slice.up,
          {nullptr, Out(receive_begin + received.begin), slice.out_count, received.count});
    }
    slice.sends.push_back(sent.count);
    slice.receives.push_back(received.count);
    slice.in_count += sent.count;
    slice.out_count += received.count;
    send_begin += batch_->sends[member];
    receive_begin += batch_->receives[member];
  }
}

void StagedSlices::Stays(std::vector<DeviceMove>& moves) const {
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
