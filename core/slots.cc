#include "core/slots.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>

namespace farandole {
namespace {

/// Of the lowest node that holds both, which have no slot in common.
int JointLevel(SlotRange a, SlotRange b) {
  const auto differing = static_cast<unsigned>(a.begin) ^ static_cast<unsigned>(b.begin);
  return static_cast<int>(std::bit_width(differing));
}

}  // namespace

std::vector<SlotRange> SlotRanges(int slots, int ranks) {
  std::vector<SlotRange> ranges = {{0, slots}};
  while (std::ssize(ranges) < ranks) {
    const auto largest = std::ranges::max_element(ranges, {}, &SlotRange::count);
    // The left child is complete, and so as large as any power of two below the count can be.
    const int end = largest->end;
    const auto left = static_cast<int>(std::bit_floor(static_cast<unsigned>(largest->count() - 1)));
    largest->end = largest->begin + left;
    ranges.insert(largest + 1, {largest->end, end});
  }
  return ranges;
}

bool IsSlotNode(SlotRange range, int slots) {
  const auto whole = static_cast<int>(std::bit_ceil(static_cast<unsigned>(range.count())));
  return range.begin % whole == 0 && (range.count() == whole || range.end == slots);
}

/// Between two neighbours on the stack is a joint; they are merged before a joint of a higher level
/// comes. In a binary tree no two joints of a level are neighbours, so levels fall from the bottom
/// of the stack to its top.
void FindMerges(std::span<const SlotRange> nodes, std::span<const int> present,
                std::vector<uint8_t>& merges) {
  merges.clear();
  std::array<int, kMostSlotLevels + 1> joints{};
  size_t depth = 0;
  bool in_order = true;
  for (size_t k = 0; k < present.size(); ++k) {
    const auto node = [&](size_t i) { return nodes[static_cast<size_t>(present[i])]; };
    const bool is_last = k + 1 == present.size();
    const int next = is_last ? kMostSlotLevels + 1 : JointLevel(node(k), node(k + 1));
    uint8_t count = 0;
    for (; depth > 0 && joints[depth - 1] < next; --depth) ++count;
    joints[depth++] = next;
    merges.push_back(count);
    in_order = in_order && count == (k > 0 ? 1 : 0);
  }
  if (in_order) merges.clear();
}

}  // namespace farandole
