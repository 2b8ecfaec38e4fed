// The tables of process sets and of joined ranks on one node, seen through its place in the tree.
//
// Thread safety: none; one baton holder at a time. Internal to the negotiation.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "coordinator/negotiation_state.h"

namespace farandole {

/// Invariant: the sets, their uids and user numbers are the same on all nodes after the same
/// decisions; branches and joins are this node's own view. Lifetime of a SetState: the table's.
class SetTable {
 public:
  /// The global set exists from the start. @param parent of every rank; parent[0] = -1.
  SetTable(int rank, const std::vector<int>& parent, std::vector<uint8_t> planes);

  int parent() const { return parent_; }
  int depth() const { return depth_; }
  const std::vector<int>& children() const { return children_; }
  /// Position in children(), or -1.
  int ChildOf(int rank) const;
  /// The contributor whose branch holds `rank`, or -1 if it is not below this node.
  int ContributorOf(int rank) const;

  /// nullptr: no such uid yet.
  SetState* Find(uint32_t uid) const { return uid < sets_.size() ? sets_[uid].get() : nullptr; }
  /// For messages: the key with its set's user number in place of the uid.
  KeyName ForUser(KeyName key) const;
  uint32_t next_uid() const { return static_cast<uint32_t>(sets_.size()); }
  const std::vector<std::unique_ptr<SetState>>& all() const { return sets_; }
  /// Gives it the next uid and the smallest free user number.
  SetState& Add(std::vector<int32_t> ranks, std::vector<uint8_t> planes);
  /// The live set with exactly these ranks, or nullptr.
  const SetState* FindRanks(const std::vector<int32_t>& ranks) const;

  bool Joined(int rank) const;
  int joined_count() const { return joined_count_; }
  void MarkJoined(int rank);
  void ClearJoined();

 private:
  struct Below {
    int32_t rank = 0;
    int32_t contributor = 0;
    bool joined = false;
  };
  const Below* FindBelow(int rank) const;
  int32_t SmallestFreeUserId() const;
  static void CountJoin(SetState& set, int contributor);

  int rank_ = 0;
  int parent_ = -1;
  int depth_ = 0;
  std::vector<int> children_;                    // ascending
  std::vector<Below> below_;                     // the subtree, this rank included, ascending
  std::vector<std::unique_ptr<SetState>> sets_;  // by uid
  int joined_count_ = 0;
};

}  // namespace farandole
