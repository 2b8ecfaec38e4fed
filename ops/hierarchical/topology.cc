#include "ops/hierarchical/topology.h"

#include <algorithm>

namespace farandole {

Topology::Topology(std::span<const int> ranks, int my_index, std::span<const int> memory) {
  std::vector<int> names;  // by number of the host
  for (size_t p = 0; p < ranks.size(); ++p) {
    const int name = memory[static_cast<size_t>(ranks[p])];
    auto found = name < 0 ? names.end() : std::find(names.begin(), names.end(), name);
    const auto number = static_cast<size_t>(found - names.begin());
    if (found == names.end()) {
      names.push_back(name);
      host.emplace_back();
    }
    host_of.push_back(static_cast<int>(number));
    host[number].push_back(static_cast<int>(p));
  }
  my_host = host_of[static_cast<size_t>(my_index)];
  my_local = static_cast<int>(std::ranges::find(mine(), my_index) - mine().begin());
  shards = static_cast<int>(std::ranges::min_element(host, {}, &std::vector<int>::size)->size());
}

}  // namespace farandole
