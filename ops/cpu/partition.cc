#include "ops/cpu/partition.h"

#include <algorithm>

namespace farandole {
namespace {

/// Splits of these counts, one after the other from element 0.
void LayEndToEnd(std::span<const int64_t> counts, std::vector<Slice>& splits) {
  splits.clear();
  int64_t begin = 0;
  for (const int64_t count : counts) {
    splits.push_back({begin, count});
    begin += count;
  }
}

}  // namespace

Slice ShardOf(int64_t count, int owners, int owner, int64_t align) {
  const int64_t each = (count + owners - 1) / owners;
  const int64_t aligned = (each + align - 1) / align * align;
  const int64_t begin = std::min(count, owner * aligned);
  return {begin, std::min(count, begin + aligned) - begin};
}

/// The number of chunks comes from what all members know: the longest split, of an alltoall the
/// batch's count. Full chunks are counted from the own splits; they only select what is timed.
void Partition::Reset(const Batch& batch, int64_t slice_elements) {
  int64_t longest = batch.count;
  if (batch.kind == OpKind::kAlltoall) {
    LayEndToEnd(batch.sends, sent_);
    LayEndToEnd(batch.receives, received_);
  } else {
    // An allgather sends its one split to every member, a reducescatter receives its one from every
    // member: there all slices begin at 0 of that side's tensor.
    const bool gathers = batch.kind == OpKind::kAllgather;
    const int64_t mine = batch.splits[static_cast<size_t>(batch.my_index)];
    LayEndToEnd(batch.splits, gathers ? received_ : sent_);
    (gathers ? sent_ : received_).assign(batch.splits.size(), {0, mine});
    longest = *std::max_element(batch.splits.begin(), batch.splits.end());
  }
  slice_elements_ = slice_elements;
  longest_slice_ = std::min(longest, slice_elements);
  chunks_ = (longest + slice_elements - 1) / slice_elements;
  int64_t shortest = longest;
  for (const auto* splits : {&sent_, &received_}) {
    for (const Slice& split : *splits) shortest = std::min(shortest, split.count);
  }
  full_chunks_ = shortest / slice_elements;
}

Slice Partition::SliceOf(const std::vector<Slice>& splits, int member, int64_t chunk) const {
  const Slice& split = splits[static_cast<size_t>(member)];
  const int64_t before = std::min(split.count, chunk * slice_elements_);
  return {split.begin + before, std::min(split.count - before, slice_elements_)};
}

}  // namespace farandole
