// Which piece of a batch that cuts its tensor goes from whom to whom, and with which chunk. Pure,
// so that all members compute the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {

/// Elements [begin, begin + count) of this rank's input or output.
struct Piece {
  int64_t begin = 0;
  int64_t count = 0;
};

/// Results of this size and more are written past the cache, which cannot hold them anyway.
inline constexpr int64_t kLargeResultBytes = 16 << 20;

/// With every chunk, each member sends at most one piece to each member: the next one of that
/// receiver's split of its input. There are as many chunks as the longest split needs.
///
/// Thread safety: none. Reset does not allocate once it has seen the largest set.
class CutPlan {
 public:
  /// @param batch           Of a kind that cuts tensors, checked (CheckBatch); not kept.
  /// @param piece_elements  The most that a piece holds, > 0; alike on all members.
  void Reset(const Batch& batch, int64_t piece_elements);

  int64_t chunks() const { return chunks_; }
  /// Chunks, from the first on, of which every piece that this rank sends or takes is full.
  int64_t full_chunks() const { return full_chunks_; }
  /// The most elements any piece of the batch holds.
  int64_t longest_piece() const { return longest_piece_; }
  /// What this rank sends to `member` with chunk `chunk`, of its input; may be empty. In an
  /// allgather the same to everybody.
  Piece Sent(int member, int64_t chunk) const { return Cut(sent_, member, chunk); }
  /// What comes from `member` with chunk `chunk`, as a piece of the output; may be empty. In a
  /// reducescatter the same from everybody, to be combined.
  Piece Taken(int member, int64_t chunk) const { return Cut(taken_, member, chunk); }

 private:
  Piece Cut(const std::vector<Piece>& splits, int member, int64_t chunk) const;

  int64_t piece_elements_ = 1;
  int64_t longest_piece_ = 0;
  int64_t chunks_ = 0;
  int64_t full_chunks_ = 0;
  std::vector<Piece> sent_;   // by receiver
  std::vector<Piece> taken_;  // by sender
};

}  // namespace farandole
