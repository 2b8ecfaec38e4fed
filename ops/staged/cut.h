// How a batch is cut into pieces of one staging slot. Pure.
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

/// One piece, as this rank sees it, and the batch that takes it through the host.
///
/// What goes down lies at the slot's begin, what comes up at `out_begin`: at the same place where
/// tensors are not cut, in the slot's second half where they are. Numbers count elements of the
/// type that travels.
struct StagedPiece {
  std::vector<StagedRun> down, up;
  int64_t in_count = 0;
  int64_t out_begin = 0;
  int64_t out_count = 0;
  bool gives = false;  ///< The host batch has an input, ...
  bool takes = false;  ///< ... and an output.
  int64_t count = 0;   ///< These four are the host batch's: see Batch.
  std::vector<int64_t> parts, sends, receives;
};

/// Cuts one batch after the other. All members cut a batch into as many pieces.
///
/// Tensors that are not cut lie end to end; a piece takes the next of their elements. Of an
/// allgather and a reducescatter each piece takes the same share of every part, of an alltoall of
/// what any member sends to any other, so that all ranks have as much to do in all pieces.
///
/// Thread safety: none. Lifetime: the batch outlives its cutting.
class StagedCut {
 public:
  /// @return ResourceExhausted if a slot of that size is too small for so many ranks.
  Status Begin(const Batch& batch, int64_t slot_bytes);
  int64_t pieces() const { return pieces_; }
  /// The pieces in turn; `piece` is written anew.
  void Next(StagedPiece& piece);
  /// What need not travel: a broadcast at its root, an alltoall's own piece.
  void Stays(std::vector<DeviceMove>& moves) const;

 private:
  struct Share {
    int64_t begin = 0;
    int64_t count = 0;
  };
  Share ShareOf(int64_t total) const;
  void NextOfTensors(StagedPiece& piece);
  void NextOfScatter(StagedPiece& piece) const;
  void NextOfGather(StagedPiece& piece) const;
  void NextOfExchange(StagedPiece& piece) const;
  bool IsRoot() const;
  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;

  const Batch* batch_ = nullptr;
  int64_t room_ = 0;  // elements of a piece, in or out
  int64_t pieces_ = 0;
  int64_t next_ = 0;      // number of the piece
  SegmentCursor cursor_;  // of tensors that are not cut
};

}  // namespace farandole
