// Stalls: who waits for whom, asked of every member and told to every rank. Nothing agreed changes.

#include <algorithm>
#include <cmath>

#include "coordinator/negotiation_impl.h"
#include "coordinator/negotiation_text.h"

namespace farandole {

int64_t Negotiation::Impl::Tick(int64_t now_ns) {
  now_ns_ = now_ns;
  if (now_ns >= next_scan_ns_) ReportOwnStalls();
  CloseQueries(true);
  int64_t next_ns = next_scan_ns_;
  for (const Query& query : queries_) next_ns = std::min(next_ns, query.deadline_ns);
  return next_ns;
}

/// Looks at all keys, but at most about once per stall time.
void Negotiation::Impl::ReportOwnStalls() {
  next_scan_ns_ = kNever;
  for (KeyId id = 0; id < keys_.size(); ++id) {
    Key& key = keys_.At(id);
    if (!key.pending || key.stalled) continue;
    if (now_ns_ - key.since_ns < options_.stall_ns) {
      next_scan_ns_ = std::min(next_scan_ns_, key.since_ns + options_.stall_ns);
      continue;
    }
    key.stalled = true;
    Stall(id);
  }
}

Status Negotiation::Impl::ReceiveStall(const UpMessage& message) {
  const SetState* set = sets_.Find(message.key.set);
  if (set == nullptr) return Internal("protocol: a stall in an unknown process set");
  if (!set->live) return {};
  const KeyId id = keys_.Intern(message.key);
  // The decision that ends this stall is on its way down.
  if (message.number < keys_.At(id).closed) return {};
  Stall(id);
  return {};
}

void Negotiation::Impl::Stall(KeyId id) {
  Key& key = keys_.At(id);
  if (key.round.stalled) return;
  key.round.stalled = true;
  if (!IsRoot()) {
    note_.type = UpType::kStall;
    note_.number = last_number_;
    note_.key = key.name;
    outlet_.SendUp(sets_.parent(), note_);
    return;
  }
  if (key.round.sent) return;  // ready: it waits for the window, not for a rank
  NewDecision(DownType::kQuery, key.name.set).key = key.name;
  Emit();
}

void Negotiation::Impl::ApplyQuery(const DownMessage& message) {
  const SetState& set = *sets_.Find(message.set);
  Query query;
  query.number = message.number;
  query.key = keys_.Intern(message.key);
  query.since_ns = now_ns_;
  // Deeper nodes give up earlier, so that what they have still arrives in time.
  const double share = std::pow(0.8, sets_.depth());
  query.deadline_ns =
      now_ns_ + static_cast<int64_t>(share * static_cast<double>(options_.answer_wait_ns));
  query.answered.resize(set.branches.size(), false);
  query.awaited = set.contributors - (set.member ? 1 : 0);
  if (set.member) query.answers.push_back(OwnAnswer(keys_.At(query.key)));
  queries_.push_back(std::move(query));
}

Answer Negotiation::Impl::OwnAnswer(const Key& key) const {
  Answer answer;
  answer.rank = options_.rank;
  answer.pending = key.pending;
  if (key.pending) {
    answer.signature = DescribeShort(key.own_bound ? key.own_bound->signature : *key.own);
  }
  if (last_submit_ns_ >= 0) {
    answer.last = Describe(sets_.ForUser(keys_.At(last_key_).name));
    answer.last_age_ns = std::max<int64_t>(0, now_ns_ - last_submit_ns_);
  }
  for (KeyId id = 0; id < keys_.size() && !key.pending; ++id) {
    const Key& other = keys_.At(id);
    const bool same_name = other.name.name == key.name.name && other.name.set == key.name.set;
    if (other.pending && same_name) answer.other_kind = Name(other.name.kind);
  }
  return answer;
}

Status Negotiation::Impl::ReceiveAnswers(int child, const UpMessage& message) {
  const auto it = std::find_if(queries_.begin(), queries_.end(),
                               [&](const Query& query) { return query.number == message.number; });
  if (it == queries_.end()) return {};  // closed meanwhile; its ranks were listed as silent
  const auto contributor = static_cast<size_t>(ContributorOfChild(child));
  if (it->answered[contributor]) return Internal("protocol: a second answer to one query");
  for (const Answer& answer : message.answers) {
    if (sets_.ContributorOf(answer.rank) != static_cast<int>(contributor)) {
      return Internal("protocol: an answer of a rank not in the branch");
    }
    it->answers.push_back(answer);
  }
  it->answered[contributor] = true;
  --it->awaited;
  CloseQueries(false);
  return {};
}

void Negotiation::Impl::CloseQueries(bool expired_only) {
  for (size_t i = 0; i < queries_.size();) {
    const bool expired = now_ns_ >= queries_[i].deadline_ns;
    if (expired_only ? !expired : queries_[i].awaited > 0) {
      ++i;
      continue;
    }
    const Query query = std::move(queries_[i]);
    queries_.erase(queries_.begin() + static_cast<std::ptrdiff_t>(i));
    CloseQuery(query);
  }
}

void Negotiation::Impl::CloseQuery(const Query& query) {
  if (IsRoot()) {
    Publish(query);
    return;
  }
  note_.type = UpType::kAnswer;
  note_.number = query.number;
  note_.answers = query.answers;
  outlet_.SendUp(sets_.parent(), note_);
}

void Negotiation::Impl::Publish(const Query& query) {
  const Key& key = keys_.At(query.key);
  if (key.closed > query.number || key.round.sent) return;  // decided, or about to be
  StallFacts facts;
  facts.key = sets_.ForUser(key.name);
  facts.waited_ns = options_.stall_ns + now_ns_ - query.since_ns;
  facts.answers = query.answers;
  for (const int32_t rank : sets_.Find(key.name.set)->info.ranks) {
    const bool answered = std::any_of(query.answers.begin(), query.answers.end(),
                                      [rank](const Answer& a) { return a.rank == rank; });
    if (!answered) facts.silent.push_back(rank);
    if (sets_.Joined(rank)) facts.joined.push_back(rank);
  }
  const std::string text = DescribeStall(facts);
  if (text.empty()) return;
  NewDecision(DownType::kReport, kGlobalSet).text = text;
  Emit();
}

}  // namespace farandole
