// One file: each of its functions changes or reads the state of one machine.

#include "coordinator/membership/membership.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

using Kind = MembershipMessage::Kind;

/// A process gives up this many times halt_ns after its last generation, whatever it still hopes.
constexpr int kGiveUp = 6;
/// So many joins may fail before newcomers are left outside until the survivors have one.
constexpr int kJoinsWithNewcomers = 2;
constexpr int64_t kBackOffNs = 10'000'000;
constexpr int64_t kPingNs = 100'000'000, kPingLeftOutNs = 1'000'000'000;
constexpr size_t kPingsAtOnce = 32;  // of more members each takes longer

const Member* Find(const MemberList& list, MemberId id) {
  const auto found = std::ranges::find(list.members, id, &Member::id);
  return found == list.members.end() ? nullptr : &*found;
}

int RankIn(const MemberList& list, MemberId id) {
  const auto found = std::ranges::find(list.members, id, &Member::id);
  return found == list.members.end() ? -1 : static_cast<int>(found - list.members.begin());
}

bool Votes(const MemberList& list, MemberId id, bool newcomers_vote) {
  return Find(list, id) != nullptr && !list.without_vote.contains(id) &&
         (newcomers_vote || !list.newcomers.contains(id));
}

/// Quorums of the two are the same.
bool IsAlike(const MemberList& a, const MemberList& b) {
  return a.members == b.members && a.left_out == b.left_out && a.newcomers == b.newcomers &&
         a.without_vote == b.without_vote;
}

/// Drops lists that are not newer than `started`, and of lists that are alike all but the newest,
/// which then stands for those too that rested on other reports.
void Tidy(std::vector<MemberList>& lists, const GenerationNumber& started) {
  std::ranges::sort(lists, {}, &MemberList::generation);
  std::vector<MemberList> kept;
  for (MemberList& list : lists) {
    if (list.generation <= started) continue;
    const auto is_older = [&](const MemberList& older) { return IsAlike(older, list); };
    if (std::erase_if(kept, is_older) > 0) list.rests_on.clear();
    kept.push_back(std::move(list));
  }
  lists = std::move(kept);
}

/// A process that has never been in a generation that started.
bool IsNewcomer(const MembershipMessage& message) {
  return Find(message.started, message.sender.id) == nullptr;
}

/// Ranks of one host side by side, else in order.
void GroupByHost(std::vector<Member>& members) {
  std::vector<Member> grouped;
  for (const Member& member : members) {
    if (std::ranges::find(grouped, member) != grouped.end()) continue;
    std::ranges::copy_if(members, std::back_inserter(grouped),
                         [&](const Member& other) { return other.host == member.host; });
  }
  members = std::move(grouped);
}

std::string Ranks(size_t count) {
  return std::to_string(count) + (count == 1 ? " rank" : " ranks");
}

}  // namespace

// Without the second way a generation of which all but one were killed could not go on. With a
// majority of those that live instead of it, dead members of a newer list would help the older one.
bool IsQuorum(const std::set<MemberId>& here, const MemberList& list,
              const std::set<MemberId>& dead, bool newcomers_vote) {
  int voters = 0, present = 0, lost = 0;
  bool holds_first = false;
  for (const Member& member : list.members) {
    if (!Votes(list, member.id, newcomers_vote)) continue;
    const bool is_here = here.contains(member.id);
    if (voters++ == 0) holds_first = is_here;
    present += is_here ? 1 : 0;
    lost += !is_here && dead.contains(member.id) ? 1 : 0;
  }
  if (present > 0 && present + lost == voters) return true;
  return 2 * present > voters || (2 * present == voters && holds_first);
}

Membership::Membership(MembershipOptions options, MemberList started)
    : options_(std::move(options)),
      phase_(Phase::kRunning),
      started_(std::move(started)),
      has_computed_(true),
      accepted_(started_.generation),
      seen_number_(started_.generation.number),
      random_(options_.seed) {}

Membership::Membership(MembershipOptions options, std::vector<std::string> addresses)
    : options_(std::move(options)), addresses_(std::move(addresses)), random_(options_.seed) {}

// --- Inputs
// ---------------------------------------------------------------------------------------

void Membership::Tick(int64_t now_ns) {
  if (now_ns_ == 0 && phase_ == Phase::kGathering) hope_ns_ = ended_ns_ = now_ns;  // a newcomer
  // Its timers are closer. So it was stopped itself, and what others have said has still to be
  // read.
  const int64_t late_ns = now_ns - now_ns_;
  if (IsGathering() && now_ns_ != 0 && late_ns > options_.silence_ns * 3 / 4) {
    gather_ns_ = now_ns;
    hope_ns_ += late_ns;
    ended_ns_ += late_ns;
  }
  now_ns_ = now_ns;
  Advance();
}

void Membership::Died(const std::set<MemberId>& dead) {
  AddFacts(dead, {});
  GiveUpJoinWith(dead);
  Advance();
}

void Membership::Ended(const std::set<MemberId>& dead, const std::set<MemberId>& suspects) {
  std::set<MemberId> silent = suspects;
  std::erase_if(silent, [this](MemberId id) { return reports_.contains(id); });  // reported since
  AddFacts(dead, silent);
  if (phase_ == Phase::kRunning || phase_ == Phase::kEnding) {
    ended_ns_ = hope_ns_ = now_ns_;
    BeginGathering();
  }
  GiveUpJoinWith(dead);
  Advance();
}

void Membership::Opened(const std::string& address) {
  if (phase_ != Phase::kOpening) return;
  phase_ = Phase::kGathering;
  if (address.empty()) {
    back_off_ns_ = now_ns_ + options_.silence_ns / 4;
  } else {
    Propose(address);
  }
  Advance();
}

void Membership::Joined(const GenerationNumber& generation, bool ok, const std::set<MemberId>& dead,
                        const std::set<MemberId>& suspects) {
  if (phase_ != Phase::kJoining || generation != joining_.generation) return;
  AddFacts(dead, suspects);
  if (ok) {
    SetStarted(joining_, false);
    suspects_.clear();
    unreachable_.clear();
    passed_by_.clear();
    failures_ = 0;
    std::erase_if(asks_, [&](const Ask& ask) { return Find(started_, ask.message.sender.id); });
    phase_ = end_asked_ ? Phase::kEnding : Phase::kRunning;
    if (end_asked_) actions_.push_back({.kind = MembershipAction::Kind::kEnd});
  } else {
    // Two that propose at once wait for different times, and one of them is first.
    const int64_t longest =
        std::min(kBackOffNs << std::min(failures_, 10), options_.silence_ns / 4);
    if (proposal_.proposal.generation == generation) {
      back_off_ns_ = now_ns_ + static_cast<int64_t>(Random() % static_cast<uint64_t>(longest + 1));
    }
    ++failures_;
    BeginGathering();
    if (proposal_.proposal.generation == generation) {  // the others need not wait any longer
      for (const Member& member : joining_.members) {
        if (member.id != options_.self.id) Send(member, Say(Kind::kReport));
      }
    }
  }
  Advance();
}

void Membership::Computed(const GenerationNumber& generation) {
  if (generation == started_.generation) has_computed_ = true;
}

void Membership::Received(const MembershipMessage& message) {
  if (phase_ == Phase::kHalted || message.sender.id == options_.self.id) return;
  NoteNumbers(message);
  AddFacts(message.dead, {});
  suspects_.erase(message.sender.id);
  unreachable_.erase(message.sender.id);
  if (message.kind != Kind::kProposal) Learn(message);  // that of a proposal: in Accept
  if (phase_ == Phase::kHalted) return;
  switch (message.kind) {
    case Kind::kReport:
      OnReport(message);
      break;
    case Kind::kProposal:
      OnProposal(message);
      break;
    case Kind::kRefusal:
      OnRefusal(message);
      break;
    case Kind::kAsk:
      OnAsk(message);
      break;
    case Kind::kPing:
      OnPing(message);
      break;
    case Kind::kGoneOn:
      break;  // see Learn
  }
  Advance();
}

void Membership::Unreachable(const Member& to) {
  // The next ask goes to another one. While a generation computes its engine knows better: what was
  // lost was sent before, to one that was stopped.
  if (to.id == 0 || phase_ == Phase::kRunning) return;
  unreachable_[to.id] = now_ns_ + options_.silence_ns;
  GiveUpJoinWith({to.id});
  Advance();
}

std::vector<MembershipAction> Membership::TakeActions() { return std::exchange(actions_, {}); }

std::optional<int64_t> Membership::NextTimer() const {
  std::vector<int64_t> times;
  if (phase_ == Phase::kJoining && !end_asked_) times = {join_until_ns_};
  if (IsGathering()) {
    times = {report_ns_, probe_ns_, gather_ns_ + options_.silence_ns, hope_ns_ + options_.halt_ns,
             back_off_ns_};
    if (IsNewcomer()) times.push_back(ask_ns_);
    for (const auto& [id, until_ns] : unreachable_) times.push_back(until_ns);
    for (const auto& [id, until_ns] : passed_by_) times.push_back(until_ns);
  }
  if (!Watched().empty()) times.push_back(ping_ns_);
  std::erase_if(times, [&](int64_t time) { return time <= now_ns_; });
  if (times.empty()) return std::nullopt;
  return std::ranges::min(times);
}

std::vector<Member> Membership::askers() const {
  std::vector<Member> found;
  for (const Ask& ask : asks_) {
    const auto size = static_cast<int>(started_.members.size() + found.size());
    if (options_.most > 0 && size >= options_.most) break;
    if (now_ns_ - ask.heard_ns < options_.silence_ns) found.push_back(ask.message.sender);
  }
  return found;
}

bool Membership::IsChangeDue() const {
  const auto has_ended = [&](const auto& one) { return dead_.contains(one.first); };
  const bool gives_votes =
      !started_.without_vote.empty() && std::ranges::all_of(started_.left_out, has_ended);
  return gives_votes || !askers().empty();
}

std::vector<Member> Membership::Others() const {
  std::map<MemberId, Member> others;
  const auto add = [&](const MemberList& list) {
    others.insert(list.left_out.begin(), list.left_out.end());
    for (const Member& member : list.members) others.emplace(member.id, member);
  };
  add(started_);
  for (const MemberList& list : pending_) add(list);
  others.erase(options_.self.id);
  std::vector<Member> all;
  for (const auto& [id, member] : others) all.push_back(member);
  return all;
}

// --- What is known
// --------------------------------------------------------------------------------

bool Membership::IsNewcomer() const { return Find(started_, options_.self.id) == nullptr; }

bool Membership::IsSuspect(MemberId id) const {
  const auto holds = [&](const std::map<MemberId, int64_t>& until) {
    const auto found = until.find(id);
    return found != until.end() && found->second > now_ns_;
  };
  return suspects_.contains(id) || holds(unreachable_) || holds(passed_by_);
}

void Membership::AddFacts(const std::set<MemberId>& dead, const std::set<MemberId>& suspects) {
  dead_.insert(dead.begin(), dead.end());
  dead_.erase(options_.self.id);
  suspects_.insert(suspects.begin(), suspects.end());
  suspects_.erase(options_.self.id);
}

void Membership::NoteNumbers(const MembershipMessage& message) {
  for (const uint64_t number : {message.accepted.number, message.started.generation.number,
                                message.proposal.generation.number}) {
    seen_number_ = std::max(seen_number_, number);
  }
}

/// A list that others know to have started. Whoever is in it has accepted it, or it could not have
/// started; so who has not, and is in an older one, has been left out.
void Membership::Learn(const MembershipMessage& message) {
  const MemberList& started = message.started;
  if (started.generation == started_.generation) has_computed_ |= message.has_computed;
  if (started.generation <= started_.generation) return;
  const bool is_member = Find(started, options_.self.id) != nullptr;
  if (is_member || IsNewcomer()) {
    if (IsGathering()) SetStarted(started, message.has_computed);
    // The others of the list that it joins have gone on without it.
    if (phase_ == Phase::kJoining && accepted_ < started.generation) GiveUpJoin();
  } else if (accepted_ < started.generation) {
    HaltAsLeftOut(started);
  }
}

/// Also forgets the ends of those that no list names any more.
void Membership::SetStarted(const MemberList& started, bool has_computed) {
  started_ = started;
  has_computed_ = has_computed;
  Tidy(pending_, started_.generation);
  std::erase_if(dead_, [&](MemberId id) {
    const auto names = [&](const MemberList& list) {
      return Find(list, id) != nullptr || list.left_out.contains(id);
    };
    return !names(started_) && std::ranges::none_of(pending_, names);
  });
}

MembershipMessage Membership::Say(Kind kind) const {
  MembershipMessage message = {.kind = kind,
                               .sender = options_.self,
                               .started = started_,
                               .has_computed = has_computed_,
                               .pending = pending_,
                               .accepted = accepted_,
                               .dead = dead_,
                               .suspects = suspects_};
  for (const auto& until : {unreachable_, passed_by_}) {
    for (const auto& [id, until_ns] : until) {
      if (until_ns > now_ns_) message.suspects.insert(id);
    }
  }
  return message;
}

void Membership::Send(const Member& to, MembershipMessage message) {
  actions_.push_back(
      {.kind = MembershipAction::Kind::kSend, .to = to, .message = std::move(message)});
}

void Membership::BeginGathering() {
  phase_ = Phase::kGathering;
  gather_ns_ = report_ns_ = ping_ns_ = now_ns_;
  probe_ns_ = now_ns_ + options_.silence_ns / 16;
  reported_to_ = 0;
}

void Membership::GiveUpJoinWith(const std::set<MemberId>& dead) {
  const auto is_joining = [&](MemberId id) { return Find(joining_, id) != nullptr; };
  if (phase_ == Phase::kJoining && std::ranges::any_of(dead, is_joining)) GiveUpJoin();
}

void Membership::GiveUpJoin() {
  if (std::exchange(end_asked_, true)) return;
  actions_.push_back({.kind = MembershipAction::Kind::kEnd});
}

void Membership::Halt(std::string text) {
  phase_ = Phase::kHalted;
  actions_.push_back({.kind = MembershipAction::Kind::kHalt, .text = std::move(text)});
}

// --- Messages
// -------------------------------------------------------------------------------------

void Membership::OnReport(const MembershipMessage& message) {
  switch (phase_) {
    case Phase::kRunning:
      return OnReportWhileRunning(message);
    case Phase::kJoining:
      return OnReportWhileJoining(message);
    case Phase::kGathering:
    case Phase::kOpening:
      return OnReportWhileGathering(message);
    case Phase::kEnding:
      reports_[message.sender.id] = message;
      return;
    case Phase::kHalted:
      return;
  }
}

/// What a member sent before it accepted this generation may come late.
void Membership::OnReportWhileRunning(const MembershipMessage& message) {
  if (Find(started_, message.sender.id) == nullptr) {
    if (farandole::IsNewcomer(message)) return OnAsk(message);
    if (message.accepted < started_.generation) Send(message.sender, Say(Kind::kGoneOn));
    return;
  }
  if (message.accepted < started_.generation) return;
  reports_[message.sender.id] = message;
  phase_ = Phase::kEnding;
  actions_.push_back({.kind = MembershipAction::Kind::kEnd});
}

void Membership::OnReportWhileJoining(const MembershipMessage& message) {
  const MemberId sender = message.sender.id;
  if (Find(joining_, sender) == nullptr) return;
  if (message.accepted >= joining_.generation) {  // it has failed there
    reports_[sender] = message;
    GiveUpJoin();
  } else if (proposal_.proposal.generation == joining_.generation) {
    const GenerationNumber& reported = proposal_.proposal.rests_on.at(sender);
    if (reported == message.accepted) Send(message.sender, proposal_);  // it has not heard of it
    if (reported < message.accepted) GiveUpJoin();                      // and it will not accept it
  }
}

void Membership::OnReportWhileGathering(const MembershipMessage& message) {
  const MemberId sender = message.sender.id;
  const bool is_member = Find(started_, sender) != nullptr || farandole::IsNewcomer(message);
  if (message.started.generation < started_.generation) Send(message.sender, Say(Kind::kGoneOn));
  if (!is_member && message.accepted < started_.generation) return;
  const auto known = reports_.find(sender);
  if (known != reports_.end() && known->second.accepted > message.accepted) return;
  reports_[sender] = message;
  // Its sender does not reach who leads. In one list the way goes to ever lower ranks, and ends.
  const std::optional<Member> leader = Leader();
  const bool is_below = leader && RankIn(started_, leader->id) < RankIn(started_, options_.self.id);
  const bool is_alike = message.started.generation == started_.generation;
  if (is_below && is_alike && leader->id != sender) Send(*leader, message);
}

/// A proposal rests on what its members have reported: who has accepted another one since then, or
/// has been in a generation, would be counted for what it does not stand for any more.
void Membership::OnProposal(const MembershipMessage& message) {
  const GenerationNumber& generation = message.proposal.generation;
  if (Find(message.proposal, options_.self.id) == nullptr || generation == accepted_) return;
  const auto reported = message.proposal.rests_on.find(options_.self.id);
  const bool is_current =
      reported != message.proposal.rests_on.end() && reported->second == accepted_;
  const bool is_alive = std::ranges::none_of(
      message.proposal.members, [&](const Member& member) { return dead_.contains(member.id); });
  if (!is_alive) return Refuse(message);
  if (IsGathering() && is_current && generation > accepted_) return Accept(message);
  Refuse(message);
}

void Membership::Refuse(const MembershipMessage& message) {
  MembershipMessage refusal = Say(Kind::kRefusal);
  refusal.proposal.generation = message.proposal.generation;
  Send(message.sender, std::move(refusal));
}

void Membership::OnRefusal(const MembershipMessage& message) {
  const bool is_joined = phase_ == Phase::kJoining &&
                         message.proposal.generation == joining_.generation &&
                         message.accepted != joining_.generation;
  if (is_joined) GiveUpJoin();
}

/// Rank 0 keeps a newcomer until the generation ends; who leads then takes it in. Until then it is
/// told that the job lives.
void Membership::OnAsk(const MembershipMessage& message) {
  const MemberId sender = message.sender.id;
  if (Find(started_, sender) != nullptr) return;
  std::optional<Member> keeper;
  if (IsGathering() && !IsNewcomer()) keeper = Leader();
  if (phase_ == Phase::kRunning) {
    keeper = started_.members.front();
    Send(message.sender, Say(Kind::kGoneOn));
  }
  if (!keeper) return;  // it asks again
  if (keeper->id != options_.self.id) {
    MembershipMessage passed_on = message;
    passed_on.kind = Kind::kAsk;
    return Send(*keeper, std::move(passed_on));
  }
  const auto known =
      std::ranges::find(asks_, sender, [](const Ask& ask) { return ask.message.sender.id; });
  if (known != asks_.end()) {
    *known = {message, now_ns_};
  } else {
    asks_.push_back({message, now_ns_});
  }
}

/// Its sender may await a join in vain, or not know of a newer generation.
void Membership::OnPing(const MembershipMessage& message) {
  const GenerationNumber& joining = message.proposal.generation;
  const bool is_in = Find(started_, message.sender.id) != nullptr;
  if (joining.number == 0) {
    if (!is_in && message.accepted < started_.generation) Send(message.sender, Say(Kind::kGoneOn));
  } else if (IsGathering()) {
    Send(message.sender, Say(Kind::kReport));  // it has failed here, or the proposal has not come
  } else if (joining != accepted_) {
    Refuse(message);
  }
}

// --- From the end of a generation to the next
// -----------------------------------------------------

void Membership::Advance() {
  if (phase_ == Phase::kJoining && now_ns_ >= join_until_ns_) GiveUpJoin();
  if (now_ns_ >= ping_ns_) Ping();
  if (!IsGathering()) return;
  if (IsNewcomer() && now_ns_ >= ask_ns_) AskForEntry();
  std::optional<Member> leader = Leader();
  const bool is_overdue = now_ns_ - reported_since_ns_ >= 2 * options_.silence_ns;
  if (leader && leader->id == reported_to_ && is_overdue) {  // others may not reach it
    passed_by_[leader->id] = now_ns_ + 2 * options_.silence_ns;
    leader = Leader();
  }
  if (leader && leader->id == options_.self.id) {
    reported_to_ = 0;
    TryToLead();
  } else if (leader && (leader->id != reported_to_ || now_ns_ >= report_ns_)) {
    if (leader->id != reported_to_) reported_since_ns_ = now_ns_;
    reported_to_ = leader->id;
    report_ns_ = now_ns_ + options_.silence_ns / 4;
    Send(*leader, Say(Kind::kReport));
  }
  if (IsGathering() && now_ns_ >= probe_ns_) Probe();
  if (IsGathering() && (now_ns_ - hope_ns_ >= options_.halt_ns || IsHopeless())) HaltAsMinority();
}

/// A message that cannot be delivered says why, and who has gone on answers.
void Membership::Ping() {
  if (phase_ == Phase::kHalted) return;
  const std::vector<Member> watched = Watched();
  const bool computes = phase_ == Phase::kRunning || phase_ == Phase::kEnding;
  const auto rounds = static_cast<int64_t>(1 + watched.size() / kPingsAtOnce);
  ping_ns_ = now_ns_ + rounds * (computes ? kPingLeftOutNs : kPingNs);
  MembershipMessage ping = {.kind = Kind::kPing, .sender = options_.self, .accepted = accepted_};
  if (phase_ == Phase::kJoining) ping.proposal.generation = joining_.generation;
  for (const Member& member : watched) Send(member, ping);
}

/// Whose end nobody else would notice. While a generation computes: who is left out of it, as
/// newcomers may vote once he has ended. Between two no engine watches: the lowest that lives looks
/// for the ends of all whose votes may be needed, the others for his and those below him.
std::vector<Member> Membership::Watched() const {
  std::vector<Member> watched;
  std::set<MemberId> seen = dead_;
  const auto add = [&](const Member& member) {
    if (seen.insert(member.id).second) watched.push_back(member);
  };
  const auto add_left_out = [&](const MemberList& list) {
    for (const auto& [id, member] : list.left_out) add(member);
  };
  if (phase_ == Phase::kRunning || phase_ == Phase::kEnding) {
    add_left_out(started_);
    return watched;
  }
  if (phase_ == Phase::kJoining) {
    std::ranges::for_each(joining_.members, add);
  } else if (IsGathering()) {
    if (!IsNewcomer()) std::ranges::for_each(started_.members, add);
    for (const MemberList& list : pending_) std::ranges::for_each(list.members, add);
    if (!IsNewcomer()) add_left_out(started_);
    std::ranges::for_each(pending_, add_left_out);
  }
  const auto self = [&](const Member& member) { return member.id == options_.self.id; };
  const auto lowest = std::ranges::find_if(
      watched, [&](const Member& member) { return self(member) || !IsSuspect(member.id); });
  if (lowest != watched.end() && !self(*lowest)) watched.erase(lowest + 1, watched.end());
  std::erase_if(watched, self);
  return watched;
}

/// Who leads reports to those that it waits for: they may not have noticed, or believe that another
/// one leads. And whom it could not reach each process tries again: halves that meet again join, or
/// the one that was left out is told.
void Membership::Probe() {
  probe_ns_ = now_ns_ + options_.silence_ns / 2;
  if (IsNewcomer()) return;
  const std::optional<Member> leader = Leader();
  const bool leads = leader && leader->id == options_.self.id;
  for (const Member& member : started_.members) {
    const auto report = reports_.find(member.id);
    const bool is_missing =
        report == reports_.end() || report->second.suspects.contains(options_.self.id);
    if (leads ? !is_missing : !IsSuspect(member.id)) continue;
    if (dead_.contains(member.id) || member.id == options_.self.id) continue;
    Send(member, Say(Kind::kReport));
  }
}

/// Those at the addresses that it was given, and whom they have named, in turn.
void Membership::AskForEntry() {
  ask_ns_ = now_ns_ + options_.silence_ns / 4;
  std::vector<std::string> addresses = addresses_;
  for (const Member& member : started_.members) addresses.push_back(member.address);
  if (addresses.empty()) return;
  Send({.address = addresses[next_address_++ % addresses.size()]}, Say(Kind::kAsk));
}

/// The lowest member of the newest list of which this process is sure to be a member, else of the
/// newest that it began to join.
std::optional<Member> Membership::Leader() const {
  const MemberList* list = IsNewcomer() ? nullptr : &started_;
  for (const MemberList& pending : pending_) {
    if (IsNewcomer() && Find(pending, options_.self.id) != nullptr) list = &pending;
  }
  if (list == nullptr) return std::nullopt;
  for (const Member& member : list->members) {
    if (member.id == options_.self.id) return member;
    if (!dead_.contains(member.id) && !IsSuspect(member.id)) return member;
  }
  return std::nullopt;
}

const MembershipMessage& Membership::MessageOf(MemberId id) const {
  const auto found = reports_.find(id);
  if (found != reports_.end()) return found->second;
  return std::ranges::find(asks_, id, [](const Ask& ask) { return ask.message.sender.id; })
      ->message;
}

/// One of its members has accepted another one since it reported, and not this one: it will not any
/// more.
bool Membership::CannotStart(const MemberList& list) const {
  const auto refuses = [&](MemberId id, const GenerationNumber& accepted,
                           const std::vector<MemberList>& pending) {
    const auto reported = list.rests_on.find(id);
    const bool is_outdated = reported != list.rests_on.end() && accepted > reported->second;
    // Of lists that are alike it has kept the newest.
    return (accepted > list.generation || is_outdated) &&
           std::ranges::none_of(pending, [&](const MemberList& own) {
             return own.generation == list.generation || IsAlike(own, list);
           });
  };
  return std::ranges::any_of(list.members, [&](const Member& member) {
    if (member.id == options_.self.id) return refuses(member.id, accepted_, pending_);
    const auto report = reports_.find(member.id);
    return report != reports_.end() &&
           refuses(member.id, report->second.accepted, report->second.pending);
  });
}

Membership::Basis Membership::Collect() const {
  Basis basis = {.started = started_,
                 .has_computed = has_computed_,
                 .pending = pending_,
                 .here = {options_.self.id}};
  for (const auto& [id, report] : reports_) {
    if (report.started.generation > basis.started.generation) {
      basis.started = report.started;
      basis.has_computed = false;
    }
    const bool is_same = report.started.generation == basis.started.generation;
    basis.has_computed |= is_same && report.has_computed;
    for (const MemberList& list : report.pending) {
      const auto same = std::ranges::find(basis.pending, list.generation, &MemberList::generation);
      if (same == basis.pending.end()) {
        basis.pending.push_back(list);
      } else if (same->rests_on != list.rests_on) {  // one of them stands for others
        same->rests_on.clear();
      }
    }
  }
  Tidy(basis.pending, basis.started.generation);
  std::erase_if(basis.pending, [&](const MemberList& list) { return CannotStart(list); });
  for (const auto& [id, report] : reports_) {
    const auto names = [id = id](const MemberList& list) { return Find(list, id) != nullptr; };
    if (dead_.contains(id) || IsSuspect(id)) continue;
    if (!names(basis.started) && std::ranges::none_of(basis.pending, names)) continue;
    basis.here.insert(id);
    basis.suspected.insert(report.suspects.begin(), report.suspects.end());
  }
  return basis;
}

/// Also for a newer report of who could not reach this process, which was stopped perhaps: else he
/// would be left out.
bool Membership::IsAwaiting(const Basis& basis) const {
  const int64_t since_ns = now_ns_ - gather_ns_;
  const bool is_suspected = std::ranges::any_of(basis.here, [&](MemberId id) {
    return id != options_.self.id && MessageOf(id).suspects.contains(options_.self.id);
  });
  if (is_suspected && since_ns < options_.silence_ns / 2) return true;
  if (since_ns >= options_.silence_ns) return false;
  const auto is_awaited = [&](const Member& member) {
    return !basis.here.contains(member.id) && !dead_.contains(member.id) && !IsSuspect(member.id) &&
           !basis.suspected.contains(member.id);
  };
  const auto awaits = [&](const MemberList& list) {
    return std::ranges::any_of(list.members, is_awaited);
  };
  return awaits(basis.started) || std::ranges::any_of(basis.pending, awaits);
}

/// All of its lists that are not known to be dead are here, and may not go on: nobody else can tell
/// them anything.
bool Membership::IsHopeless() const {
  const auto is_away = [&](const Member& member) {
    return member.id != options_.self.id && !reports_.contains(member.id) &&
           !dead_.contains(member.id);
  };
  const auto lacks = [&](const MemberList& list) {
    return std::ranges::any_of(list.members, is_away);
  };
  if (IsNewcomer() || phase_ == Phase::kOpening || lacks(started_)) return false;
  const Basis basis = Collect();
  const auto is_silent = [&](const auto& report) {  // since it has reported
    return !basis.here.contains(report.first) && !dead_.contains(report.first);
  };
  if (std::ranges::any_of(reports_, is_silent)) return false;
  return !lacks(basis.started) && std::ranges::none_of(basis.pending, lacks) && !MakeList(basis);
}

/// Who has a vote in the newest list that has started depends on whether it has computed. Before
/// that both answers hold, as others may know less, or more.
bool Membership::HasQuorum(const std::set<MemberId>& here, const Basis& basis) const {
  return IsQuorum(here, basis.started, dead_, true) &&
         (basis.has_computed || IsQuorum(here, basis.started, dead_, false)) &&
         std::ranges::all_of(basis.pending, [&](const MemberList& list) {
           return IsQuorum(here, list, dead_, false);
         });
}

/// Of two that can't reach one another the lower rank, as no join succeeds with both.
std::set<MemberId> Membership::Reachable(const Basis& basis) const {
  std::vector<MemberId> kept = {options_.self.id};
  const auto suspects = [&](MemberId one, MemberId other) {
    return one == options_.self.id ? IsSuspect(other) : MessageOf(one).suspects.contains(other);
  };
  const auto consider = [&](const MemberList& list) {
    for (const Member& member : list.members) {
      const MemberId id = member.id;
      if (!basis.here.contains(id)) continue;
      const bool is_reachable = std::ranges::none_of(kept, [&](MemberId other) {
        return id == other || suspects(id, other) || suspects(other, id);
      });
      if (is_reachable) kept.push_back(id);
    }
  };
  consider(basis.started);
  for (const MemberList& list : basis.pending) consider(list);
  return {kept.begin(), kept.end()};
}

/// Newcomers whose asks came lately, as far as there is room for them.
void Membership::AddNewcomers(const Basis& basis, std::vector<Member>& members) const {
  if (failures_ >= kJoinsWithNewcomers) return;
  const auto add = [&](const MembershipMessage& message) {
    const MemberId id = message.sender.id;
    const bool is_full = options_.most > 0 && static_cast<int>(members.size()) >= options_.most;
    const bool is_known = std::ranges::find(members, id, &Member::id) != members.end();
    const bool is_new = farandole::IsNewcomer(message) && Find(basis.started, id) == nullptr;
    if (is_full || is_known || !is_new || dead_.contains(id) || IsSuspect(id)) return;
    members.push_back(message.sender);
  };
  for (const Ask& ask : asks_) {
    if (now_ns_ - ask.heard_ns < options_.silence_ns) add(ask.message);
  }
}

std::optional<MemberList> Membership::MakeList(const Basis& basis) const {
  std::optional<MemberList> next = MakeList(basis, Reachable(basis));
  return next ? next : MakeList(basis, basis.here);
}

/// The next list, without number and root. Nothing: there is no quorum, or nobody would have a
/// vote.
std::optional<MemberList> Membership::MakeList(const Basis& basis,
                                               const std::set<MemberId>& here) const {
  if (!HasQuorum(here, basis)) return std::nullopt;
  std::vector<MemberList> lists = basis.pending;
  lists.insert(lists.begin(), basis.started);
  MemberList next;
  for (const MemberList& list : lists) {
    next.left_out.insert(list.left_out.begin(), list.left_out.end());
    for (const Member& member : list.members) {
      const bool is_in = Find(next, member.id) != nullptr;
      if (here.contains(member.id) && !is_in) next.members.push_back(member);
      if (!here.contains(member.id) && Votes(list, member.id, true)) {
        next.left_out.emplace(member.id, member);
      }
    }
  }
  AddNewcomers(basis, next.members);
  std::erase_if(next.left_out, [&](const auto& one) {
    return dead_.contains(one.first) || Find(next, one.first) != nullptr;
  });
  // Others are lower in a list that this one leads by.
  const auto own = std::ranges::find(next.members, options_.self.id, &Member::id);
  if (own != next.members.end()) std::rotate(next.members.begin(), own, own + 1);
  GroupByHost(next.members);
  if (Find(next, options_.self.id) == nullptr || !GiveVotes(basis, next)) return std::nullopt;
  return next;
}

/// Who is left out may go on from one of the lists once all others that vote in it are dead. Then
/// voters of the next list must be dead, too: they are those that vote in each of these lists.
/// @return whether there are any.
bool Membership::GiveVotes(const Basis& basis, MemberList& next) const {
  std::set<MemberId>& others = next.left_out.empty() ? next.newcomers : next.without_vote;
  for (const Member& member : next.members) {
    const bool votes = Votes(basis.started, member.id, basis.has_computed) &&
                       std::ranges::all_of(basis.pending, [&](const MemberList& list) {
                         return Votes(list, member.id, false);
                       });
    if (!votes) others.insert(member.id);
  }
  return others.size() < next.members.size();
}

void Membership::TryToLead() {
  if (phase_ == Phase::kOpening) return;
  if (now_ns_ < back_off_ns_) return;
  const Basis basis = Collect();
  const auto names = [&](const MemberList& list) {
    return Find(list, options_.self.id) != nullptr;
  };
  // What it has accepted since then cannot start.
  if (!IsNewcomer() && !names(basis.started) && std::ranges::none_of(basis.pending, names))
    return HaltAsLeftOut(basis.started);
  if (IsAwaiting(basis) || !MakeList(basis)) return;
  hope_ns_ = std::min(now_ns_, ended_ns_ + (kGiveUp - 1) * options_.halt_ns);
  phase_ = Phase::kOpening;
  actions_.push_back({.kind = MembershipAction::Kind::kOpen});
}

/// What has come since kOpen counts, too.
void Membership::Propose(const std::string& root) {
  const Basis basis = Collect();
  std::optional<MemberList> next = MakeList(basis);
  if (!next) return;
  next->generation = {seen_number_ + 1, options_.self.id};
  next->root = root;
  MembershipMessage message = Say(Kind::kProposal);
  message.started = basis.started;
  message.has_computed = basis.has_computed;
  for (const Member& member : next->members) {
    const bool is_self = member.id == options_.self.id;
    next->rests_on[member.id] = is_self ? accepted_ : MessageOf(member.id).accepted;
  }
  message.proposal = *std::move(next);
  proposal_ = message;
  for (const Member& member : message.proposal.members) {
    if (member.id != options_.self.id) Send(member, message);
  }
  Accept(message);
}

/// From here on the list may start, here or elsewhere, and whoever goes on needs a quorum of it.
void Membership::Accept(const MembershipMessage& message) {
  const MemberList& list = message.proposal;
  if (message.started.generation > started_.generation) {
    SetStarted(message.started, message.has_computed);
  }
  accepted_ = list.generation;
  seen_number_ = std::max(seen_number_, accepted_.number);
  pending_.push_back(list);
  Tidy(pending_, started_.generation);
  phase_ = Phase::kJoining;
  joining_ = list;
  join_until_ns_ = now_ns_ + options_.join_ns;
  end_asked_ = false;
  reports_.clear();
  ping_ns_ = now_ns_;
  hope_ns_ = std::min(now_ns_, ended_ns_ + (kGiveUp - 1) * options_.halt_ns);
  actions_.push_back({.kind = MembershipAction::Kind::kJoin,
                      .list = list,
                      .rank = RankIn(list, options_.self.id)});
}

void Membership::HaltAsLeftOut(const MemberList& started) {
  Halt("the job has gone on without this process: its generation " +
       std::to_string(started.generation.number) + " of " + Ranks(started.members.size()) +
       " began while the others could not reach it");
}

void Membership::HaltAsMinority() {
  if (IsNewcomer() && pending_.empty()) {
    return Halt("no member of the job can be reached at any of the " +
                std::to_string(addresses_.size()) + " addresses that this newcomer was given");
  }
  const Basis basis = Collect();
  const MemberList& list = basis.pending.empty() ? basis.started : basis.pending.back();
  int here = 0, dead = 0;
  for (const Member& member : list.members) {
    here += basis.here.contains(member.id) ? 1 : 0;
    dead += dead_.contains(member.id) ? 1 : 0;
  }
  const int others = static_cast<int>(list.members.size()) - here - dead;
  const std::string left = std::to_string(here) + " of " + Ranks(list.members.size()) +
                           (here == 1 ? " is left" : " are left") +
                           (dead > 0 ? ", " + std::to_string(dead) + " ended" : "");
  if (IsHopeless()) return Halt(left + ", and no rank that is left has a vote in who goes on");
  if (others == 0) return Halt(left + ", but they could not begin a generation");
  Halt(left + ", and the other " + std::to_string(others) + " may go on without " +
       (here == 1 ? "it" : "them"));
}

/// splitmix64 (Steele, Lea, Flood, OOPSLA 2014, doi:10.1145/2660193.2660195).
uint64_t Membership::Random() {
  uint64_t z = random_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace farandole
