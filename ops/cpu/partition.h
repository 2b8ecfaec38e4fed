// Which slice of a variable-size collective goes from whom to whom, and with which chunk. Pure,
// so that all members compute the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {

/// Elements [begin, begin + count) of this rank's input or output, or of a chunk.
struct Slice {
  int64_t begin = 0;
  int64_t count = 0;
};

/// The shard of owner `owner` when `count` elements are divided among `owners`: shards are equally
/// long and start at multiples of `align` elements; the last ones may be shorter or empty.
Slice ShardOf(int64_t count, int owners, int owner, int64_t align);
/// An `align` with which no two shards share a cache line, whatever the size of an element.
inline constexpr int64_t kAnyElementAlign = 64;

/// Results of this size and more are written past the cache, which cannot hold them anyway.
inline constexpr int64_t kLargeResultBytes = 16 << 20;

/// With every chunk, each member sends at most one slice to each member: the next one of that
/// receiver's split of its input. There are as many chunks as the longest split needs.
///
/// Thread safety: none. Reset does not allocate once it has seen the largest set.
class Partition {
 public:
  /// @param batch           Of a variable-size collective, checked (CheckBatch); not kept.
  /// @param slice_elements  The most that a slice holds, > 0; equal on all members.
  void Reset(const Batch& batch, int64_t slice_elements);

  int64_t chunks() const { return chunks_; }
  /// Chunks, from the first on, of which every slice that this rank sends or receives is full.
  int64_t full_chunks() const { return full_chunks_; }
  /// The most elements any slice of the batch holds.
  int64_t longest_slice() const { return longest_slice_; }
  /// What this rank sends to `member` with chunk `chunk`, of its input; may be empty. In an
  /// allgather the same to every member.
  Slice Sent(int member, int64_t chunk) const { return SliceOf(sent_, member, chunk); }
  /// What comes from `member` with chunk `chunk`, as a slice of the output; may be empty. In a
  /// reducescatter the same from every member, to be reduced.
  Slice Received(int member, int64_t chunk) const { return SliceOf(received_, member, chunk); }

 private:
  Slice SliceOf(const std::vector<Slice>& splits, int member, int64_t chunk) const;

  int64_t slice_elements_ = 1;
  int64_t longest_slice_ = 0;
  int64_t chunks_ = 0;
  int64_t full_chunks_ = 0;
  std::vector<Slice> sent_;      // by receiver
  std::vector<Slice> received_;  // by sender
};

}  // namespace farandole
