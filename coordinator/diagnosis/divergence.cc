#include "coordinator/diagnosis/divergence.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "coordinator/diagnosis/stall_report.h"
#include "coordinator/protocol/error_text.h"
#include "core/config.h"

namespace farandole {
namespace {

/// A rank that has submitted nothing for so long looks whether it is blocked; again after twice as
/// long, and so on.
constexpr int64_t kBlockedNs = 30 * kNsPerMs;
/// One that is not blocked then looks again so often, while it has something pending.
constexpr int64_t kLookNs = 10 * kNsPerMs;
/// From the end of one question to the next.
constexpr int64_t kAskPauseNs = 20 * kNsPerMs;
/// So often a rank looks whether its place is known, and so long.
constexpr int64_t kPlacePollNs = 2 * kNsPerMs;
constexpr int64_t kMostPlaceNs = kNsPerSecond;
/// A rank with more keys says nothing, and stalls report it. Bounds what travels.
constexpr size_t kMostKeys = 4096;

constexpr size_t kDivergedListed = 4;  // groups of ranks, and calls of each
constexpr size_t kCompared = 8;        // names of each group
constexpr size_t kMostCompared = 256;  // bytes of a name

struct KeyOrder {
  static auto Tie(const KeyName& key) { return std::tie(key.set, key.name); }
  bool operator()(const KeyName& a, const KeyName& b) const {
    const OpKind x = SpaceOf(a.kind);
    const OpKind y = SpaceOf(b.kind);
    return x != y ? x < y : Tie(a) < Tie(b);
  }
};

bool HasKey(const WaitingRanks& waiting, const KeyName& key) {
  return std::ranges::any_of(waiting.keys, [&](const KeyName& one) { return SameKey(one, key); });
}

/// Each call once, as gradients are many keys of one call.
std::string DescribeCalls(const std::vector<KeyName>& keys) {
  std::vector<std::string> calls;
  for (const KeyName& key : keys) {
    std::string call = DescribeCall(key);
    if (std::ranges::find(calls, call) == calls.end()) calls.push_back(std::move(call));
  }
  std::string text;
  for (size_t i = 0; i < calls.size() && i < kDivergedListed; ++i)
    text += (i > 0 ? ", " : "") + calls[i];
  if (calls.size() > kDivergedListed) text += ", ... (" + std::to_string(calls.size()) + " calls)";
  return text;
}

/// Ranks at the same place that wait for the same calls, though not for the same keys of these.
struct CallGroup {
  std::vector<int32_t> ranks;
  std::string calls;
  std::string place;
};
std::vector<CallGroup> GroupsOf(const std::vector<WaitingRanks>& diverged) {
  std::vector<CallGroup> groups;
  for (const WaitingRanks& one : diverged) {
    const std::string calls = DescribeCalls(one.keys);
    auto same = std::ranges::find_if(groups, [&](const CallGroup& group) {
      return group.calls == calls && group.place == one.place;
    });
    if (same == groups.end()) same = groups.insert(groups.end(), {{}, calls, one.place});
    same->ranks.insert(same->ranks.end(), one.ranks.begin(), one.ranks.end());
  }
  return groups;
}

/// Those that wait for other calls than more than half of `all` ranks do. None if process sets
/// differ: those that wait in a small set for one of a large one are no less right.
std::vector<int32_t> OddOnes(const std::vector<WaitingRanks>& diverged, size_t all) {
  std::map<std::string, std::vector<int32_t>> by_calls;
  for (const WaitingRanks& one : diverged) {
    std::vector<int32_t>& ranks = by_calls[DescribeCalls(one.keys)];
    ranks.insert(ranks.end(), one.ranks.begin(), one.ranks.end());
    for (const KeyName& key : one.keys) {
      if (key.set != diverged.front().keys.front().set) return {};
    }
  }
  const auto is_most = [all](const auto& group) { return 2 * group.second.size() > all; };
  std::vector<int32_t> odd;
  if (std::ranges::none_of(by_calls, is_most)) return odd;
  for (const auto& group : by_calls) {
    if (!is_most(group)) odd.insert(odd.end(), group.second.begin(), group.second.end());
  }
  return odd;
}

/// Names that may be one name written in two ways: few edits, and more than a number differs, as
/// those of "layer1" and "layer2" are two names.
bool AreAlike(const std::string& a, const std::string& b) {
  const size_t shorter = std::min(a.size(), b.size());
  if (shorter < 3 || std::max(a.size(), b.size()) > kMostCompared) return false;
  const auto letters = [](std::string text) {
    std::erase_if(text, [](char c) { return c >= '0' && c <= '9'; });
    return text;
  };
  return letters(a) != letters(b) && EditDistance(a, b) <= std::max<size_t>(1, shorter / 5);
}

/// What one group waits for and another one does not.
std::string DescribeNearMiss(const std::vector<WaitingRanks>& diverged) {
  for (size_t g = 0; g < diverged.size() && g < kDivergedListed; ++g) {
    for (size_t h = g + 1; h < diverged.size() && h < kDivergedListed; ++h) {
      const std::vector<KeyName>& left = diverged[g].keys;
      const std::vector<KeyName>& right = diverged[h].keys;
      for (size_t i = 0; i < left.size() && i < kCompared; ++i) {
        for (size_t k = 0; k < right.size() && k < kCompared; ++k) {
          if (HasKey(diverged[h], left[i]) || HasKey(diverged[g], right[k])) continue;
          if (left[i].set != right[k].set || !AreAlike(left[i].name, right[k].name)) continue;
          return "; did you mean one name by \"" + left[i].name + "\" and \"" + right[k].name +
                 "\"?";
        }
      }
    }
  }
  return {};
}

}  // namespace

/// A group is one node of the graph, since its ranks wait for the same. Removing one may free
/// others, so it goes round until nothing changes: O(groups^2 x keys x ranks) at worst, when ranks
/// are about to be told that they can never go on, or once after a wait.
std::vector<size_t> CannotGoOn(
    std::span<const WaitingRanks> waiting,
    const std::function<bool(const KeyName& key, int32_t rank)>& is_awaited) {
  std::map<KeyName, std::vector<size_t>, KeyOrder> holders;
  for (size_t g = 0; g < waiting.size(); ++g) {
    for (const KeyName& key : waiting[g].keys) holders[key].push_back(g);
  }
  std::vector<size_t> left;
  for (size_t g = 0; g < waiting.size(); ++g) {
    if (!waiting[g].keys.empty() && !waiting[g].may_go_on) left.push_back(g);
  }
  const auto is_blocked_for_ever = [&](const KeyName& key) {
    const std::vector<size_t>& of_key = holders[key];
    return std::ranges::any_of(left, [&](size_t h) {
      return std::ranges::find(of_key, h) == of_key.end() &&
             std::ranges::any_of(waiting[h].ranks, [&](int32_t r) { return is_awaited(key, r); });
    });
  };
  for (size_t before = 0; before != left.size();) {
    before = left.size();
    const std::vector<size_t> now = left;
    for (const size_t g : now) {
      if (!std::ranges::all_of(waiting[g].keys, is_blocked_for_ever)) std::erase(left, g);
    }
  }
  return left;
}

std::vector<size_t> OutOfOrder(std::span<const WaitingRanks> waiting) {
  const auto has_more = [](const WaitingRanks& one, const WaitingRanks& other) {
    return !std::ranges::includes(other.keys, one.keys, KeyOrder());
  };
  std::vector<size_t> found;
  for (size_t g = 0; g < waiting.size(); ++g) {
    const WaitingRanks& one = waiting[g];
    const auto contradicts = [&](const WaitingRanks& other) {
      return one.in_order && other.in_order && has_more(one, other) && has_more(other, one);
    };
    if (std::ranges::any_of(waiting, contradicts)) found.push_back(g);
  }
  return found;
}

std::string DescribeDivergence(const std::vector<WaitingRanks>& diverged, bool were_run,
                               const std::vector<int32_t>& others) {
  std::string text = "ranks wait for different operations, and none can go on: ";
  const std::vector<CallGroup> groups = GroupsOf(diverged);
  size_t all = others.size();
  for (size_t i = 0; i < groups.size(); ++i) {
    const CallGroup& group = groups[i];
    all += group.ranks.size();
    if (i >= kDivergedListed) continue;
    text += (i > 0 ? "; " : "") + DescribeRanks(group.ranks) +
            (group.ranks.size() == 1 ? " waits for " : " wait for ") + group.calls;
    if (!group.place.empty()) text += " at " + group.place;
  }
  if (groups.size() > kDivergedListed)
    text += "; ... (" + std::to_string(groups.size()) + " groups)";
  if (!others.empty()) {
    text += "; " + DescribeRanks(others) + (others.size() == 1 ? " has" : " have") +
            " not come that far";
  }
  const std::vector<int32_t> odd = OddOnes(diverged, all);
  if (!odd.empty()) {
    text += "; " + DescribeRanks(odd) +
            (odd.size() == 1 ? " is the odd one out" : " are the odd ones out");
  }
  if (std::ranges::all_of(diverged, &WaitingRanks::in_order)) {
    return text + "; all ranks must make the same calls in the same order";
  }
  const std::string near_miss = DescribeNearMiss(diverged);
  if (!near_miss.empty()) return text + near_miss;
  const auto has_gradients = [](const WaitingRanks& one) {
    return std::ranges::any_of(one.keys, IsOfGradients);
  };
  const auto count = std::ranges::count_if(diverged, has_gradients);
  if (count > 0 && static_cast<size_t>(count) < diverged.size()) {
    return text + "; " + kBackwardIsACall;
  }
  if (were_run) return text + "; all of them were run before: the orders of the calls differ";
  return text + "; all ranks must call the same collectives in the same order";
}

void Divergence::OnSubmitted(KeyId id) {
  if (!node_.options.divergence_check || node_.options.size == 1) return;
  if (!IsWaitedFor(node_.keys.Peek(id))) return;
  submit_ns_ = node_.now_ns;
  interval_ns_ = kBlockedNs;
  check_ns_ = std::min(check_ns_, node_.now_ns + kBlockedNs);
}

int64_t Divergence::due_ns() const {
  const bool is_to_ask = was_asked_for_ && node_.IsRoot() && number_ == 0;
  const int64_t due_ns = own_ ? std::min(check_ns_, node_.now_ns + kPlacePollNs) : check_ns_;
  return is_to_ask ? std::min(due_ns, next_ask_ns_) : due_ns;
}

int64_t Divergence::Tick() {
  if (node_.now_ns >= check_ns_) LookWhetherBlocked();
  if (own_) FindWhere();
  AskIfDue();
  return due_ns();
}

Status Divergence::ReceiveUp(int child, const UpMessage& message) {
  if (message.type == UpType::kBlocked) ReceiveBlocked();
  return message.type == UpType::kWaits ? ReceiveWaits(child, message) : Status();
}

/// A submission does not move the check but when that is due, so that the steady state costs a few
/// ticks a second. A rank that is not blocked looks again soon, as its threads begin to wait
/// without a word to the negotiation.
void Divergence::LookWhetherBlocked() {
  check_ns_ = kNever;
  if (node_.pending == 0) return;
  check_ns_ = submit_ns_ + kBlockedNs;
  if (node_.now_ns < check_ns_) return;
  check_ns_ = node_.now_ns + kLookNs;
  if (!node_.options.in_order && !node_.listener.IsBlocked()) return;
  interval_ns_ *= 2;
  check_ns_ = node_.now_ns + interval_ns_;
  ReceiveBlocked();
}

/// What comes while one is on its way up is covered by it: the question passes here later than
/// this, and so finds who has said this blocked.
void Divergence::ReceiveBlocked() {
  if (was_asked_for_) return;
  was_asked_for_ = true;
  if (node_.IsRoot()) return AskIfDue();
  UpMessage blocked;
  blocked.type = UpType::kBlocked;
  blocked.rank = node_.options.rank;
  node_.SendUp(blocked);
}

void Divergence::AskIfDue() {
  const bool is_to_ask = was_asked_for_ && node_.IsRoot() && number_ == 0;
  if (!is_to_ask || node_.now_ns < next_ask_ns_) return;
  DownMessage question;
  question.type = DownType::kWhoWaits;
  question.rank = has_found_ ? 1 : 0;
  decider_.Send(std::move(question));
}

Status Divergence::ReceiveDown(const DownMessage& message) {
  if (message.type != DownType::kWhoWaits) return {};
  was_asked_for_ = false;
  number_ = message.number;
  awaited_ = node_.sets.children().size();
  answered_.assign(awaited_, false);
  waiting_.clear();
  own_ = Own();
  const bool is_asked_where = message.rank != 0;
  place_due_ns_ = node_.now_ns + kMostPlaceNs;
  const bool is_looking =
      own_ && is_asked_where && listener_.AskActivity(node_.listener.CallerIds(), node_.now_ns);
  if (own_ && !is_looking) Add(*std::exchange(own_, std::nullopt));
  CloseAnswered();
  return {};
}

/// All that is pending, though its threads may wait for some of it only: it is not said to be stuck
/// too early, as every key can be decided that it might wait for.
std::optional<WaitingRanks> Divergence::Own() const {
  WaitingRanks own;
  own.ranks = {node_.options.rank};
  own.may_go_on = !node_.listener.IsBlocked();
  own.may_have_more_threads = !own.may_go_on && !node_.listener.KnowsAllThreads();
  own.in_order = node_.options.in_order;
  for (KeyId id = 0; id < node_.keys.size(); ++id) {
    const Key& key = node_.keys.Peek(id);
    if (!node_.keys.IsPending(id) || !IsWaitedFor(key)) continue;
    if (own.keys.size() == kMostKeys) return {};
    own.in_order = own.in_order && key.name.function.empty();
    own.keys.push_back(key.name);
    own.keys.back().function.clear();  // it does not travel, and groups are compared
  }
  if (own.keys.empty()) return {};  // it has joined
  if (own.may_go_on && !own.in_order) return {};
  std::ranges::sort(own.keys, KeyOrder());
  return own;
}

void Divergence::FindWhere() {
  const std::optional<Activity> doing = listener_.FindActivity(node_.now_ns);
  if (!doing && node_.now_ns < place_due_ns_) return;
  if (doing && doing->kind == FailureKind::kBlockedInPython) own_->place = doing->text;
  Add(*std::exchange(own_, std::nullopt));
  CloseAnswered();
}

void Divergence::Add(const WaitingRanks& waiting) {
  const auto same = std::ranges::find_if(waiting_, [&](const WaitingRanks& one) {
    const auto tie = [](const WaitingRanks& w) {
      return std::tie(w.keys, w.may_go_on, w.in_order, w.may_have_more_threads, w.place);
    };
    return tie(one) == tie(waiting);
  });
  if (same == waiting_.end()) return waiting_.push_back(waiting);
  same->ranks.insert(same->ranks.end(), waiting.ranks.begin(), waiting.ranks.end());
  std::ranges::sort(same->ranks);
}

Status Divergence::ReceiveWaits(int child, const UpMessage& message) {
  const auto index = static_cast<size_t>(child);
  if (number_ == 0 || message.number != number_ || answered_[index]) {
    return Internal("protocol: an answer to question " + std::to_string(message.number) +
                    ", which is not open");
  }
  std::vector<int32_t> seen;
  for (const WaitingRanks& one : message.waiting) {
    for (const int32_t rank : one.ranks) {
      if (node_.sets.ContributorOf(rank) == ContributorOfChild(child)) continue;
      return Internal("protocol: an answer of rank " + std::to_string(rank) +
                      ", which is not in the branch");
    }
    seen.insert(seen.end(), one.ranks.begin(), one.ranks.end());
  }
  std::ranges::sort(seen);
  if (std::ranges::adjacent_find(seen) != seen.end()) {
    return Internal("protocol: a rank waits twice in one answer");
  }
  for (const WaitingRanks& one : message.waiting) Add(one);
  answered_[index] = true;
  --awaited_;
  CloseAnswered();
  return {};
}

void Divergence::CloseAnswered() {
  if (number_ == 0 || awaited_ > 0 || own_) return;
  const int64_t number = std::exchange(number_, 0);
  if (node_.IsRoot()) return Judge();
  UpMessage message;
  message.type = UpType::kWaits;
  message.number = number;
  message.waiting = std::move(waiting_);
  node_.SendUp(message);
}

/// Number of the last decision about what these ranks wait for.
int64_t Divergence::LastDecision(const std::vector<WaitingRanks>& waiting) {
  int64_t last = 0;
  for (const WaitingRanks& one : waiting) {
    for (const KeyName& key : one.keys)
      last = std::max(last, node_.keys.At(node_.keys.Intern(key)).closed);
  }
  return last;
}

/// Ranks that can never go on wait for the same ever after; others, which threads that had made no
/// call have freed, may have come to wait anew.
bool Divergence::Persists(const std::vector<WaitingRanks>& diverged) {
  const auto still_waits = [&](const WaitingRanks& before) {
    return std::ranges::all_of(before.ranks, [&](int32_t rank) {
      return std::ranges::any_of(diverged, [&](const WaitingRanks& one) {
        return std::ranges::binary_search(one.ranks, rank) && one.keys == before.keys;
      });
    });
  };
  return std::ranges::all_of(found_, still_waits) && LastDecision(found_) == found_decision_;
}

/// The error is final on all ranks, those that might have gone on included: they would come to wait
/// for the others.
void Divergence::Judge() {
  next_ask_ns_ = node_.now_ns + kAskPauseNs;
  const auto is_awaited = [this](const KeyName& key, int32_t rank) {
    const SetState* set = node_.sets.Find(key.set);
    return set != nullptr && set->live && set->Contains(rank) && !node_.sets.Joined(rank);
  };
  std::vector<size_t> found = CannotGoOn(waiting_, is_awaited);
  const bool all_wait = !found.empty();
  if (found.empty()) found = OutOfOrder(waiting_);
  const bool was_found = std::exchange(has_found_, !found.empty());
  if (found.empty()) return;
  std::vector<WaitingRanks> diverged;
  for (const size_t g : found) diverged.push_back(std::move(waiting_[g]));
  if (!was_found || !Persists(diverged)) {
    was_asked_for_ = true;
    // Another thread of a rank may yet start what the others wait for.
    const bool is_certain =
        all_wait && std::ranges::none_of(diverged, &WaitingRanks::may_have_more_threads);
    next_ask_ns_ = node_.now_ns + (is_certain ? 0 : kNsPerSecond);
    found_ = all_wait ? std::move(diverged) : std::vector<WaitingRanks>();
    found_decision_ = LastDecision(found_);
    return;
  }
  FailureFacts facts;
  bool were_run = true;
  std::set<int32_t> others;  // whom these ranks wait for
  for (WaitingRanks& one : diverged) {
    for (int32_t rank = 0; rank < node_.options.size; ++rank) {
      const auto needs = [&](const KeyName& key) { return is_awaited(key, rank); };
      if (std::ranges::any_of(one.keys, needs)) others.insert(rank);
    }
    facts.ranks.insert(facts.ranks.end(), one.ranks.begin(), one.ranks.end());
    for (KeyName& key : one.keys) {
      were_run = were_run && node_.keys.At(node_.keys.Intern(key)).closed > 0;
      key = node_.sets.ForUser(key);
    }
  }
  std::ranges::sort(diverged, {}, [](const WaitingRanks& one) { return one.ranks.front(); });
  std::ranges::sort(facts.ranks);
  for (const int32_t rank : facts.ranks) others.erase(rank);
  facts.kind = FailureKind::kDiverged;
  facts.cause = "ranks wait for different operations";
  facts.tensor = diverged.front().keys.front().name;
  const std::string text = DescribeDivergence(diverged, were_run, {others.begin(), others.end()});
  decider_.ShutDown(Status(Code::kMismatch, text, facts));
}

}  // namespace farandole
