#include <unordered_map>

#include "coordinator/negotiation.h"

namespace farandole {

std::vector<int> MakeTree(std::span<const int> host, int fan_out) {
  std::vector<int> parent(host.size(), -1);
  std::vector<int> leaders;  // in order of first appearance: rank 0's host is the heap's root
  std::unordered_map<int, int> leader_of;
  for (int rank = 0; rank < static_cast<int>(host.size()); ++rank) {
    const auto [it, first] = leader_of.emplace(host[static_cast<size_t>(rank)], rank);
    if (!first) {
      parent[static_cast<size_t>(rank)] = it->second;
      continue;
    }
    if (!leaders.empty()) {
      const auto position = static_cast<int>(leaders.size());
      parent[static_cast<size_t>(rank)] = leaders[static_cast<size_t>((position - 1) / fan_out)];
    }
    leaders.push_back(rank);
  }
  return parent;
}

}  // namespace farandole
