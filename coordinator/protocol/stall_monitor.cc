// Stalls: who waits for whom, asked of every member and reported by rank 0. Nothing agreed changes.

#include <algorithm>
#include <cmath>

#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/negotiation_impl.h"

namespace farandole {
namespace {

/// Stalls that come within this much of one another are one report.
constexpr int64_t kMostGatherNs = 500 * kNsPerMs;
constexpr int64_t GatherNs(int64_t stall_ns) { return std::min(stall_ns / 10, kMostGatherNs); }

/// Calls and ranks of the error of a stall shutdown.
constexpr size_t kMostErrorLines = 4;
/// Texts beyond so many bytes do not travel: a message is bounded however many ranks answer.
constexpr size_t kAnswerBytes = size_t{16} << 20;

void ShortenAnswers(std::vector<Answer>& answers) {
  size_t bytes = 0;
  for (Answer& answer : answers) {
    bytes += answer.signature.size() + answer.last.size();
    if (bytes <= kAnswerBytes) continue;
    answer.signature.clear();
    if (!answer.last.empty()) answer.last = "...";
  }
}

}  // namespace

int64_t Negotiation::Impl::Tick(int64_t now_ns) {
  now_ns_ = now_ns;
  if (now_ns >= next_scan_ns_) ReportOwnStalls();
  CloseQueries(true);
  AskStalled();
  ReportStalls();
  int64_t next_ns = std::min(next_scan_ns_, NextReport());
  for (const Stalled& stalled : stalled_) next_ns = std::min(next_ns, stalled.next_ns);
  for (const Query& query : queries_) next_ns = std::min(next_ns, query.deadline_ns);
  return next_ns;
}

/// Looks at all keys that a caller may wait for, but at most about once per stall time.
void Negotiation::Impl::ReportOwnStalls() {
  next_scan_ns_ = kNever;
  for (KeyId id = 0; id < keys_.size(); ++id) {
    Key& key = keys_.At(id);
    if (!key.pending || key.stalled || !IsWaitedFor(key)) continue;
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
  if (set == nullptr && sets_.Ended(message.key.set)) return {};
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
    listener_.SendUp(sets_.parent(), note_);
    return;
  }
  if (key.round.sent) return;  // ready: it waits for the window, not for a rank
  stalled_.push_back({id, key.closed, now_ns_ - options_.stall_ns, now_ns_});
  AskStalled();
}

bool Negotiation::Impl::IsOpen(const Stalled& stalled) {
  const Key& key = keys_.At(stalled.key);
  return key.closed == stalled.closed && !key.round.sent;
}

/// First at once, then after twice, four times, ... the time it has stalled by then; and with one
/// those that are due soon, for one report.
void Negotiation::Impl::AskStalled() {
  std::erase_if(stalled_, [this](const Stalled& stalled) { return !IsOpen(stalled); });
  const bool is_due = std::ranges::any_of(
      stalled_, [this](const Stalled& stalled) { return now_ns_ >= stalled.next_ns; });
  const int64_t until_ns = now_ns_ + 4 * GatherNs(options_.stall_ns);
  for (Stalled& stalled : stalled_) {
    if (!is_due || until_ns < stalled.next_ns) continue;
    stalled.next_ns = kNever;
    const KeyName& name = keys_.At(stalled.key).name;
    NewDecision(DownType::kQuery, name.set).key = name;
    BroadcastDecision();
  }
}

Status Negotiation::Impl::ApplyQuery(const DownMessage& message) {
  const SetState* found = sets_.Find(message.set);
  if (found == nullptr || !found->live || message.key.set != message.set) {
    return Internal("protocol: a query about " + Describe(message.key) + " in process set number " +
                    std::to_string(message.set) + ", which is not live or not that key's");
  }
  const SetState& set = *found;
  Query query;
  query.number = message.number;
  query.key = keys_.Intern(message.key);
  // Deeper nodes give up earlier, so that what they have still arrives in time.
  const double share = std::pow(0.8, sets_.depth());
  query.deadline_ns =
      now_ns_ + static_cast<int64_t>(share * static_cast<double>(options_.answer_wait_ns));
  query.answered.resize(set.branches.size(), false);
  query.awaited = set.contributors - (set.member ? 1 : 0);
  if (set.member) query.answers.push_back(OwnAnswer(keys_.At(query.key)));
  queries_.push_back(std::move(query));
  return {};
}

Answer Negotiation::Impl::OwnAnswer(const Key& key) const {
  Answer answer;
  answer.rank = options_.rank;
  answer.pending = key.pending;
  if (key.pending) {
    const Signature& signature = OwnSignature(key);
    answer.signature = DescribeShort(signature);
    NameGradients(key.name, signature, answer);
  }
  if (last_submit_ns_ >= 0) {
    const bool named = last_submitted_.empty();
    answer.last = named ? DescribeCall(sets_.ForUser(keys_.At(last_key_).name)) : last_submitted_;
    answer.last_age_ns = std::max<int64_t>(0, now_ns_ - last_submit_ns_);
  }
  return answer;
}

Status Negotiation::Impl::ReceiveAnswers(int child, const UpMessage& message) {
  const auto it = std::find_if(queries_.begin(), queries_.end(),
                               [&](const Query& query) { return query.number == message.number; });
  if (it == queries_.end()) return {};  // closed meanwhile; its ranks were listed as silent
  const auto contributor = static_cast<size_t>(ContributorOfChild(child));
  const SetState& set = *sets_.Find(keys_.At(it->key).name.set);
  if (it->answered[contributor]) return Internal("protocol: a second answer to one query");
  if (!set.Contributes(static_cast<int>(contributor))) {
    return Internal("protocol: an answer of a branch that was not asked");
  }
  int32_t before = -1;
  for (const Answer& answer : message.answers) {
    if (sets_.ContributorOf(answer.rank) != static_cast<int>(contributor) ||
        !set.Contains(answer.rank) || answer.rank == before) {
      return Internal("protocol: an answer of rank " + std::to_string(answer.rank) +
                      ", which is not in the branch and the process set, or answered twice");
    }
    before = answer.rank;
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
    Query query = std::move(queries_[i]);
    queries_.erase(queries_.begin() + static_cast<std::ptrdiff_t>(i));
    CloseQuery(std::move(query));
  }
}

void Negotiation::Impl::CloseQuery(Query query) {
  if (IsRoot()) {
    Publish(query);
    return;
  }
  note_.type = UpType::kAnswer;
  note_.number = query.number;
  note_.answers = std::move(query.answers);
  bool is_named = false;  // those of one rank are enough, and the message stays small
  for (Answer& answer : note_.answers) {
    if (is_named) answer.names.clear();
    is_named = is_named || !answer.names.empty();
  }
  ShortenAnswers(note_.answers);
  listener_.SendUp(sets_.parent(), note_);
}

StallFacts Negotiation::Impl::FactsOf(const Query& query) const {
  const Key& key = keys_.At(query.key);
  StallFacts facts;
  facts.key = sets_.ForUser(key.name);
  facts.answers = query.answers;
  for (const int32_t rank : sets_.Find(key.name.set)->info.ranks) {
    const bool answered = std::any_of(query.answers.begin(), query.answers.end(),
                                      [rank](const Answer& a) { return a.rank == rank; });
    if (!answered) facts.silent.push_back(rank);
    if (sets_.Joined(rank)) facts.joined.push_back(rank);
  }
  return facts;
}

void Negotiation::Impl::Publish(const Query& query) {
  const auto stalled = std::ranges::find(stalled_, query.key, &Stalled::key);
  const bool is_open = stalled != stalled_.end() && query.number > stalled->closed;
  if (!is_open || !IsOpen(*stalled)) return;  // decided, or about to be
  const int64_t waited_ns = now_ns_ - stalled->since_ns;
  stalled->next_ns = now_ns_ < kNever / 2 ? now_ns_ + waited_ns : kNever;
  const int64_t end_ns = stalled->since_ns + options_.stall_shutdown_ns;
  if (now_ns_ < end_ns) stalled->next_ns = std::min(stalled->next_ns, end_ns);
  StallFacts facts = FactsOf(query);
  if (!IsStall(facts)) return;
  facts.waited_ns = waited_ns;
  if (gathered_.empty()) report_ns_ = now_ns_ + GatherNs(options_.stall_ns);
  gathered_.emplace_back(*stalled, std::move(facts));
}

/// A query that still runs may belong to the same report; it ends within answer_wait_ns.
int64_t Negotiation::Impl::NextReport() const {
  if (gathered_.empty()) return kNever;
  return report_ns_ + (queries_.empty() ? 0 : options_.answer_wait_ns);
}

void Negotiation::Impl::ReportStalls() {
  if (gathered_.empty() || now_ns_ < NextReport()) return;
  std::vector<StallFacts> stalls;
  std::vector<StallFacts> final_stalls;
  for (auto& [stalled, facts] : gathered_) {
    if (!IsOpen(stalled)) continue;
    stalls.push_back(std::move(facts));
    const int64_t waited_ns = stalls.back().waited_ns;
    const bool is_final = options_.stall_shutdown_ns > 0 && waited_ns >= options_.stall_shutdown_ns;
    if (is_final) final_stalls.push_back(stalls.back());
  }
  gathered_.clear();
  if (!stalls.empty()) listener_.OnStalls(stalls);
  if (!final_stalls.empty()) ShutDownFor(final_stalls);
}

void Negotiation::Impl::ShutDownFor(const std::vector<StallFacts>& stalls) {
  std::string text = "the job ends, as a tensor waits for longer than " +
                     DescribeSeconds(options_.stall_shutdown_ns) +
                     " (FARANDOLE_STALL_SHUTDOWN_S); ";
  for (const std::string& line : DescribeStalls(stalls, kMostErrorLines)) {
    text += (text.ends_with("; ") ? "" : "; ") + line;
  }
  NewDecision(DownType::kStallShutdown, kGlobalSet).text = text;
  BroadcastDecision();
}

}  // namespace farandole
