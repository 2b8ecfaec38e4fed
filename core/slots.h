// The slots of a job: parts of each step's work that do not depend on the number of ranks, and the
// binary tree in which their sums are added up.
//
// The tree is that over the numbers 0 to 2^k - 1, the least k that holds all slots; nodes are cut
// at the last slot. Each rank holds the slots of one node and contributes that node's sum; the sum
// of all ranks evaluates the rest of the tree. So its bits are the same for any number of ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace farandole {

/// A job has at most so many: 2^kMostSlotLevels.
inline constexpr int kMostSlotLevels = 16;
inline constexpr int kMostSlots = 1 << kMostSlotLevels;

/// Slots `begin` to `end` - 1.
struct SlotRange {
  int begin = 0;
  int end = 0;
  int count() const { return end - begin; }
  bool operator==(const SlotRange&) const = default;
};

/// Which slots each rank holds, 1 <= ranks <= slots <= kMostSlots: begins with the whole tree and
/// divides the largest node, of several the first, until there are as many as ranks. Pure.
std::vector<SlotRange> SlotRanges(int slots, int ranks);

/// Whether the slots are those of one node of the tree over `slots` slots.
bool IsSlotNode(SlotRange range, int slots);

/// In which order the sums of some nodes are added up. `nodes` are disjoint and ascending, and
/// `present` the indices of those that have a sum, ascending; a node without one is skipped: its
/// sibling takes its parent's place.
///
/// @param merges  Gets a number for each present node: once its sum lies on a stack, so often are
/// the two upper ones replaced by their sum; at the end one is left. Empty, if that means adding
/// one after the other. Allocates only for more nodes than ever before.
void FindMerges(std::span<const SlotRange> nodes, std::span<const int> present,
                std::vector<uint8_t>& merges);

}  // namespace farandole
