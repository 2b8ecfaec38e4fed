// Plays the scripts of negotiation.txt, a sentence per rule of docs/protocol.md, which says how
// they are written, and of divergence.txt.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "test/support/negotiation_job.h"

namespace farandole {
namespace {

using Words = std::vector<std::string>;
struct Script {
  std::string options;
  Words lines;
};
using Scripts = std::map<std::string, Script>;

Scripts ReadScripts(const std::string& file) {
  std::ifstream stream(FARANDOLE_TEST_SCRIPTS "/" + file);
  Scripts scripts;
  Script* script = nullptr;
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with("## ")) {
      const size_t end = std::min(line.find(" |"), line.size());
      script = &scripts[line.substr(3, end - 3)];
      script->options = line.substr(end);
    } else if (line.starts_with("    ")) {  // goes on
      script->lines.back() += line.substr(3);
    } else if (line[0] != '#') {
      script->lines.push_back(line);
    }
  }
  return scripts;
}

Words Split(const std::string& text, const std::string& by) {
  Words parts;
  for (size_t at = 0, end = 0; end != std::string::npos; at = end + by.size()) {
    end = text.find(by, at);
    parts.push_back(text.substr(at, end - at));
  }
  return parts;
}
/// What is before the first `by`, and what is behind it.
std::pair<std::string, std::string> Cut(const std::string& text, const std::string& by) {
  const size_t at = std::min(text.find(by), text.size());
  return {text.substr(0, at), text.substr(std::min(at + by.size(), text.size()))};
}

/// "0,4..2" is 0, 4, 3, 2.
std::vector<int32_t> Numbers(const std::string& text) {
  std::vector<int32_t> numbers;
  for (const std::string& part : Split(text, ",")) {
    const Words ends = Split(part, "..");
    const int last = std::stoi(ends.back()), by = std::stoi(ends[0]) <= last ? 1 : -1;
    for (int n = std::stoi(ends[0]); n != last + by; n += by) numbers.push_back(n);
  }
  return numbers;
}
template <class List>
std::string Listed(const List& numbers) {
  std::string text;
  for (const auto number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text.empty() ? "none" : text;
}
int64_t Ns(const std::string& seconds) { return std::llround(std::stod(seconds) * kNsPerSecond); }

NegotiationOptions OptionsOf(const std::string& text) {
  NegotiationOptions options;
  using Value = const std::string&;
  const std::map<std::string, std::function<void(Value)>> set = {
      {"ranks", [&](Value v) { options.parent.resize(static_cast<size_t>(std::stoi(v))); }},
      {"parent", [&](Value v) { options.parent = Numbers(v); }},
      {"window", [&](Value v) { options.window = std::stoi(v); }},
      {"fusion", [&](Value v) { options.fusion_threshold_bytes = std::stoi(v); }},
      {"ids", [&](Value v) { options.max_ids = static_cast<uint32_t>(std::stoi(v)); }},
      {"sets", [&](Value v) { options.max_live_sets = static_cast<uint32_t>(std::stoi(v)); }},
      {"stall", [&](Value v) { options.stall_ns = Ns(v); }},
      {"shutdown", [&](Value v) { options.stall_shutdown_ns = Ns(v); }},
      {"divergence", [&](Value v) { options.divergence_check = v == "yes"; }},
      {"in_order", [&](Value v) { options.in_order = v == "yes"; }},
      {"join_allreduce_only", [&](Value v) { options.join_allreduce_only = v == "yes"; }}};
  options.parent.resize(1);
  std::stringstream parts(text);
  for (std::string bar, name, value; parts >> bar >> name >> value;) set.at(name)(value);
  return options;
}

/// What a rank submits: "x allgather rows=3 set=1".
struct Call {
  explicit Call(const std::string& text) {
    using Value = const std::string&;
    const std::map<std::string, std::function<void(Value)>> take = {
        {"shape", [this](Value v) { shape = v; }},
        {"tensors", [this](Value v) { tensors = std::stoi(v); }},
        {"rows", [this](Value v) { vote.rows = {std::stoll(v)}; }},
        {"absent", [this](Value v) { vote.absent = Bits(std::stoull(v)); }},
        {"clean", [this](Value v) { vote.clean = Bits(std::stoull(v)); }},
        {"failed", [this](Value v) { vote.failed = v; }},
        {"set", [this](Value v) { set = static_cast<uint32_t>(std::stoi(v)); }},
        {"root", [this](Value v) { signature.root = std::stoi(v); }},
        {"function", [this](Value v) { signature.function = v; }},
        {"step", [this](Value v) {
           const std::vector<int32_t> of = Numbers(v);
           vote.step = {of.at(0), of.at(1), of.at(2), of.at(3), 0};
         }}};
    const auto [words, why] = Cut(text, " failed=");
    if (!why.empty()) vote.failed = why;
    const Words parts = Split(words, " ");
    for (size_t i = 1; i < parts.size(); ++i) {
      const auto [key, value] = Cut(parts[i], "=");
      value.empty() ? FindKind(key) : take.at(key)(value);
    }
    Name(parts[0]);
    if (kind == OpKind::kBarrier || kind == OpKind::kStep) return;
    if (shape.empty()) shape = kind == OpKind::kAllgather ? "0,4" : "2";
    TensorSignature tensor{"", DType::kFloat32, {}};
    for (const std::string& extent : Split(shape, ",")) tensor.shape.push_back(std::stoll(extent));
    signature.tensors.assign(static_cast<size_t>(tensors), tensor);
  }
  void FindKind(const std::string& word) {
    for (int k = 0; !farandole::Name(kind).ends_with(word) && k <= static_cast<int>(kLastOpKind);
         ++k) {
      kind = static_cast<OpKind>(k);
    }
    EXPECT_TRUE(farandole::Name(kind).ends_with(word)) << word;
  }
  /// "x", "x*5000" or "t0..19".
  void Name(const std::string& name) {
    const auto [letter, times] = Cut(name, "*");
    names = {times.empty() ? name : std::string(static_cast<size_t>(std::stoi(times)), name[0])};
    if (name.find("..") == std::string::npos) return;
    names.clear();
    for (const int n : Numbers(name.substr(1))) names.push_back(name[0] + std::to_string(n));
  }

  Words names;
  std::string shape;
  int tensors = 1;
  OpKind kind = OpKind::kAllreduce;
  Signature signature;
  Vote vote;
  uint32_t set = kGlobalSet;
};

/// "..." is anything.
bool IsLike(const std::string& text, const std::string& pattern) {
  const Words parts = Split(pattern, "...");
  size_t end = parts[0].size();
  for (size_t i = 1; i < parts.size() && end <= text.size(); ++i) {
    const size_t at = text.find(parts[i], end);
    if (at == std::string::npos) return false;
    end = at + parts[i].size();
  }
  const bool is_whole = parts.size() == 1 ? text == pattern : text.ends_with(parts.back());
  return text.starts_with(parts[0]) && is_whole && end <= text.size();
}

class Stage {
 public:
  Stage(const Scripts& scripts, const Script& script)
      : scripts_(scripts),
        options_(OptionsOf(script.options)),
        job_(static_cast<int>(options_.parent.size()), options_) {
    Play(script);
  }

 private:
  void Play(const Script& script) {
    for (const std::string& line : script.lines) {
      const auto [times, body] = Cut(line, " times | ");
      const bool repeats = !body.empty();
      for (int turn = 1; turn <= (repeats ? std::stoi(times) : 1); ++turn) {
        for (std::string text : Split(repeats ? body : line, " | ")) {
          const size_t at = repeats ? text.find('$') : std::string::npos;
          if (at != std::string::npos) text.replace(at, 1, std::to_string(turn));
          SCOPED_TRACE(text);
          Do(text);
        }
        job_.Settle();
      }
    }
  }
  void Do(const std::string& text) {
    const auto [verb, rest] = Cut(text, " ");
    if (verb.ends_with(":")) {
      const auto [call, outcome] = Cut(rest, " => ");
      const auto [what, object] = Cut(call, " ");
      const std::string all = "0.." + std::to_string(job_.size() - 1);
      for (const int r : Numbers(verb == "all:" ? all : verb))
        Do(r, what, object, outcome.empty() ? "OK" : outcome);
      return;
    }
    job_.Settle();
    if (verb == "play") {
      Play(scripts_.at(rest));
    } else if (verb == "done") {
      Finish(rest);
    } else if (verb == "tick") {
      for (const int second : Numbers(rest)) job_.Tick(second * kNsPerSecond);
    } else if (verb == "pass") {
      for (const int64_t end = now_ns_ + Ns(rest); now_ns_ < end;) {
        job_.Tick(now_ns_ += 10 * kNsPerMs);
      }
    } else if (verb == "records" || verb == "messages") {
      ExpectCount(-1, verb, verb == "records" ? job_.records() : job_.messages(), rest);
    } else {
      EXPECT_EQ(text, "settle");
    }
  }
  /// All that runs, each of one batch; or so many batches of the last decision.
  void Finish(const std::string& batches) {
    if (!batches.empty()) return job_.Finish(std::stoi(batches));
    for (int r = 0; r < job_.size(); ++r) {
      for (const int64_t number : std::exchange(job_[r].running, {}))
        job_.At(r).BatchDone(number, 0);
    }
    job_.Settle();
  }
  void Do(int r, const std::string& verb, const std::string& object, const std::string& wanted) {
    JobRank& rank = job_[r];
    if (verb == "submits" || verb == "waits") {
      rank.is_blocked = verb == "waits";
      const Call call(object);
      for (const std::string& name : call.names) {
        Expect(job_.Submit(r, name, call.signature, call.vote, call.kind, call.set), wanted);
      }
    } else if (verb == "adds" || verb == "removes") {
      Signature set;
      set.ranks = Numbers(object);
      const OpKind kind = verb == "adds" ? OpKind::kAddSet : OpKind::kRemoveSet;
      Expect(job_.Submit(r, verb, set, {}, kind), wanted);
    } else if (verb == "joins") {
      Expect(rank.negotiation.Join(), wanted);
    } else if (verb == "announces") {
      Expect(rank.negotiation.AnnounceLeave(), wanted);
    } else if (verb == "leaves") {
      FailureFacts why;
      why.cause = object;
      Expect(rank.negotiation.Leave(why), wanted);
    } else if (verb == "batch") {  // of the last decision, or of the one that is named behind it
      const auto [index, number] = Cut(object, " ");
      rank.negotiation.BatchDone(number.empty() ? rank.number : std::stoll(number),
                                 std::stoi(index));
    } else if (verb == "ticks") {  // and hears nothing
      for (const int second : Numbers(object)) (void)job_.At(r).Tick(second * kNsPerSecond);
    } else if (verb == "sends") {  // up, now
      rank.negotiation.Flush();
      EXPECT_EQ(std::to_string(rank.up_used), object) << "rank " << r;
    } else if (verb == "blocked") {
      rank.is_blocked = object == "yes";
    } else if (verb == "threads") {
      rank.knows_all_threads = object == "known";
    } else if (verb == "is") {  // what its program does, which it tells when asked; "?": not yet
      rank.tells_activity = true;
      rank.activity.reset();
      if (object != "?") rank.activity = {FailureKind::kBlockedInPython, object};
    } else if (verb == "now") {  // a check before anything is delivered
      const auto [what, value] = Cut(object, " ");
      Check(r, what, value);
    } else {
      job_.Settle();
      Check(r, verb, object);
    }
  }
  static void Expect(const Status& status, const std::string& wanted) {
    EXPECT_TRUE(IsLike(status.ToString(), wanted)) << status.ToString();
  }
  void ExpectCount(int r, const std::string& what, int64_t count, const std::string& wanted) {
    const int64_t now = count - std::exchange(seen_[{r, what}], count);
    const int64_t bound = std::stoll(wanted.substr(wanted.find_first_not_of("<>")));
    EXPECT_TRUE(wanted[0] == '<'   ? now < bound
                : wanted[0] == '>' ? now > bound
                                   : now == bound)
        << "rank " << r << ": " << now;
  }
  void Check(int r, const std::string& what, const std::string& wanted) {
    const JobRank& rank = job_[r];
    const std::map<std::string, int64_t> counts = {{"runs", rank.works},
                                                   {"ended", std::ssize(rank.ended)},
                                                   {"reports", std::ssize(rank.reports)},
                                                   {"dies", std::ssize(rank.shutdowns)},
                                                   {"added", std::ssize(rank.added)},
                                                   {"asked", rank.asked},
                                                   {"questions", rank.questions}};
    const bool is_number = wanted.find_first_not_of("<>0123456789") == std::string::npos;
    if (is_number && counts.contains(what)) return ExpectCount(r, what, counts.at(what), wanted);
    const std::string found = Find(rank, what);
    EXPECT_TRUE(IsLike(found, wanted)) << "rank " << r << ": " << found;
  }
  static std::string Find(const JobRank& rank, const std::string& what) {
    const auto number = [](auto value) { return std::to_string(value); };
    const auto yes = [](bool value) { return std::string(value ? "yes" : "no"); };
    if (what == "ends") return rank.ended.empty() ? "" : rank.ended.back().ToString();
    if (what == "dies") return rank.shutdowns.empty() ? "" : rank.failed.ToString();
    if (what == "reports") return rank.reports.empty() ? "" : rank.reports.front();
    if (what == "over") return rank.over.empty() ? "" : rank.over.back().second.ToString();
    if (what == "fault") return rank.negotiation.fault().ToString();
    if (what == "keys") return number(rank.keys);
    if (what == "plans") return number(rank.plans);
    if (what == "rows") return Listed(rank.rows);
    if (what == "skipped") return Listed(rank.skipped);
    if (what == "mine") return yes(rank.mine);
    if (what == "pending") return number(rank.negotiation.Pending());
    if (what == "known") return number(rank.negotiation.Sizes().known);
    if (what == "busy") return yes(rank.negotiation.Busy());
    if (what == "joined") return number(rank.last_joined);
    if (what == "shut_down") return yes(rank.shut_down);
    if (what == "uid") return number(rank.added.at(rank.added.size() - 1).uid);
    if (what == "id") return number(rank.added.at(rank.added.size() - 1).user_id);
    if (what == "absent") {
      std::vector<int32_t> ranks;
      for (const RankMask& one : rank.absent) ranks.push_back(one.rank);
      return Listed(ranks);
    }
    if (what != "blames") return "unknown";
    const Status& failed = rank.shutdowns.empty() ? rank.ended.back() : rank.failed;
    return Listed(failed.facts().ranks) + " " + FailureKindName(failed.facts().kind) +
           (failed.facts().tensor.empty() ? "" : " in " + failed.facts().tensor);
  }

  const Scripts& scripts_;
  const NegotiationOptions options_;
  NegotiationJob job_;
  int64_t now_ns_ = kNsPerSecond;
  std::map<std::pair<int, std::string>, int64_t> seen_;
};

class NegotiationScript : public testing::TestWithParam<std::string> {};

TEST_P(NegotiationScript, IsKept) {
  const auto [file, name] = Cut(GetParam(), ":");
  const Scripts scripts = ReadScripts(file);
  const Stage stage(scripts, scripts.at(name));
}

Words NamesIn(const std::string& file) {
  Words names;
  for (const auto& [name, script] : ReadScripts(file)) {
    if (name[0] >= 'A' && name[0] <= 'Z') names.push_back(file + ":" + name);
  }
  return names;
}
std::string NameOf(const testing::TestParamInfo<std::string>& one) {
  return Cut(one.param, ":").second;
}
INSTANTIATE_TEST_SUITE_P(Protocol, NegotiationScript,
                         testing::ValuesIn(NamesIn("protocol/negotiation.txt")), NameOf);
INSTANTIATE_TEST_SUITE_P(Divergence, NegotiationScript,
                         testing::ValuesIn(NamesIn("diagnosis/divergence.txt")), NameOf);

}  // namespace
}  // namespace farandole
