// How the data of a collective is divided into messages: into chunks, the shard of a chunk each
// member is responsible for, or the rounds of a small one, and who sends what to whom. Pure, so
// that all members compute the same. The kinds of variable size: see Partition.
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
  int64_t slice_bytes;  ///< Variable-size collectives: what one member sends another with a chunk.
};
StagingSize StagingFor(int members);

/// The chunks of an allreduce or broadcast. Two shapes share one state machine:
/// - allreduce: member i is responsible for shard i of every chunk; contributions are scattered,
///   results gathered. 2 (P-1)/P of the data leaves each rank: bandwidth optimal.
/// - broadcast: only the root contributes; the others are responsible for a shard each and pass it
///   on, so the root sends the data once in all. Tiny ones go from the root to every member
///   directly.
/// Source of scatter + allgather: Rabenseifner, "Optimization of collective reduction operations",
/// ICCS 2004, doi:10.1007/978-3-540-24685-5_1; van de Geijn's broadcast has the same shape.
///
/// Thread safety: a value.
class ChunkPlan {
 public:
  /// `batch`, an allreduce or broadcast, must have passed CheckBatch and have two members or more;
  /// it is not kept.
  void Reset(const Batch& batch);

  int members() const { return members_; }
  int64_t chunks() const { return chunks_; }
  /// Elements of chunk `chunk`.
  int64_t CountOf(int64_t chunk) const;
  /// What `member` is responsible for in a chunk of `count` elements; may be empty.
  Slice ShardOf(int member, int64_t count) const;
  /// Whether `from`, having completed its shard, sends it to `to`.
  bool Forwards(int from, int to) const { return sharded_ && from != to && to != root_; }

 private:
  bool is_broadcast() const { return root_ >= 0; }

  int64_t count_ = 0;
  int64_t chunk_count_ = 0;
  int64_t chunks_ = 0;
  int64_t align_ = 1;    // elements at whose multiples shards start
  int root_ = -1;        // broadcast only
  bool sharded_ = true;  // shards are disjoint, and sent on; otherwise each is the whole chunk
  int members_ = 0;
};

/// How a small allreduce or allgather brings what every member contributes to all members: every
/// member keeps it in the order of the members from itself on, around the ring, so that what it has
/// is always the first blocks. In a round that begins with `n` of them it gets as many from each of
/// up to `ports` others: those n, 2n, ... places after it send their first n blocks, which are its
/// next ones. So n grows by a factor of ports + 1. With a port for each other member there is one
/// round: everybody sends to everybody. In larger sets there is one port, and ceil(log2 P) rounds.
/// Source: the concatenation of Bruck et al., "Efficient algorithms for all-to-all communications
/// in multiport message-passing systems", IEEE TPDS 8(11), 1997, doi:10.1109/71.642949.
///
/// Thread safety: none. Reset does not allocate once it has seen the largest set.
class GatherPlan {
 public:
  /// Bytes [begin, begin + bytes) of what is gathered, sent to or received from `peer`; none: there
  /// is no message.
  struct Message {
    int peer = 0;
    int64_t begin = 0;
    int64_t bytes = 0;
  };

  /// Whether `batch`, of any kind, is to be run so; alike on all members.
  static bool Suits(const Batch& batch);

  /// `batch`, an allreduce or allgather, must have passed CheckBatch and have two members or more;
  /// it is not kept.
  void Reset(const Batch& batch);

  int rounds() const { return rounds_; }
  int ports() const { return ports_; }
  /// Through one of the ports, counted from 0. In all rounds together there is at most one message
  /// from any member to any other.
  Message Sent(int64_t round, int port) const;
  Message Received(int64_t round, int port) const;
  /// Where what `member` contributes lies, in bytes; empty if it is absent.
  Slice BlockOf(int member) const;

 private:
  /// How far the ends of a message are apart, in places, and how many blocks it has.
  struct Reach {
    int distance = 0;
    int count = 0;
  };

  int members() const { return static_cast<int>(begins_.size()) - 1; }
  Reach ReachOf(int64_t round, int port) const;
  /// In bytes.
  Slice Blocks(int first, int count) const;

  int my_index_ = 0;
  int ports_ = 1;
  int rounds_ = 0;
  std::vector<int64_t> begins_;  // of each block in bytes, and the end, by place after this member
};

}  // namespace farandole
