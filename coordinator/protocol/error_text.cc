#include "coordinator/protocol/error_text.h"

#include <algorithm>
#include <cstdio>

namespace farandole {
namespace {

constexpr size_t kListed = 8;   // ranks, signatures or failures spelled out; the rest is counted
constexpr size_t kSpelled = 3;  // tensors of a group; of a larger one only how many

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

/// A thing that must be equal: how to say it of one signature, and of all.
struct Aspect {
  const char* must;                        // ends the message
  std::string (*value)(const Signature&);  // what a rank sent, in words
};

/// In the order in which they are compared. FirstMismatch compares the tensors themselves between
/// the first and the second, so the number of tensors stays first.
constexpr Aspect kAspects[] = {
    {"the tensors of a group must be equal",
     [](const Signature& s) { return std::to_string(s.tensors.size()) + " tensors"; }},
    {"reduce ops must be equal",
     [](const Signature& s) { return "op " + std::string(Name(s.op)); }},
    {"roots must be equal", [](const Signature& s) { return "root " + std::to_string(s.root); }},
    {"factors must be equal",
     [](const Signature& s) {
       return "prescale " + Number(s.prescale) + " and postscale " + Number(s.postscale);
     }},
    {"devices must be equal",
     [](const Signature& s) { return "a tensor on " + std::string(Name(s.device)); }},
    {"wire dtypes must be equal",
     [](const Signature& s) { return "wire dtype " + std::string(Name(s.wire_format)); }},
};

/// The first tensor in which two signatures with equally many tensors differ, or -1.
int FirstUnlikeTensor(const std::vector<Sent>& sent) {
  const std::vector<TensorSignature>& first = sent.front().signature->tensors;
  for (size_t t = 0; t < first.size(); ++t) {
    for (const Sent& other : sent) {
      if (other.signature->tensors[t] != first[t]) return static_cast<int>(t);
    }
  }
  return -1;
}

template <class Value>
bool AllEqual(const std::vector<Sent>& sent, const Value& value) {
  return std::all_of(sent.begin(), sent.end(), [&](const Sent& s) {
    return value(*s.signature) == value(*sent.front().signature);
  });
}

template <class Value>
std::string WhoSentWhat(const std::vector<Sent>& sent, const Value& value) {
  std::string text;
  for (size_t i = 0; i < sent.size() && i < kListed; ++i) {
    text +=
        (i > 0 ? ", " : "") + DescribeRanks(sent[i].ranks) + " sent " + value(*sent[i].signature);
  }
  // A lower bound: nodes on the way drop signatures beyond a number (ShortenRefused).
  if (sent.size() > kListed)
    text += ", ... (at least " + std::to_string(sent.size()) + " signatures)";
  return text;
}

/// Of ranks with unequally many tensors: the names where they first differ; "" without names.
std::string FirstUnlikeName(const std::vector<Sent>& sent) {
  size_t most = 0;
  for (const Sent& one : sent) most = std::max(most, one.signature->tensors.size());
  for (size_t t = 0; t < most; ++t) {
    const auto name = [t](const Signature& s) -> std::string {
      return t < s.tensors.size() ? "\"" + s.tensors[t].name + "\"" : "nothing";
    };
    if (AllEqual(sent, name)) continue;
    const bool named = std::ranges::any_of(sent, [t](const Sent& one) {
      return t < one.signature->tensors.size() && !one.signature->tensors[t].name.empty();
    });
    return named ? "; the first difference: " + WhoSentWhat(sent, name) : "";
  }
  return "";
}

/// Names come before dtypes and shapes: ranks that put other tensors into a group mostly differ in
/// all of these.
std::string TensorMismatch(const std::vector<Sent>& sent, size_t t) {
  const auto tensor = [t](const Signature& s) -> const TensorSignature& { return s.tensors[t]; };
  const TensorSignature& first = tensor(*sent.front().signature);
  if (!AllEqual(sent, [&](const Signature& s) { return tensor(s).name; })) {
    return WhoSentWhat(sent,
                       [&](const Signature& s) { return "tensor \"" + tensor(s).name + "\""; }) +
           "; the tensors of a group must be equal";
  }
  const bool dtypes = AllEqual(sent, [&](const Signature& s) { return tensor(s).dtype; });
  const std::string what = first.name.empty() ? "" : "tensor \"" + first.name + "\": ";
  const bool rows = RowsMayDiffer(sent.front().signature->kind);
  return what + WhoSentWhat(sent, [&](const Signature& s) { return Describe(tensor(s)); }) +
         (!dtypes ? "; dtypes must be equal"
          : rows  ? "; only the first dimension, shown as 0, may differ"
                  : "; shapes must be equal");
}

/// What the user called.
std::string FunctionOf(const Signature& signature) {
  return CalledAs(signature.kind, signature.function);
}

std::string WhoCalledWhat(const std::vector<Sent>& sent) {
  std::string text;
  for (size_t i = 0; i < sent.size() && i < kListed; ++i) {
    text += (i > 0 ? ", " : "") + DescribeRanks(sent[i].ranks) + " called " +
            FunctionOf(*sent[i].signature);
  }
  return text;
}

/// Ranks that called different collectives under one name, one entry per collective; empty if all
/// called the same.
std::vector<Sent> ByFunction(const std::vector<Sent>& sent) {
  std::vector<Sent> calls;
  for (const Sent& one : sent) {
    const auto same = std::ranges::find_if(calls, [&](const Sent& call) {
      return FunctionOf(*call.signature) == FunctionOf(*one.signature);
    });
    if (same == calls.end()) {
      calls.push_back(one);
    } else {
      same->ranks.insert(same->ranks.end(), one.ranks.begin(), one.ranks.end());
    }
  }
  return calls.size() > 1 ? calls : std::vector<Sent>();
}

/// Of calls that add a process set, or remove one: their ranks are then its uid.
std::string SetMismatch(OpKind kind, const std::vector<Sent>& sent) {
  constexpr const char* kMust = "; process sets must be equal, in the same order of calls";
  if (kind == OpKind::kRemoveSet) {
    return WhoSentWhat(sent,
                       [](const Signature& s) {
                         return "process set " +
                                std::to_string(s.ranks.empty() ? -1 : s.ranks.front());
                       }) +
           kMust;
  }
  // Only kListed ranks are spelled out, which may be equal: then the message says where the lists
  // differ. FirstMismatch has found unequal ones.
  const std::vector<int32_t>& first = sent.front().signature->ranks;
  const auto unlike =
      std::ranges::find_if(sent, [&](const Sent& one) { return one.signature->ranks != first; });
  const auto at = std::ranges::mismatch(first, unlike->signature->ranks).in1 - first.begin();
  const auto listed = static_cast<std::ptrdiff_t>(kListed);
  return WhoSentWhat(sent, [](const Signature& s) { return DescribeRanks(s.ranks); }) +
         (at < listed ? "" : "; they differ from position " + std::to_string(at) + " on") + kMust;
}

/// From the coarse to the fine. Only the first difference is named, as the others often follow from
/// it.
std::string FirstMismatch(OpKind kind, const std::vector<Sent>& sent) {
  if (!AllEqual(sent, [](const Signature& s) { return s.kind; })) {
    return WhoSentWhat(sent, [](const Signature& s) { return "an " + std::string(Name(s.kind)); }) +
           "; collectives must be equal";
  }
  if (!AllEqual(sent, [](const Signature& s) { return s.ranks; })) return SetMismatch(kind, sent);
  for (const Aspect& aspect : kAspects) {
    if (&aspect == &kAspects[1]) {  // equally many tensors: compare them before all else
      const int t = FirstUnlikeTensor(sent);
      if (t >= 0) return TensorMismatch(sent, static_cast<size_t>(t));
    }
    if (!AllEqual(sent, aspect.value)) {
      return WhoSentWhat(sent, aspect.value) + "; " + aspect.must +
             (&aspect == &kAspects[0] ? FirstUnlikeName(sent) : "");
    }
  }
  return WhoSentWhat(sent, DescribeShort) + "; signatures must be equal";
}

/// What a rank did in `step`, which is its own or an earlier one: " ran 2 backward passes". A
/// StepCount reaches back one step, so of a rank that is further ahead only its step is known.
std::string DescribePasses(const StepCount& count, int64_t step, bool with_noun) {
  if (count.step > step + 1) return " is in step " + std::to_string(count.step);
  const bool has_stepped = count.step > step;
  const int32_t passes = has_stepped ? count.previous_passes : count.passes;
  const int32_t no_sync = has_stepped ? count.previous_no_sync_passes : count.no_sync_passes;
  std::string text = " ran " + (passes == 0 ? "no" : std::to_string(passes));
  if (with_noun || passes == 0) text += passes == 1 ? " backward pass" : " backward passes";
  if (no_sync > 0) text += " (" + std::to_string(no_sync) + " in no_sync())";
  return has_stepped ? text + " and called step()" : text;
}

/// Of ranks that do not count their backward passes.
std::string DescribeUncountedSteps(const KeyName& key, const std::vector<StepVotes>& steps) {
  std::string text = Describe(key) + ": ";
  for (size_t i = 0; i < steps.size() && i < kListed; ++i) {
    text += (i > 0 ? ", " : "") + DescribeRanks(steps[i].ranks) +
            (steps[i].ranks.size() == 1 ? " is" : " are") + " in step " +
            std::to_string(steps[i].count.step);
  }
  return text + "; all ranks must reduce gradients as often between two calls of step()";
}

}  // namespace

std::string DescribeRanks(std::vector<int32_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < kListed; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kListed) text += ", ... (" + std::to_string(ranks.size()) + " ranks)";
  return text;
}

std::string DescribeSeconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) * 1e-9);
  return text;
}

/// Every Answer to a query carries such a text, so a large group is only counted.
std::string DescribeShort(const Signature& signature) {
  if (!signature.ranks.empty()) return DescribeRanks(signature.ranks);
  if (signature.tensors.empty()) return "no tensor";
  if (signature.tensors.size() == 1) return Describe(signature.tensors.front());
  std::string text = std::to_string(signature.tensors.size()) + " tensors";
  for (size_t t = 0; t < signature.tensors.size() && signature.tensors.size() <= kSpelled; ++t) {
    const TensorSignature& tensor = signature.tensors[t];
    text += (t > 0 ? ", " : ": ") + (tensor.name.empty() ? "" : "\"" + tensor.name + "\" ") +
            Describe(tensor);
  }
  return text;
}

/// Sorted by rank, so that the text does not depend on the order in which votes arrived.
std::string DescribeMismatch(const KeyName& key, std::vector<Sent> sent) {
  for (Sent& one : sent) std::sort(one.ranks.begin(), one.ranks.end());
  std::sort(sent.begin(), sent.end(),
            [](const Sent& a, const Sent& b) { return a.ranks < b.ranks; });
  const std::vector<Sent> calls = ByFunction(sent);
  if (calls.empty()) return Describe(key) + ": " + FirstMismatch(key.kind, sent);
  return DescribeName(key) + ": " + WhoCalledWhat(calls) +
         "; all ranks must call the same collective under one name";
}

std::string MismatchedTensor(const std::vector<Sent>& sent) {
  const auto kind = [](const Signature& s) { return s.kind; };
  const auto count = [](const Signature& s) { return s.tensors.size(); };
  const int t = AllEqual(sent, kind) && AllEqual(sent, count) ? FirstUnlikeTensor(sent) : -1;
  return t < 0 ? "" : sent.front().signature->tensors[static_cast<size_t>(t)].name;
}

Status DescribeEnd(const KeyName& key, const Status& why) {
  FailureFacts facts = why.facts();
  facts.tensor = key.name;
  return {Code::kAborted, Describe(key) + ": " + why.message(), std::move(facts)};
}

std::string DescribeSteps(const KeyName& key, std::vector<StepVotes> steps) {
  for (StepVotes& one : steps) std::sort(one.ranks.begin(), one.ranks.end());
  std::sort(steps.begin(), steps.end(),
            [](const StepVotes& a, const StepVotes& b) { return a.ranks < b.ranks; });
  // Everything is said of the lowest step: a rank that is one step ahead reports what it did in it.
  const int64_t step =
      std::min_element(steps.begin(), steps.end(), [](const StepVotes& a, const StepVotes& b) {
        return a.count.step < b.count.step;
      })->count.step;
  const bool counted = std::any_of(steps.begin(), steps.end(), [](const StepVotes& one) {
    return one.count.passes > 0 || one.count.previous_passes > 0;
  });
  if (!counted) return DescribeUncountedSteps(key, steps);
  std::string text = Describe(key) + ": in step " + std::to_string(step);
  for (size_t i = 0; i < steps.size() && i < kListed; ++i) {
    text += (i > 0 ? ", " : " ") + DescribeRanks(steps[i].ranks) +
            DescribePasses(steps[i].count, step, i == 0);
  }
  if (steps.size() > kListed) text += ", ... (" + std::to_string(steps.size()) + " counts)";
  return text +
         "; all ranks must run the same number of backward passes between two calls of step()";
}

/// Texts beyond kListed may be empty: nodes on the way keep as many (kTexts in vote_tally.cc).
std::string DescribeFailures(const KeyName& key, const std::vector<RankText>& failed) {
  std::string text = Describe(key) + ": ";
  for (size_t i = 0; i < failed.size() && i < kListed; ++i) {
    text += (i > 0 ? "; rank " : "rank ") + std::to_string(failed[i].rank) +
            " failed: " + failed[i].text;
  }
  if (failed.size() > kListed) text += "; ... (" + std::to_string(failed.size()) + " ranks)";
  return text;
}

}  // namespace farandole
