#include "coordinator/protocol/process_sets.h"

#include <algorithm>
#include <numeric>

namespace farandole {
namespace {

constexpr int32_t kUnseen = -2;     // not looked at yet
constexpr int32_t kElsewhere = -1;  // not below this node

/// Per rank: the contributor of `self` whose branch holds it, or kElsewhere. O(size). From each
/// rank it goes up to the first one whose place is known, and then writes that place along the same
/// way, so every step up is taken at most twice. Parents may have higher numbers than their
/// children.
std::vector<int32_t> PlaceAll(int self, const std::vector<int>& parent,
                              const std::vector<int>& children) {
  std::vector<int32_t> place(parent.size(), kUnseen);
  place[static_cast<size_t>(self)] = kSelf;
  for (size_t c = 0; c < children.size(); ++c) {
    place[static_cast<size_t>(children[c])] = ContributorOfChild(static_cast<int>(c));
  }
  for (size_t r = 0; r < parent.size(); ++r) {
    int at = static_cast<int>(r);
    while (at >= 0 && place[static_cast<size_t>(at)] == kUnseen)
      at = parent[static_cast<size_t>(at)];
    const int32_t found = at < 0 ? kElsewhere : place[static_cast<size_t>(at)];
    at = static_cast<int>(r);
    while (at >= 0 && place[static_cast<size_t>(at)] == kUnseen) {
      place[static_cast<size_t>(at)] = found;
      at = parent[static_cast<size_t>(at)];
    }
  }
  return place;
}

}  // namespace

ProcessSets::ProcessSets(int rank, const std::vector<int>& parent, uint32_t max_live)
    : rank_(rank), parent_(parent[static_cast<size_t>(rank)]), max_live_(max_live) {
  for (int at = parent_; at >= 0; at = parent[static_cast<size_t>(at)]) ++depth_;
  for (size_t r = 0; r < parent.size(); ++r) {
    if (parent[r] == rank) children_.push_back(static_cast<int>(r));
  }
  const std::vector<int32_t> place = PlaceAll(rank, parent, children_);
  // A node above `rank` is also "unseen" on the way; it ends at -1 and so is elsewhere.
  for (size_t r = 0; r < place.size(); ++r) {
    if (place[r] >= 0) below_.push_back({static_cast<int32_t>(r), place[r], false});
  }
  std::vector<int32_t> everyone(parent.size());
  std::iota(everyone.begin(), everyone.end(), 0);
  Add(std::move(everyone), {});  // the engine knows the planes of the global set
}

int ProcessSets::ChildOf(int rank) const {
  const auto it = std::lower_bound(children_.begin(), children_.end(), rank);
  return it != children_.end() && *it == rank ? static_cast<int>(it - children_.begin()) : -1;
}

const ProcessSets::Below* ProcessSets::FindBelow(int rank) const {
  const auto it = std::lower_bound(below_.begin(), below_.end(), rank,
                                   [](const Below& below, int r) { return below.rank < r; });
  return it != below_.end() && it->rank == rank ? &*it : nullptr;
}

int ProcessSets::ContributorOf(int rank) const {
  const Below* below = FindBelow(rank);
  return below == nullptr ? -1 : below->contributor;
}

bool ProcessSets::Joined(int rank) const {
  const Below* below = FindBelow(rank);
  return below != nullptr && below->joined;
}

int32_t ProcessSets::SmallestFreeUserId() const {
  std::vector<int32_t> used;
  for (const auto& [uid, set] : sets_) {
    if (set->live) used.push_back(set->info.user_id);
  }
  std::sort(used.begin(), used.end());
  int32_t free = sets_.empty() ? 0 : 1;  // 0 is the global set's for ever
  for (const int32_t id : used) free += id == free ? 1 : 0;
  return free;
}

uint32_t ProcessSets::next_uid() const {
  std::vector<uint32_t> taken;
  for (const auto& [uid, set] : sets_) taken.push_back(uid % max_live_);
  std::sort(taken.begin(), taken.end());
  uint32_t next = next_uid_;
  // Ends, because fewer than max_live sets are live (Decider::DecideAddSet).
  while (std::binary_search(taken.begin(), taken.end(), next % max_live_)) ++next;
  return next;
}

void ProcessSets::End(const SetState& set) {
  const uint32_t uid = set.info.uid;
  ended_.Add({uid, set.info.user_id, set.why});
  sets_.erase(uid);
}

Status ProcessSets::WhyEnded(uint32_t uid) const {
  const EndedSet* ended = ended_.Find(uid);
  return ended != nullptr ? ended->why : Aborted("the process set has ended");
}

/// Every node finds out for itself. Of the nodes that have all members below them only the lowest
/// one is a member or has members in several branches.
SetState::DecidedAt ProcessSets::DecidedAt(const SetState& set, size_t ranks) {
  size_t below = 0;
  for (const SetState::Branch& branch : set.branches) below += branch.ranks.size();
  if (below < ranks) return SetState::DecidedAt::kAbove;
  const bool in_one_child = set.contributors == 1 && !set.member;
  return in_one_child ? SetState::DecidedAt::kBelow : SetState::DecidedAt::kHere;
}

SetState& ProcessSets::Add(std::vector<int32_t> ranks, std::vector<uint8_t> planes) {
  auto set = std::make_unique<SetState>();
  const uint32_t uid = next_uid();
  next_uid_ = uid + 1;
  set->info.uid = uid;
  set->info.user_id = SmallestFreeUserId();
  set->info.planes = std::move(planes);
  set->branches.resize(children_.size() + 1);
  for (const int32_t rank : ranks) {
    const Below* below = FindBelow(rank);
    if (below == nullptr) continue;
    std::vector<int32_t>& branch = set->branches[static_cast<size_t>(below->contributor)].ranks;
    if (branch.empty()) ++set->contributors;
    branch.push_back(rank);
  }
  // After the branches are complete: AllJoined compares with their number of ranks. A rank that has
  // joined is absent from a new set as well.
  for (const int32_t rank : ranks) {
    const Below* below = FindBelow(rank);
    if (below != nullptr && below->joined) CountJoin(*set, below->contributor);
  }
  set->member = std::binary_search(ranks.begin(), ranks.end(), rank_);
  set->decided_at = DecidedAt(*set, ranks.size());
  set->info.ranks = std::move(ranks);
  return *(sets_[uid] = std::move(set));
}

const SetState* ProcessSets::FindRanks(const std::vector<int32_t>& ranks) const {
  for (const auto& [uid, set] : sets_) {
    if (set->live && set->info.ranks == ranks) return set.get();
  }
  return nullptr;
}

KeyName ProcessSets::ForUser(KeyName key) const {
  const SetState* set = Find(key.set);
  const EndedSet* ended = set == nullptr ? ended_.Find(key.set) : nullptr;
  if (set != nullptr) key.set = static_cast<uint32_t>(set->info.user_id);
  if (ended != nullptr) key.set = static_cast<uint32_t>(ended->user_id);
  return key;
}

/// A contributor has joined when all its members have. A partial join is settled inside the branch,
/// where the votes are.
void ProcessSets::CountJoin(SetState& set, int contributor) {
  SetState::Branch& branch = set.branches[static_cast<size_t>(contributor)];
  ++branch.joined;
  if (branch.AllJoined()) ++set.joined;
}

void ProcessSets::MarkJoined(int rank) {
  Below& below = const_cast<Below&>(*FindBelow(rank));
  below.joined = true;
  ++joined_count_;
  for (const auto& [uid, set] : sets_) {
    if (set->live && set->Contains(rank)) CountJoin(*set, below.contributor);
  }
}

void ProcessSets::ClearJoined() {
  for (Below& below : below_) below.joined = false;
  joined_count_ = 0;
  for (const auto& [uid, set] : sets_) {
    set->joined = 0;
    for (SetState::Branch& branch : set->branches) branch.joined = 0;
  }
}

}  // namespace farandole
