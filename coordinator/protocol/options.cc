#include "coordinator/protocol/options.h"

#include <algorithm>

namespace farandole {

std::vector<uint8_t> NegotiationOptions::PlanesOf(std::span<const int32_t> ranks) const {
  std::vector<uint8_t> chosen = planes;
  if (memory.empty()) return chosen;
  std::vector<int> shared;  // of the ranks that share any
  for (const int32_t r : ranks) {
    if (memory[static_cast<size_t>(r)] >= 0) shared.push_back(memory[static_cast<size_t>(r)]);
  }
  std::ranges::sort(shared);
  uint8_t& cpu = chosen[static_cast<size_t>(DeviceKind::kCpu)];
  if (shared.size() == ranks.size() && shared.front() == shared.back()) {
    cpu = memory_plane;
  } else if (std::ranges::adjacent_find(shared) != shared.end()) {
    cpu = hosts_plane;
  }
  return chosen;
}

}  // namespace farandole
