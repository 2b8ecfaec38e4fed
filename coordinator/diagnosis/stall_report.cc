#include "coordinator/diagnosis/stall_report.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <string_view>
#include <utility>

#include "coordinator/protocol/error_text.h"

namespace farandole {
namespace {

constexpr size_t kStalledListed = 8;  // ranks or calls spelled out; the rest is counted
constexpr size_t kNamesSpelled = 3;   // parameters of an optimizer likewise
constexpr size_t kMostGroups = 256;   // remembered; beyond, a stall may be printed more often

// Of the names that optimizers give their gradients (farandole/torch/optimizer/): their number
// and a point come next, then a parameter's name or what is exchanged besides.
constexpr std::string_view kGradientsPrefix = "gradients.";
constexpr std::string_view kGradientsCall = "gradients of optimizer ";
constexpr std::string_view kUnnamed = "noname.";

/// The name of a key of an optimizer: "gradients.<number>.<rest>".
struct GradientsKey {
  int number = -1;        // of the optimizer, from 0; -1: not an optimizer's key
  std::string_view rest;  // of the key's name, which it points into
};
GradientsKey ParseGradients(std::string_view name) {
  GradientsKey parsed;
  if (!name.starts_with(kGradientsPrefix)) return {};
  const char* const end = name.data() + name.size();
  const auto [stop, error] =
      std::from_chars(name.data() + kGradientsPrefix.size(), end, parsed.number);
  if (error != std::errc() || stop == end || *stop != '.') return {};
  parsed.rest = name.substr(static_cast<size_t>(stop + 1 - name.data()));
  return parsed;
}

/// What an optimizer exchanges besides its gradients (coordinator/gradients/gradient_round.cc,
/// farandole/torch).
bool IsBesides(std::string_view rest) {
  constexpr std::string_view kBesides[] = {"number and order",       "flag", "rows", "all rows",
                                           "parameters at the wrap", "loss"};
  return std::ranges::find(kBesides, rest) != std::end(kBesides);
}

/// Of several parameters, named in Answer::names.
bool IsGroup(std::string_view rest) { return rest.starts_with("group "); }

bool IsMissing(const StallFacts& facts, const Answer& answer) {
  return !answer.pending && std::ranges::find(facts.joined, answer.rank) == facts.joined.end();
}

/// The same for stalls with the same missing ranks. A rank that gave no answer is marked, as its
/// line says something else about it.
std::string GroupOf(const StallFacts& facts) {
  std::set<std::string> missing;
  for (const Answer& answer : facts.answers) {
    if (IsMissing(facts, answer)) missing.insert(std::to_string(answer.rank));
  }
  for (const int32_t rank : facts.silent) missing.insert(std::to_string(rank) + "?");
  std::string text;
  for (const std::string& one : missing) text += one + ",";
  return text;
}

using Group = std::vector<const StallFacts*>;

/// In the order in which the stalls came, each with its name.
std::vector<std::pair<std::string, Group>> GroupsOf(const std::vector<StallFacts>& stalls) {
  std::vector<std::pair<std::string, Group>> groups;
  for (const StallFacts& facts : stalls) {
    std::string name = GroupOf(facts);
    const auto same =
        std::ranges::find(groups, name, [](const auto& group) { return group.first; });
    if (same != groups.end()) {
      same->second.push_back(&facts);
    } else {
      groups.emplace_back(std::move(name), Group{&facts});
    }
  }
  return groups;
}

int64_t LongestWait(const Group& group) {
  int64_t longest_ns = 0;
  for (const StallFacts* facts : group) longest_ns = std::max(longest_ns, facts->waited_ns);
  return longest_ns;
}

/// A call and, of an optimizer, the parameters whose gradients wait.
struct CallText {
  std::string call;                // as DescribeCall gives it
  int64_t times = 0;               // its stalled keys; 0 for an optimizer's
  int64_t tensors = 0;             // parameters
  std::vector<std::string> names;  // kNamesSpelled of them at most
};

void AddGradients(const StallFacts& facts, std::string_view rest, CallText& text) {
  const auto add = [&](const std::string& name) {
    if (text.names.size() < kNamesSpelled) text.names.push_back('"' + name + '"');
  };
  // It belongs to the optimizer's call, but is no parameter that a user could look for.
  if (IsBesides(rest)) return;
  if (!IsGroup(rest)) {
    ++text.tensors;
    return add(std::string(rest));
  }
  for (const Answer& answer : facts.answers) {
    if (answer.names.empty()) continue;
    text.tensors += answer.tensors;
    for (const std::string& name : answer.names) add(name);
    return;  // the others wait with the same
  }
}

std::string ToText(const CallText& text) {
  if (text.tensors == 0) {
    return text.call + (text.times > 1 ? " (" + std::to_string(text.times) + " times)" : "");
  }
  std::string all = text.call + " of ";
  for (size_t i = 0; i < text.names.size(); ++i) all += (i > 0 ? ", " : "") + text.names[i];
  if (text.tensors <= static_cast<int64_t>(text.names.size())) return all;
  return all + ", ... (" + std::to_string(text.tensors) + " parameters)";
}

/// All keys of an optimizer are one call (DescribeCall), since a user knows its parameters and not
/// how they are grouped.
std::string DescribeCalls(const Group& group) {
  std::vector<CallText> calls;
  for (const StallFacts* facts : group) {
    const std::string call = DescribeCall(facts->key);
    auto same = std::ranges::find(calls, call, &CallText::call);
    if (same == calls.end()) same = calls.insert(calls.end(), CallText{call, 0, 0, {}});
    const GradientsKey gradients = ParseGradients(facts->key.name);
    if (gradients.number >= 0) {
      AddGradients(*facts, gradients.rest, *same);
    } else {
      ++same->times;
    }
  }
  std::string text;
  for (size_t i = 0; i < calls.size() && i < kStalledListed; ++i) {
    text += (i > 0 ? ", " : "") + ToText(calls[i]);
  }
  if (calls.size() > kStalledListed) text += ", ... (" + std::to_string(calls.size()) + " calls)";
  return text;
}

std::string DescribeWaiting(const Group& group) {
  std::set<int32_t> ranks;
  std::string signature;
  for (const StallFacts* facts : group) {
    for (const Answer& answer : facts->answers) {
      if (!answer.pending) continue;
      ranks.insert(answer.rank);
      if (signature.empty()) signature = answer.signature;
    }
  }
  const std::string text =
      DescribeRanks({ranks.begin(), ranks.end()}) + (ranks.size() == 1 ? " waits" : " wait");
  // Of several calls, and of what a call does inside, the signature says nothing to a user.
  const KeyName& key = group.front()->key;
  return group.size() > 1 || DescribeCall(key) != Describe(key) ? text
                                                                : text + " with " + signature;
}

std::string DescribeActivity(const Activity& doing) {
  if (doing.kind == FailureKind::kBlockedInC) {
    return "inside C code that holds the interpreter's lock" + doing.text;
  }
  return "in Python code: " + doing.text;
}

std::string DescribeMissing(const Answer& answer) {
  const std::string text = "rank " + std::to_string(answer.rank);
  const std::string doing =
      answer.doing.kind == FailureKind::kUnknown ? "" : " is " + DescribeActivity(answer.doing);
  if (answer.last.empty()) return text + " (has submitted nothing yet)" + doing;
  return text + " (last: " + answer.last + ", " + DescribeSeconds(answer.last_age_ns) + " ago)" +
         doing;
}

/// A rank that waits with gradients inside backward() cannot come to what others went on to.
bool WentOnWithoutGradients(const KeyName& key, const Answer& answer) {
  return ParseGradients(key.name).number >= 0 && !answer.last.empty() &&
         answer.last.find(kGradientsCall) == std::string::npos;
}

}  // namespace

bool IsStall(const StallFacts& facts) {
  const bool waiting = std::ranges::any_of(facts.answers, &Answer::pending);
  const bool missing = std::ranges::any_of(
      facts.answers, [&](const Answer& answer) { return IsMissing(facts, answer); });
  return waiting && (missing || !facts.silent.empty());
}

std::string DescribeCall(const KeyName& key) {
  const GradientsKey gradients = ParseGradients(key.name);
  if (gradients.number >= 0) {
    return "the " + std::string(kGradientsCall) + std::to_string(gradients.number + 1) +
           " (backward()/step())";
  }
  const std::string kind(Name(key.kind));
  // OperationRegistry puts the kind before "noname.".
  if (!key.name.starts_with(kUnnamed) && !key.name.starts_with(kind + "." + kUnnamed.data())) {
    return Describe(key);
  }
  const std::string function = CalledAs(key.kind, key.function);
  return (function.starts_with('a') ? "an " : "a ") + function + " without a name";
}

bool IsOfGradients(const KeyName& key) { return ParseGradients(key.name).number >= 0; }

void NameGradients(const KeyName& key, const Signature& signature, Answer& answer) {
  if (!IsGroup(ParseGradients(key.name).rest)) return;
  for (const TensorSignature& tensor : signature.tensors) {
    if (IsBesides(tensor.name)) continue;
    ++answer.tensors;
    if (answer.names.size() < kNamesSpelled) answer.names.push_back(tensor.name);
  }
}

std::string DescribeUnheard(const KeyName& key, size_t keys, int64_t waited_ns, int rank,
                            int parent) {
  const std::string more = keys > 1 ? " and " + std::to_string(keys - 1) + " more" : "";
  return "stalled for " + DescribeSeconds(waited_ns) + ": " + DescribeCall(key) + more + ": rank " +
         std::to_string(rank) + " waits; no answer from rank " + std::to_string(parent) +
         (parent > 0 ? " or, above it, rank 0" : "") + ", which would report who is missing";
}

std::string DescribeStall(const std::vector<const StallFacts*>& stalls) {
  // In all stalls of the group the same ranks are missing: one of them says who.
  const StallFacts& first = *stalls.front();
  std::string text = "stalled for " + DescribeSeconds(LongestWait(stalls)) + ": " +
                     DescribeCalls(stalls) + ": " + DescribeWaiting(stalls);
  size_t count = 0;
  for (const Answer& answer : first.answers) {
    if (!IsMissing(first, answer)) continue;
    if (++count <= kStalledListed)
      text += (count > 1 ? ", " : "; missing: ") + DescribeMissing(answer);
  }
  if (count > kStalledListed) text += ", ... (" + std::to_string(count) + " ranks)";
  if (!first.silent.empty()) text += "; no answer from " + DescribeRanks(first.silent);
  const bool went_on = std::ranges::any_of(stalls, [](const StallFacts* facts) {
    return std::ranges::any_of(facts->answers, [&](const Answer& answer) {
      return IsMissing(*facts, answer) && WentOnWithoutGradients(facts->key, answer);
    });
  });
  if (went_on) {
    text += std::string("; ") + kBackwardIsACall;
  }
  return text;
}

std::string DescribeStall(const StallFacts& stall) { return DescribeStall(Group{&stall}); }

FailureFacts BlockedRanks(const std::vector<StallFacts>& stalls) {
  std::map<int32_t, const Answer*> blocked;
  for (const StallFacts& stall : stalls) {
    for (const Answer& answer : stall.answers) {
      const bool is_known = answer.doing.kind != FailureKind::kUnknown;
      if (is_known && IsMissing(stall, answer)) blocked.emplace(answer.rank, &answer);
    }
  }
  FailureFacts facts;
  if (blocked.empty()) return facts;
  for (const auto& [rank, answer] : blocked) facts.ranks.push_back(rank);
  const Answer& first = *blocked.begin()->second;
  facts.kind = first.doing.kind;
  facts.cause = DescribeActivity(first.doing);
  facts.tensor = stalls.front().key.name;
  return facts;
}

namespace {

/// `lines`, of which the last counts those that are too many.
std::vector<std::string> AtMost(std::vector<std::string> lines, size_t most) {
  if (lines.size() <= most) return lines;
  const size_t more = lines.size() - most + 1;
  lines.resize(most);
  lines.back() = "... and " + std::to_string(more) +
                 " more groups of stalled tensors; FARANDOLE_LOG_LEVEL=debug lists all";
  return lines;
}

}  // namespace

std::vector<std::string> DescribeStalls(const std::vector<StallFacts>& stalls, size_t most) {
  std::vector<std::string> lines;
  for (const auto& [name, group] : GroupsOf(stalls)) lines.push_back(DescribeStall(group));
  return AtMost(std::move(lines), most);
}

std::vector<std::string> StallReport::Lines(const std::vector<StallFacts>& stalls, int64_t now_ns) {
  std::vector<std::string> lines;
  for (const auto& [name, group] : GroupsOf(stalls)) {
    if (IsDue(name, LongestWait(group), now_ns)) lines.push_back(DescribeStall(group));
  }
  return AtMost(std::move(lines), kMostStallLines);
}

/// The interval starts as the first wait and doubles with each line. A wait of more than 1.5 times
/// the longest one so far is printed at once. Beyond kMostGroups all is forgotten, which costs some
/// lines too many.
bool StallReport::IsDue(const std::string& group, int64_t waited_ns, int64_t now_ns) {
  if (printed_.size() >= kMostGroups && !printed_.contains(group)) printed_.clear();
  Printed& printed = printed_[group];
  const bool is_first = printed.interval_ns == 0;
  const bool is_longer = waited_ns > printed.longest_ns + printed.longest_ns / 2;
  if (!is_first && !is_longer && now_ns < printed.next_ns) return false;
  printed.interval_ns = is_first ? std::max<int64_t>(waited_ns, 1) : 2 * printed.interval_ns;
  printed.longest_ns = std::max(printed.longest_ns, waited_ns);
  printed.next_ns = now_ns + printed.interval_ns;
  return true;
}

}  // namespace farandole
