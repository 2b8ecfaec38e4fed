// How a batch is divided into slices of one staging slot. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/data_plane.h"
#include "ops/device.h"

namespace farandole {

/// Elements that lie together in a tensor and in the slot.
struct StagedRun {
  const std::byte* in = nullptr;  ///< Where they come from; of what goes down.
  std::byte* out = nullptr;       ///< Where they go to; of what comes up.
  int64_t at = 0;                 ///< Elements from the begin of what goes down, or comes up.
  int64_t count = 0;
};

/// One slice, as this rank sees it, and the batch that takes it through the host.
///
/// What goes down lies at the slot's begin, what comes up at `out_begin`: at the same offset where
/// in and out are alike, in the second half of the slot of a variable-size collective. Numbers
/// count elements of the type that travels.
struct StagedSlice {
  std::vector<StagedRun> down, up;
  int64_t in_count = 0;
  int64_t out_begin = 0;
  int64_t out_count = 0;
  bool gives = false;  ///< The host batch has an input, ...
  bool takes = false;  ///< ... and an output.
  int64_t count = 0;   ///< These four are the host batch's: see Batch.
  std::vector<int64_t> splits, sends, receives;
};

/// Divides one batch after the other. All members divide a batch into as many slices.
///
/// Tensors of an allreduce or broadcast lie end to end; a slice takes the next of their elements.
/// Of an allgather and a reducescatter each slice takes the same share of every split, of an
/// alltoall of what any member sends to any other, so that all ranks have as much to do in all
/// slices.
///
/// Thread safety: none. Lifetime: the batch outlives its division.
class StagedSlices {
 public:
  /// @return ResourceExhausted if a slot of that size is too small for so many ranks.
  Status Begin(const Batch& batch, int64_t slot_bytes);
  int64_t count() const { return count_; }
  /// The slices in turn; `slice` is written anew.
  void Next(StagedSlice& slice);
  /// What need not travel: a broadcast at its root, an alltoall's own slice.
  void Stays(std::vector<DeviceMove>& moves) const;

 private:
  struct Share {
    int64_t begin = 0;
    int64_t count = 0;
  };
  Share ShareOf(int64_t total) const;
  void NextOfTensors(StagedSlice& slice);
  void NextOfReducescatter(StagedSlice& slice) const;
  void NextOfAllgather(StagedSlice& slice) const;
  void NextOfAlltoall(StagedSlice& slice) const;
  bool IsRoot() const;
  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;

  const Batch* batch_ = nullptr;
  int64_t room_ = 0;  // elements of a slice, in or out
  int64_t count_ = 0;
  int64_t next_ = 0;      // number of the slice
  SegmentCursor cursor_;  // of an allreduce or broadcast
};

}  // namespace farandole
