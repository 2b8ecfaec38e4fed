// Which members of a process set are on which host. Pure, so that all members compute the same.
#pragma once

#include <span>
#include <vector>

namespace farandole {

/// Thread safety: a value.
struct Topology {
  /// @param ranks   Of the set, ascending.
  /// @param memory  By global rank: equal and >= 0 for ranks that share memory. A rank without is a
  ///                host of its own.
  Topology(std::span<const int> ranks, int my_index, std::span<const int> memory);

  std::vector<int> host_of;            ///< By position in the set: the number of the host.
  std::vector<std::vector<int>> host;  ///< Positions on each host. In order of their first ones.
  int my_host = 0;
  int my_local = 0;  ///< Position among the members of my host.
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

}  // namespace farandole
