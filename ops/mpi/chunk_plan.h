// How an allreduce or broadcast is divided: into chunks, the shard of a chunk each member is
// responsible for, and who sends what to whom. Pure, so that all members compute the same. The
// other kinds: see Partition.
//
// Three shapes share one state machine:
// - one-shot (tiny allreduce): every member is responsible for the whole chunk; contributions go to
//   all, every member reduces, and there are no results to send. One round.
// - sharded (allreduce): member i is responsible for shard i of every chunk; contributions are
//   scattered, results gathered. 2 (P-1)/P of the data leaves each rank: bandwidth optimal.
// - broadcast: only the root contributes; the others are responsible for one shard each and pass it
//   on, so the root sends the data once in all. Tiny ones go from the root to every member
//   directly.
// Source of scatter + allgather: Rabenseifner, "Optimization of collective reduction operations",
// ICCS 2004, doi:10.1007/978-3-540-24685-5_1; van de Geijn's broadcast has the same shape.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cpu/partition.h"
#include "ops/data_plane.h"

namespace farandole {

/// Sizes of the staging memory that any batch of a set of `members` fits in.
struct StagingSize {
  int64_t chunk_bytes;  ///< Of packed contributions, and of results.
  int64_t inbox_bytes;  ///< Contributions from one other member.
};
StagingSize StagingFor(int members);

/// Thread safety: none. Reset does not allocate once it has seen the largest set.
class ChunkPlan {
 public:
  /// `batch`, an allreduce or broadcast, must have passed CheckBatch and have two members or more;
  /// it is not kept.
  void Reset(const Batch& batch);

  int members() const { return static_cast<int>(contributes_.size()); }
  int64_t chunks() const { return chunks_; }
  /// Elements of chunk `chunk`.
  int64_t CountOf(int64_t chunk) const;
  /// What `member` is responsible for in a chunk of `count` elements; may be empty.
  Slice ShardOf(int member, int64_t count) const;
  /// Whether `member` sends its contribution to those responsible.
  bool Contributes(int member) const { return contributes_[static_cast<size_t>(member)] != 0; }
  /// Whether `from`, having completed its shard, sends it to `to`.
  bool Forwards(int from, int to) const { return forwards_ && from != to && to != root_; }
  bool is_broadcast() const { return root_ >= 0; }
  /// Whether a member reduces its own shard alone, rather than everything or nothing.
  bool ReducesOwnShard() const { return sharded_ && !is_broadcast(); }

 private:
  int64_t count_ = 0;
  int64_t chunk_count_ = 0;
  int64_t chunks_ = 0;
  int64_t align_ = 1;     // elements in a cache line
  int root_ = -1;         // broadcast only
  bool sharded_ = true;   // shards are disjoint; otherwise each is the whole chunk
  bool forwards_ = true;  // shards are sent on
  std::vector<char> contributes_;
};

}  // namespace farandole
