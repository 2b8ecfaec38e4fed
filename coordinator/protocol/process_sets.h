// The tables of process sets and of joined ranks on one node, seen through its place in the tree.
//
// Thread safety: none; one holder of the engine lock at a time. Internal to the negotiation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/protocol/state.h"

namespace farandole {

/// One process set that has ended.
struct EndedSet {
  uint32_t uid = 0;
  int32_t user_id = 0;
  Status why;
};

/// Remembers the last kKept of them: that a set has ended is known from its uid for ever, why it
/// did only for so long. A job may make sets without limit, so no table may keep a line for each.
///
/// Thread safety: none; its owner's lock.
class EndedSets {
 public:
  static constexpr size_t kKept = 256;

  void Add(EndedSet set) {
    if (sets_.size() == kKept) sets_.pop_front();
    sets_.push_back(std::move(set));
  }
  /// nullptr: it has not ended, or long ago.
  const EndedSet* Find(uint32_t uid) const {
    const auto it = std::find_if(sets_.rbegin(), sets_.rend(),
                                 [uid](const EndedSet& set) { return set.uid == uid; });
    return it == sets_.rend() ? nullptr : &*it;
  }

 private:
  std::deque<EndedSet> sets_;  // oldest first
};

/// Invariant: the sets, their uids and user numbers are the same on all nodes after the same
/// decisions; branches and joins are this node's own view. Lifetime of a SetState: until End.
class ProcessSets {
 public:
  /// The global set exists from the start. @param parent of every rank; parent[0] = -1.
  /// @param max_live  At most so many sets live at a time; see kMaxLiveSets.
  ProcessSets(int rank, const std::vector<int>& parent, uint32_t max_live);

  int parent() const { return parent_; }
  int depth() const { return depth_; }  ///< The level of its decisions and ids.
  const std::vector<int>& children() const { return children_; }
  /// Position in children(), or -1.
  int ChildOf(int rank) const;
  /// The contributor whose branch holds `rank`, or -1 if it is not below this node.
  int ContributorOf(int rank) const;

  /// nullptr: no such uid yet, or Ended. The global set is there for ever, live or not.
  SetState* Find(uint32_t uid) const {
    const auto it = sets_.find(uid);
    return it == sets_.end() ? nullptr : it->second.get();
  }
  /// The set was, or may have been, live: what was said about it before may still be on its way.
  bool Ended(uint32_t uid) const { return uid < next_uid_ && !sets_.contains(uid); }
  /// Aborted: why a set that Ended did, as far as it is remembered.
  Status WhyEnded(uint32_t uid) const;
  /// For messages: the key with its set's user number in place of the uid.
  KeyName ForUser(KeyName key) const;
  /// Of the next set: uids ascend and are never used again, and pass over numbers that equal a live
  /// set's modulo max_live, so that what planes number by that is free, and the least recently
  /// used. Fewer than max_live sets are live.
  uint32_t next_uid() const;
  bool Full() const { return sets_.size() >= max_live_; }
  const std::map<uint32_t, std::unique_ptr<SetState>>& all() const { return sets_; }
  /// Forgets a set other than the global one, but for the reason.
  void End(const SetState& set);
  /// Gives it the next uid and the smallest free user number.
  SetState& Add(std::vector<int32_t> ranks, std::vector<uint8_t> planes);
  /// The live set with exactly these ranks, or nullptr.
  const SetState* FindRanks(const std::vector<int32_t>& ranks) const;

  bool Joined(int rank) const;
  int joined_count() const { return joined_count_; }
  /// Whether this rank and all below it have.
  bool AllBelowJoined() const { return joined_count_ == static_cast<int>(below_.size()); }
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
  static SetState::DecidedAt DecidedAt(const SetState& set, size_t ranks);
  static void CountJoin(SetState& set, int contributor);

  int rank_ = 0;
  int parent_ = -1;
  int depth_ = 0;
  uint32_t max_live_ = 0;
  uint32_t next_uid_ = 0;      // not below any uid given
  std::vector<int> children_;  // ascending
  std::vector<Below> below_;   // the subtree, this rank included, ascending
  std::map<uint32_t, std::unique_ptr<SetState>> sets_;
  EndedSets ended_;
  int joined_count_ = 0;
};

}  // namespace farandole
