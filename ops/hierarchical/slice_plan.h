// Which members of a process set are on which host, and how a batch is divided among them. Pure, so
// that all members compute the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/cpu/partition.h"
#include "ops/data_plane.h"

namespace farandole {

/// Thread safety: a value.
struct Topology {
  /// @param ranks   Of the set, ascending.
  /// @param memory  By global rank: equal and >= 0 for ranks that share memory. A rank without is a
  ///                host of its own.
  Topology(std::span<const int> ranks, int my_index, std::span<const int> memory);

  std::vector<int> host_of;            ///< By index in the set: the number of the host.
  std::vector<std::vector<int>> host;  ///< Indices on each host. In order of their first ones.
  int my_host = 0;
  int my_local = 0;  ///< Index among the members of my host.
  int shards = 0;    ///< Members of the smallest host.

  const std::vector<int>& mine() const { return host[static_cast<size_t>(my_host)]; }
  bool alone() const { return mine().size() == 1; }
  bool has_shard() const { return my_local < shards; }
  /// Members of a host, relative to the mean of all hosts: the weight of its average. 1 if hosts
  /// have as many members.
  double WeightOf(size_t number) const {
    return static_cast<double>(host[number].size() * host.size()) /
           static_cast<double>(host_of.size());
  }
};

/// The slots of members that are neighbours: those of a host, where such a batch is composed.
SlotRange SlotsOf(const Batch& batch, std::span<const int> members);

/// How a batch is run: on the flat plane, by collectives of several planes, or by OneShotAllreduce.
enum class Path : uint8_t { kFlat, kComposed, kOneShot };
Path PathOf(const Batch& batch, const Topology& topology);

/// The slices of a batch, and in which order a host works on them.
///
/// All members of a host start the same collectives in the same order, one at a time: the
/// reduce-scatters of the first kAhead slices, then an allgather and a reduce-scatter in turn,
/// which depends on the number of slices alone. Thread safety: a value.
class SlicePlan {
 public:
  /// Slices whose shards lie in memory at a time. With two the link would wait whenever a host is
  /// late with the slice after the one that travels.
  static constexpr int64_t kAhead = 3;
  enum class Next : uint8_t { kScatter, kGather, kNothing };

  SlicePlan() = default;
  /// Of `count` elements, at most `shard_elements` in each of the topology's shards.
  SlicePlan(int64_t count, int64_t shard_elements, const Topology& topology)
      : count_(count), slice_(shard_elements * topology.shards), shards_(topology.shards) {}
  /// Bytes of a shard. A message between hosts is what one host reduces of a shard, so shards are
  /// longer than `least_bytes` where hosts are many; but at most 4 times as long, and less on hosts
  /// of many members, each of which packs whole slices.
  static int64_t ShardBytes(int64_t least_bytes, const Topology& topology);

  int64_t slices() const { return (count_ + slice_ - 1) / slice_; }
  int64_t CountOf(int64_t slice) const { return std::min(slice_, count_ - slice * slice_); }
  /// The shard, within a slice, of member `local` of a host; none if another host has fewer
  /// members.
  Slice ShardOf(int local, int64_t slice) const;
  /// What the host does after so many slices have passed each stage.
  Next After(int64_t scattered, int64_t crossed, int64_t gathered) const;

 private:
  int64_t count_ = 0;
  int64_t slice_ = 1;  // elements
  int shards_ = 1;
};

}  // namespace farandole
