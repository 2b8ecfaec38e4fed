#include "coordinator/diagnosis/stall_monitor.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "coordinator/protocol/error_text.h"

namespace farandole {
namespace {

/// Stalls that come within this much of one another are one report.
constexpr int64_t kMostGatherNs = 500 * kNsPerMs;
constexpr int64_t GatherNs(int64_t stall_ns) { return std::min(stall_ns / 10, kMostGatherNs); }

/// Calls and ranks of the error of a stall shutdown.
constexpr size_t kMostErrorLines = 4;
/// Texts beyond so many bytes do not travel: a message is bounded however many ranks answer.
constexpr size_t kAnswerBytes = size_t{16} << 20;
/// So often it is looked whether this rank's activity is known, and at most for so long.
constexpr int64_t kActivityPollNs = 10 * kNsPerMs;
constexpr int64_t kMostActivityNs = kNsPerSecond;

/// A shortened `last` is not empty, which would say that the rank has submitted nothing.
void ShortenAnswers(std::vector<Answer>& answers) {
  size_t bytes = 0;
  for (Answer& answer : answers) {
    bytes += answer.signature.size() + answer.last.size() + answer.doing.text.size();
    if (bytes <= kAnswerBytes) continue;
    answer.signature.clear();
    answer.doing.text.clear();
    if (!answer.last.empty()) answer.last = "...";
  }
}

}  // namespace

void StallMonitor::OnSubmitted(KeyId id) {
  Key& key = node_.keys.Peek(id);
  key.stalled = false;
  key.since_ns = node_.now_ns;
  if (IsWaitedFor(key)) {
    last_key_ = id;
    last_submit_ns_ = node_.now_ns;
    last_submitted_.clear();
  }
  // A scan that is due earlier finds this key and plans the next one.
  const int64_t look_ns = node_.options.LookNs();
  if (look_ns > 0) next_scan_ns_ = std::min(next_scan_ns_, node_.now_ns + look_ns);
}

/// A rank's last submission is named in its answers even after its key is gone.
void StallMonitor::OnKeyReleased(KeyId id) {
  if (id != last_key_ || !last_submitted_.empty()) return;
  last_submitted_ = DescribeCall(node_.sets.ForUser(node_.keys.At(id).name));
}

bool StallMonitor::Knows(KeyId id) const {
  return std::ranges::find(queries_, id, &Query::key) != queries_.end() ||
         std::ranges::find(stalled_, id, &Stalled::key) != stalled_.end() ||
         std::ranges::any_of(gathered_, [id](const auto& one) { return one.first.key == id; });
}

/// Every node drops these queries at the same decision, so nobody waits for the answers; those in
/// flight find no query and are dropped too.
void StallMonitor::OnSetEnded(const SetState& set) {
  const auto is_in_set = [&](KeyId key) { return node_.keys.At(key).name.set == set.info.uid; };
  std::erase_if(queries_, [&](const Query& query) { return is_in_set(query.key); });
  std::erase_if(unheard_, [&](const auto& unheard) { return is_in_set(unheard.first); });
  std::erase_if(stalled_, [&](const Stalled& stalled) { return is_in_set(stalled.key); });
  std::erase_if(gathered_, [&](const auto& stall) { return is_in_set(stall.first.key); });
}

/// Queries that are out of time are closed before the report, which then contains what they
/// brought.
int64_t StallMonitor::Tick() {
  if (node_.now_ns >= next_scan_ns_) ReportOwnStalls();
  if (node_.now_ns >= unheard_ns_) ReportUnheard();
  AnswerOwn();
  CloseQueries(true);
  AskStalled();
  ReportStalls();
  int64_t next_ns = std::min({next_scan_ns_, unheard_ns_, NextReport()});
  for (const Stalled& stalled : stalled_) next_ns = std::min(next_ns, stalled.next_ns);
  for (const Query& query : queries_) {
    next_ns = std::min(next_ns, query.deadline_ns);
    if (query.own_due_ns != kNever) next_ns = std::min(next_ns, node_.now_ns + kActivityPollNs);
  }
  return next_ns;
}

/// Looks at all keys that a caller may wait for, but at most about once per stall time.
void StallMonitor::ReportOwnStalls() {
  next_scan_ns_ = kNever;
  if (node_.options.LookNs() <= 0) return;
  ForgetHeard();
  for (KeyId id = 0; id < node_.keys.size(); ++id) {
    Key& key = node_.keys.Peek(id);
    if (!node_.keys.IsPending(id) || key.stalled || !IsWaitedFor(key)) continue;
    if (node_.now_ns - key.since_ns < node_.options.LookNs()) {
      next_scan_ns_ = std::min(next_scan_ns_, key.since_ns + node_.options.LookNs());
      continue;
    }
    key.stalled = true;
    Stall(id);
    if (node_.sets.Find(key.name.set)->IsDecidedHere()) continue;
    if (unheard_.empty()) unheard_ns_ = node_.now_ns + node_.options.answer_wait_ns;
    unheard_.emplace_back(id, key.closed);
  }
}

/// Whoever decides asks about each stall that it hears of, at once, or has decided.
void StallMonitor::ForgetHeard() {
  std::erase_if(unheard_, [this](const auto& unheard) {
    const Key& key = node_.keys.At(unheard.first);
    return !key.pending || key.closed != unheard.second || key.round.asked;
  });
}

/// One line for all; the error comes when the oldest has waited for the shutdown time.
void StallMonitor::ReportUnheard() {
  ForgetHeard();
  unheard_ns_ = kNever;
  if (unheard_.empty()) return;
  const Key& key = node_.keys.At(unheard_.front().first);
  const std::string text =
      DescribeUnheard(node_.sets.ForUser(key.name), unheard_.size(), node_.now_ns - key.since_ns,
                      node_.options.rank, node_.sets.parent());
  const int64_t shutdown_ns = node_.options.stall_shutdown_ns;
  if (shutdown_ns > 0 && node_.now_ns - key.since_ns >= shutdown_ns) {
    return node_.listener.OnStallShutdown(ShutdownError(text));
  }
  if (shutdown_ns > 0) unheard_ns_ = key.since_ns + shutdown_ns;
  node_.listener.OnReport(text);
  listener_.OnStallReported();
}

Status StallMonitor::ReceiveUp(int child, const UpMessage& message) {
  if (message.type == UpType::kStall) return ReceiveStall(message);
  return message.type == UpType::kAnswer ? ReceiveAnswers(child, message) : Status();
}

Status StallMonitor::ReceiveDown(const DownMessage& message) {
  if (message.type == DownType::kReport) Read(message);
  return message.type == DownType::kQuery ? ReceiveQuery(message) : Status();
}

/// Who reports may be no member of the set.
void StallMonitor::Read(const DownMessage& report) {
  const bool is_own = LevelOfNumber(report.number) == node_.sets.depth();
  if (!is_own && std::ranges::find(report.ranks, node_.options.rank) == report.ranks.end()) return;
  std::istringstream lines(report.text);
  for (std::string line; std::getline(lines, line);) node_.listener.OnReport(line);
  listener_.OnStallReported();
}

/// The key may be new here: votes wait below until all ranks of a branch have voted, stalls do not.
Status StallMonitor::ReceiveStall(const UpMessage& message) {
  const SetState* set = node_.sets.Find(message.key.set);
  if (set == nullptr && node_.sets.Ended(message.key.set)) return {};
  if (set == nullptr) return Internal("protocol: a stall in an unknown process set");
  if (!set->live) return {};
  if (set->decided_at == SetState::DecidedAt::kBelow) {
    return Internal("protocol: a stall in a process set that is decided below");
  }
  const KeyId id = node_.keys.Intern(message.key);
  // The decision that ends this stall is on its way down.
  if (message.number < node_.keys.At(id).closed) return {};
  Stall(id);
  return {};
}

/// Once per round on each node, whichever rank below reports it first.
void StallMonitor::Stall(KeyId id) {
  Key& key = node_.keys.At(id);
  if (key.round.stalled) return;
  key.round.stalled = true;
  const SetState& set = *node_.sets.Find(key.name.set);
  if (!set.IsDecidedHere()) {
    UpMessage stall;
    stall.type = UpType::kStall;
    stall.number = set.last_number;
    stall.key = key.name;
    node_.SendUp(stall);
    return;
  }
  // Ready: it waits for the window, not for a rank; who waits learns that it was heard.
  if (key.round.sent) return AskAbout(id);
  stalled_.push_back({id, key.closed, node_.now_ns - node_.options.LookNs(), node_.now_ns});
  AskStalled();
}

bool StallMonitor::IsOpen(const Stalled& stalled) const {
  const Key& key = node_.keys.At(stalled.key);
  return key.closed == stalled.closed && !key.round.sent;
}

/// First at once, then after twice, four times, ... the time it has stalled by then; and with one
/// those that are due soon, for one report.
void StallMonitor::AskStalled() {
  std::erase_if(stalled_, [this](const Stalled& stalled) { return !IsOpen(stalled); });
  const bool is_due = std::ranges::any_of(
      stalled_, [this](const Stalled& stalled) { return node_.now_ns >= stalled.next_ns; });
  const int64_t until_ns = node_.now_ns + 4 * GatherNs(node_.options.LookNs());
  for (Stalled& stalled : stalled_) {
    if (!is_due || until_ns < stalled.next_ns) continue;
    // Not again while this query runs; Publish sets the next time.
    stalled.next_ns = kNever;
    AskAbout(stalled.key);
  }
}

void StallMonitor::AskAbout(KeyId id) {
  DownMessage query;
  query.type = DownType::kQuery;
  query.key = node_.keys.At(id).name;
  query.set = query.key.set;
  decider_.Send(std::move(query));
}

/// It is closed at once where no branch is asked.
Status StallMonitor::ReceiveQuery(const DownMessage& message) {
  const SetState* found = node_.sets.Find(message.set);
  if (found == nullptr || !found->live || message.key.set != message.set) {
    return Internal("protocol: a query about " + Describe(message.key) + " in process set number " +
                    std::to_string(message.set) + ", which is not live or not that key's");
  }
  const SetState& set = *found;
  Query query;
  query.number = message.number;
  query.key = node_.keys.Intern(message.key);
  node_.keys.At(query.key).round.asked = true;
  // Deeper nodes give up earlier, so that what they have still arrives in time.
  const double share = std::pow(0.8, node_.sets.depth());
  query.deadline_ns = node_.now_ns + static_cast<int64_t>(
                                         share * static_cast<double>(node_.options.answer_wait_ns));
  // Ranks that have joined answer as well; FactsOf lists them, so that nobody calls them missing.
  query.answered.resize(set.branches.size(), false);
  query.awaited = set.contributors;
  if (set.member && AsksActivity(node_.keys.At(query.key))) {
    const int64_t wait_ns = (query.deadline_ns - node_.now_ns) / 2;
    query.own_due_ns = node_.now_ns + std::min(wait_ns, kMostActivityNs);
  } else if (set.member) {
    query.answers.push_back(OwnAnswer(node_.keys.At(query.key)));
    --query.awaited;
  }
  queries_.push_back(std::move(query));
  CloseQueries(false);
  return {};
}

/// Who waits for another operation is no riddle.
bool StallMonitor::AsksActivity(const Key& key) {
  const bool is_missing = !key.pending && !node_.sets.Joined(node_.options.rank);
  return is_missing && !node_.listener.IsBlocked() &&
         listener_.AskActivity(node_.listener.CallerIds(), node_.now_ns);
}

/// As soon as it is known what this rank does, or at the latest time without it.
void StallMonitor::AnswerOwn() {
  for (Query& query : queries_) {
    if (query.own_due_ns == kNever) continue;
    const std::optional<Activity> doing = listener_.FindActivity(node_.now_ns);
    if (!doing && node_.now_ns < query.own_due_ns) continue;
    Answer answer = OwnAnswer(node_.keys.At(query.key));
    if (doing && !answer.pending) answer.doing = *doing;
    query.answers.push_back(std::move(answer));
    query.own_due_ns = kNever;
    --query.awaited;
  }
  CloseQueries(false);
}

Answer StallMonitor::OwnAnswer(const Key& key) const {
  Answer answer;
  answer.rank = node_.options.rank;
  answer.pending = key.pending;
  if (key.pending) {
    const Signature& signature = key.OwnSignature();
    answer.signature = DescribeShort(signature);
    NameGradients(key.name, signature, answer);
  }
  if (last_submit_ns_ >= 0) {
    const bool named = last_submitted_.empty();
    answer.last =
        named ? DescribeCall(node_.sets.ForUser(node_.keys.At(last_key_).name)) : last_submitted_;
    answer.last_age_ns = std::max<int64_t>(0, node_.now_ns - last_submit_ns_);
  }
  return answer;
}

Status StallMonitor::ReceiveAnswers(int child, const UpMessage& message) {
  const auto it = std::find_if(queries_.begin(), queries_.end(),
                               [&](const Query& query) { return query.number == message.number; });
  if (it == queries_.end()) return {};  // closed meanwhile; its ranks were listed as silent
  const auto contributor = static_cast<size_t>(ContributorOfChild(child));
  const SetState& set = *node_.sets.Find(node_.keys.At(it->key).name.set);
  if (it->answered[contributor]) return Internal("protocol: a second answer to one query");
  if (!set.Contributes(static_cast<int>(contributor))) {
    return Internal("protocol: an answer of a branch that was not asked");
  }
  int32_t before = -1;
  for (const Answer& answer : message.answers) {
    if (node_.sets.ContributorOf(answer.rank) != static_cast<int>(contributor) ||
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

void StallMonitor::CloseQueries(bool expired_only) {
  for (size_t i = 0; i < queries_.size();) {
    const bool expired = node_.now_ns >= queries_[i].deadline_ns;
    if (expired_only ? !expired : queries_[i].awaited > 0) {
      ++i;
      continue;
    }
    Query query = std::move(queries_[i]);
    queries_.erase(queries_.begin() + static_cast<std::ptrdiff_t>(i));
    CloseQuery(std::move(query));
  }
}

void StallMonitor::CloseQuery(Query query) {
  if (node_.sets.Find(node_.keys.At(query.key).name.set)->IsDecidedHere()) {
    Publish(query);
    return;
  }
  UpMessage message;
  message.type = UpType::kAnswer;
  message.number = query.number;
  message.answers = std::move(query.answers);
  bool is_named = false;  // those of one rank are enough, and the message stays small
  for (Answer& answer : message.answers) {
    if (is_named) answer.names.clear();
    is_named = is_named || !answer.names.empty();
  }
  ShortenAnswers(message.answers);
  node_.SendUp(message);
}

/// O(ranks x answers), where the set is decided for, for each query that has ended.
StallFacts StallMonitor::FactsOf(const Query& query) const {
  const Key& key = node_.keys.At(query.key);
  StallFacts facts;
  facts.key = node_.sets.ForUser(key.name);
  facts.answers = query.answers;
  std::ranges::sort(facts.answers, {}, &Answer::rank);
  for (const int32_t rank : node_.sets.Find(key.name.set)->info.ranks) {
    const bool answered = std::any_of(query.answers.begin(), query.answers.end(),
                                      [rank](const Answer& a) { return a.rank == rank; });
    if (!answered) facts.silent.push_back(rank);
    if (node_.sets.Joined(rank)) facts.joined.push_back(rank);
  }
  return facts;
}

void StallMonitor::Publish(const Query& query) {
  const auto stalled = std::ranges::find(stalled_, query.key, &Stalled::key);
  // A query with a lower number asked about an earlier round of the key.
  const bool is_open = stalled != stalled_.end() && query.number > stalled->closed;
  if (!is_open || !IsOpen(*stalled)) return;  // decided, or about to be
  const int64_t waited_ns = node_.now_ns - stalled->since_ns;
  // Again when it has waited for twice as long; but no later than the shutdown time, since the job
  // ends only over a stall that a query has confirmed.
  stalled->next_ns = node_.now_ns < kNever / 2 ? node_.now_ns + waited_ns : kNever;
  const int64_t end_ns = stalled->since_ns + node_.options.stall_shutdown_ns;
  if (node_.now_ns < end_ns) stalled->next_ns = std::min(stalled->next_ns, end_ns);
  StallFacts facts = FactsOf(query);
  if (!IsStall(facts)) return;
  facts.waited_ns = waited_ns;
  if (gathered_.empty()) report_ns_ = node_.now_ns + GatherNs(node_.options.LookNs());
  gathered_.emplace_back(*stalled, std::move(facts));
}

/// A query that still runs may belong to the same report; it ends within answer_wait_ns.
int64_t StallMonitor::NextReport() const {
  if (gathered_.empty()) return kNever;
  return report_ns_ + (queries_.empty() ? 0 : node_.options.answer_wait_ns);
}

/// What has been decided since it was answered is left out. Who decides for the set reports, to all
/// members; the shutdown goes to the ranks below as a decision, and from them to all others as an
/// error.
void StallMonitor::ReportStalls() {
  if (gathered_.empty() || node_.now_ns < NextReport()) return;
  std::vector<StallFacts> stalls;
  std::vector<StallFacts> final_stalls;
  std::set<int32_t> ranks;  // members
  for (auto& [stalled, facts] : gathered_) {
    if (!IsOpen(stalled)) continue;
    const SetState& set = *node_.sets.Find(node_.keys.At(stalled.key).name.set);
    ranks.insert(set.info.ranks.begin(), set.info.ranks.end());
    stalls.push_back(std::move(facts));
    const int64_t waited_ns = stalls.back().waited_ns;
    const bool is_final =
        node_.options.stall_shutdown_ns > 0 && waited_ns >= node_.options.stall_shutdown_ns;
    if (is_final) final_stalls.push_back(stalls.back());
  }
  gathered_.clear();
  if (stalls.empty()) return;
  const std::vector<std::string> lines = listener_.OnStalls(stalls, node_.now_ns);
  if (!lines.empty()) Report(lines, ranks);
  if (!final_stalls.empty()) ShutDownFor(final_stalls);
}

void StallMonitor::Report(const std::vector<std::string>& lines, const std::set<int32_t>& ranks) {
  DownMessage report;
  report.type = DownType::kReport;
  for (const std::string& line : lines) report.text += (report.text.empty() ? "" : "\n") + line;
  report.ranks.assign(ranks.begin(), ranks.end());
  decider_.Send(std::move(report));
}

void StallMonitor::ShutDownFor(const std::vector<StallFacts>& stalls) {
  std::string text;
  for (const std::string& line : DescribeStalls(stalls, kMostErrorLines)) {
    text += (text.empty() ? "" : "; ") + line;
  }
  decider_.ShutDown(ShutdownError(text, BlockedRanks(stalls)));
}

Status StallMonitor::ShutdownError(const std::string& stalls, FailureFacts facts) const {
  return {Code::kTimeout,
          "the job ends, as a tensor waits for longer than " +
              DescribeSeconds(node_.options.stall_shutdown_ns) + " (FARANDOLE_STALL_SHUTDOWN_S); " +
              stalls,
          std::move(facts)};
}

}  // namespace farandole
