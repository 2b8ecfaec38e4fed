#include "test/simulation/oracle.h"

#include <algorithm>

namespace farandole::simulation {
namespace {

/// Topics of the event log, beside one per set.
constexpr int kJoins = -1;
constexpr int kSets = -3;
constexpr int kLeaves = -4;

bool Covered(const Vote& vote, int tensor) {
  return TestBit(vote.absent, tensor) || TestBit(vote.clean, tensor);
}

}  // namespace

Oracle::Oracle(const Scenario& scenario) : scenario_(scenario) {
  sets_[kGlobalSet].ranks = scenario.sets.front();
}

void Oracle::Fail(const std::string& what) {
  if (!failure_) failure_ = what;
}

template <class Value>
void Oracle::Agree(std::map<int, std::vector<Value>>& log,
                   std::map<std::pair<int, int>, size_t>& at, int topic, int rank, Value value,
                   const char* what) {
  std::vector<Value>& sequence = log[topic];
  const size_t position = at[{topic, rank}]++;
  if (position == sequence.size()) return sequence.push_back(std::move(value));
  if (sequence[position] == value) return;
  Fail(std::string(what) + " " + std::to_string(position) + " of topic " + std::to_string(topic) +
       " differs on rank " + std::to_string(rank));
}

Submission& Oracle::Submitted(int rank, int op, Signature signature, Vote vote) {
  const auto [it, added] = submissions_.try_emplace({op, rank});
  if (!added) Fail("the simulator submitted an operation twice");
  it->second.op = op;
  it->second.signature = std::move(signature);
  it->second.vote = std::move(vote);
  return it->second;
}

void Oracle::Handed(int rank, const WorkDecision& work, const std::vector<BatchPlan>& plans,
                    size_t count) {
  WorkCopy copy;
  copy.number = work.number;
  for (const DecidedKey& key : work.keys) {
    copy.keys.push_back({*key.name,
                         *key.signature,
                         {key.absent.begin(), key.absent.end()},
                         *key.skipped,
                         {key.rows.begin(), key.rows.end()}});
  }
  for (size_t i = 0; i < count; ++i) {
    auto& plan = copy.plans.emplace_back();
    for (const BatchEntry& entry : plans[i].entries)
      plan.first.emplace_back(entry.key, entry.tensor);
    plan.second = plans[i].absent;
  }
  Agree(works_, works_at_, static_cast<int>(work.set), rank, std::move(copy), "work");
}

void Oracle::SetAdded(int rank, const ProcessSetInfo& set) {
  std::string text = std::to_string(set.uid) + "/" + std::to_string(set.user_id) + ":";
  for (const int32_t member : set.ranks) text += std::to_string(member) + ",";
  sets_.try_emplace(set.uid, set);
  Agree(events_, events_at_, kSets, rank, std::move(text), "added set");
}

void Oracle::SetEnded(int rank, uint32_t set, const Status& why) {
  ended_.insert(set);
  Agree(events_, events_at_, kSets, rank, std::to_string(set) + " ended " + why.ToString(),
        "ended set");
}

void Oracle::JoinDone(int rank, int last) {
  Agree(events_, events_at_, kJoins, rank, std::to_string(last), "join");
}

void Oracle::Left(int rank, int left) {
  Agree(events_, events_at_, kLeaves, rank, std::to_string(left), "leave");
}

void Oracle::Report(int rank, const std::string& text) {
  if (text.starts_with("the table of")) return;
  if (!text.starts_with("stalled for")) {
    Fail("a strange report of rank " + std::to_string(rank) + ": " + text);
  }
}

void Oracle::Failed(int rank, const Status& why) {
  const std::vector<int32_t>& named = why.facts().ranks;
  const bool diverged = why.facts().kind == FailureKind::kDiverged;
  const auto is_odd = [](int32_t one) { return one % 2 != 0; };
  const bool names_both = std::ranges::any_of(named, is_odd) && !std::ranges::all_of(named, is_odd);
  const bool names_crashed = !named.empty() && std::ranges::all_of(named, [this](int32_t one) {
    return crashed_.contains(one);
  });
  const bool may_diverge = scenario_.part_at >= 0 && crashed_.empty();
  if (diverged ? may_diverge && names_both : names_crashed) return;
  Fail("rank " + std::to_string(rank) + " failed for no reason: " + why.ToString());
}

void Oracle::RoundEnded(const KeyName& key, int64_t number) {
  ended_rounds_[{key.set, SpaceOf(key.kind), key.name}].insert(number);
}

void Oracle::RecordSent(int from, int to, const KeyName& key, uint64_t signature) {
  ++records_[{from, to, KeyTuple{key.set, SpaceOf(key.kind), key.name}, signature}];
}

const std::vector<int32_t>* Oracle::RanksOf(uint32_t set) const {
  const auto it = sets_.find(set);
  return it == sets_.end() ? nullptr : &it->second.ranks;
}

void Oracle::ValidateRound() {
  std::map<int, Group> groups;
  for (const auto& [at, submission] : submissions_) {
    groups[at.first].emplace_back(at.second, &submission);
  }
  for (const auto& [op, group] : groups) JudgeGroup(op, group);
  JudgeRecords();
}

void Oracle::ValidateSurvivors() {
  for (const auto& [at, submission] : submissions_) {
    const bool over = submission.state == Submission::State::kDone ||
                      submission.state == Submission::State::kEnded;
    const bool is_left_to_planes =
        submission.state == Submission::State::kRunning && shut_down_.contains(at.second);
    if (over || is_left_to_planes || crashed_.contains(at.second)) continue;
    Fail("operation " + std::to_string(at.first) + " never ended on rank " +
         std::to_string(at.second));
  }
}

void Oracle::JudgeGroup(int index, const Group& group) {
  const Op& op = scenario_.ops[static_cast<size_t>(index)];
  const Submission& first = *group.front().second;
  for (const auto& [rank, submission] : group) {
    const bool over = submission->state == Submission::State::kDone ||
                      submission->state == Submission::State::kEnded;
    const std::string where =
        "operation " + std::to_string(index) + " " + op.name + " on rank " + std::to_string(rank);
    if (!over) Fail(where + " never ended");
    // Where kinds differ and nobody was told before a rank left, each is told of its own.
    const bool own_words = op.flavour == Flavour::kDisagree && first.ended.code() == Code::kAborted;
    const bool alike = submission->state == first.state && submission->number == first.number &&
                       submission->ended.code() == first.ended.code() &&
                       (own_words || submission->ended.message() == first.ended.message());
    if (!alike) {
      Fail(where + " ended otherwise than on rank " + std::to_string(group.front().first) + ": " +
           submission->ended.ToString() + " against " + first.ended.ToString());
    }
  }
  if (failure_) return;
  if (first.state == Submission::State::kDone) return JudgeResult(op, group);
  JudgeEnded(op, group);
}

/// What must become of an operation that these ranks submitted and the other members did not.
Code Oracle::Expected(const Op& op, const Group& group, bool* runs) const {
  *runs = false;
  const Signature& signature = group.front().second->signature;
  bool failed = false;
  bool equal = true;
  for (const auto& [rank, submission] : group) {
    failed |= !submission->vote.failed.empty();
    equal &= submission->signature == signature;
  }
  if (failed) return Code::kAborted;
  if (!equal) return Code::kMismatch;
  if (op.kind == OpKind::kAddSet || op.kind == OpKind::kRemoveSet) {
    const bool valid = op.flavour != Flavour::kInvalid &&
                       (op.kind == OpKind::kRemoveSet || signature.ranks.back() < scenario_.size);
    return valid ? Code::kOk : Code::kInvalidArgument;
  }
  *runs = signature.tensors.empty();
  const auto& members = scenario_.sets[static_cast<size_t>(op.set)];
  const bool root_is_member = std::binary_search(members.begin(), members.end(), signature.root);
  bool root_missing = !root_is_member;
  for (int t = 0; t < static_cast<int>(signature.tensors.size()); ++t) {
    bool present = false;
    bool root_present = false;
    for (const auto& [rank, submission] : group) {
      present |= !Covered(submission->vote, t);
      root_present |= rank == signature.root && !TestBit(submission->vote.absent, t);
    }
    *runs |= present;
    root_missing |= present && !root_present;
  }
  const bool refused =
      (signature.kind == OpKind::kBroadcast && root_missing) || NeedsAbsent(op, group);
  if (!*runs || !refused) return Code::kOk;
  *runs = false;
  return Code::kMismatch;
}

/// A rank is absent from a tensor of an alltoall that runs.
bool Oracle::NeedsAbsent(const Op& op, const Group& group) const {
  const Signature& signature = group.front().second->signature;
  if (signature.kind != OpKind::kAlltoall) return false;
  const std::vector<int32_t>& ranks = scenario_.sets[static_cast<size_t>(op.set)];
  for (int t = 0; t < static_cast<int>(signature.tensors.size()); ++t) {
    bool runs = false;
    bool needed = false;
    for (size_t p = 0; p < ranks.size(); ++p) {
      const auto one = std::find_if(group.begin(), group.end(),
                                    [&](const auto& voted) { return voted.first == ranks[p]; });
      runs |= one != group.end() && !Covered(one->second->vote, t);
      const bool absent = one == group.end() || TestBit(one->second->vote.absent, t);
      needed |= absent;
    }
    if (runs && needed) return true;
  }
  return false;
}

void Oracle::JudgeEnded(const Op& op, const Group& group) {
  const Submission& first = *group.front().second;
  bool runs = false;
  const Code expected = Expected(op, group, &runs);
  uint32_t uid = kGlobalSet;
  for (const auto& [id, info] : sets_) {
    if (info.ranks == scenario_.sets[static_cast<size_t>(op.set)]) uid = id;
  }
  const bool set_ended = first.ended.code() == Code::kAborted && ended_.count(uid) != 0;
  if (set_ended) return;
  if (runs || first.ended.code() != expected) {
    Fail(op.name + ": ended with " + first.ended.ToString() + ", expected " +
         (runs ? "a result" : CodeName(expected)));
  }
}

/// Every contribution is in the batch, and nothing else.
void Oracle::JudgeResult(const Op& op, const Group& group) {
  const Submission& first = *group.front().second;
  bool runs = false;
  const Code expected = Expected(op, group, &runs);
  if (!runs) return Fail(op.name + ": ran, expected " + CodeName(expected));
  const DecidedCopy* decided = nullptr;
  for (const WorkCopy& work : works_[static_cast<int>(first.set)]) {
    if (work.number != first.number) continue;
    for (const DecidedCopy& key : work.keys) {
      if (key.name.name == op.name && SpaceOf(key.name.kind) == SpaceOf(op.kind)) decided = &key;
    }
  }
  if (decided == nullptr) return Fail(op.name + ": ran without a work");
  if (decided->signature != first.signature) Fail(op.name + ": ran with another signature");
  const auto tensors = static_cast<int>(first.signature.tensors.size());
  std::map<int32_t, const Submission*> by_rank;
  for (const auto& [rank, submission] : group) by_rank[rank] = submission;
  Mask skipped;
  for (int t = 0; t < tensors; ++t) {
    const bool nobody = std::all_of(group.begin(), group.end(),
                                    [t](const auto& one) { return Covered(one.second->vote, t); });
    if (nobody) SetBit(skipped, t, tensors);
  }
  std::vector<RankMask> absent;
  for (const int32_t rank : sets_[first.set].ranks) {
    const auto it = by_rank.find(rank);
    RankMask one{rank, {}};
    for (int t = 0; t < tensors; ++t) {
      const bool out = it == by_rank.end() || TestBit(it->second->vote.absent, t);
      if (out && !TestBit(skipped, t)) SetBit(one.mask, t, tensors);
    }
    if (AnyBit(one.mask)) absent.push_back(std::move(one));
  }
  if (decided->skipped != skipped) Fail(op.name + ": other tensors were skipped than expected");
  if (decided->absent != absent) {
    Fail(op.name + ": the contributors of decision " + std::to_string(first.number) +
         " are not those that submitted");
  }
}

/// A new tensor's record crosses a link at most twice in each direction. Rounds that ended in a
/// refusal or a skip decide nothing and do not count.
void Oracle::JudgeRecords() {
  if (scenario_.max_ids < 65'536 || scenario_.forgets) return;
  for (const auto& [link, count] : records_) {
    const KeyTuple& key = std::get<2>(link);
    const OpKind kind = std::get<OpKind>(key);
    if (kind == OpKind::kAddSet || kind == OpKind::kRemoveSet) continue;  // they get no id
    const auto rounds = ended_rounds_.find(key);
    const size_t ended = rounds == ended_rounds_.end() ? 0 : rounds->second.size();
    if (static_cast<size_t>(count) <= 2 + ended) continue;
    Fail("the record of " + std::get<std::string>(key) + " crossed the link " +
         std::to_string(std::get<0>(link)) + " -> " + std::to_string(std::get<1>(link)) + " " +
         std::to_string(count) + " times");
  }
}

}  // namespace farandole::simulation
