#include "test/simulation/membership_world.h"

#include <algorithm>
#include <cstdio>

namespace farandole::simulation {
namespace {

using Action = MembershipAction::Kind;

constexpr int64_t kSecond = 1'000'000'000;
/// Faults are over for so long when a halt is surprising, and everything is settled.
constexpr int64_t kCalmNs = 8 * kSecond, kSettledNs = 90 * kSecond;
/// As of jobs whose ranks may compute for long: no wait shall depend on it.
constexpr int64_t kJoinNs = 300 * kSecond;

}  // namespace

MembershipWorld::MembershipWorld(uint64_t seed, MembershipTotals& totals, bool prints)
    : seed_(seed), totals_(totals), prints_(prints), random_(seed) {
  hosts_ = random_.Between(1, 3);
  lost_percent_ = random_.Percent(50) ? 0 : random_.Between(1, 15);
  if (random_.Percent(25)) slow_percent_ = 50;
  if (random_.Percent(25)) split_percent_ = 60;
  steps_.push_back({});
  const int count = random_.Percent(10) ? 1 : random_.Between(2, 6);
  MemberList first = {.generation = {1, 0}};
  for (int i = 0; i < count; ++i) {
    AddProcess(false);
    first.members.push_back(processes_.back().self);
  }
  Generation& generation = generations_[first.generation];
  generation.list = first;
  generation.has_state = true;
  generation.state = 0;
  for (int i = 0; i < count; ++i) {
    const MembershipOptions options = {
        .self = process(i).self, .seed = random_.Next(), .join_ns = kJoinNs};
    process(i).machine = std::make_unique<Membership>(options, first);
    process(i).engine = first.generation;
    process(i).state = 0;
    generation.inside.insert(i);
    generation.begun.insert(i);
  }
  computing_ = first.generation;
  At(now_ + Ms(1, 300), [this, first] { TryStep(first.generation); });
  int64_t time = now_;
  for (int faults = random_.Between(1, 8); faults > 0; --faults) {
    time += random_.Percent(50) ? Ms(0, 60) : random_.Percent(50) ? Ms(0, 700) : Ms(0, 5000);
    At(time, [this] { Strike(); });
  }
  faults_end_ns_ = time + Ms(0, 4000);
  At(faults_end_ns_, [this] { Heal(); });
}

std::optional<std::string> MembershipWorld::Run() {
  int64_t look_ns = faults_end_ns_ + kSecond;
  while (!events_.empty() && !failure_) {
    if (events_.top().time > look_ns) {
      if (IsSettled()) break;
      look_ns += kSecond;
      if (look_ns > faults_end_ns_ + kSettledNs) Fail("somebody still waits");
      continue;
    }
    now_ = events_.top().time;
    const std::function<void()> what = events_.top().what;
    events_.pop();
    what();
  }
  if (!failure_ && !IsSettled()) Fail("nothing happens any more");
  if (went_on_) ++totals_.went_on;
  return failure_;
}

void MembershipWorld::Fail(const std::string& what) {
  if (failure_) return;
  failure_ =
      "seed " + std::to_string(seed_) + ", " + std::to_string(now_ / 1'000'000) + " ms: " + what;
}

std::string MembershipWorld::Describe(const MemberList& list) const {
  std::string text = std::to_string(list.generation.number) + "." +
                     std::to_string(list.generation.proposer) + " {";
  for (const Member& member : list.members) {
    text += " " + std::to_string(member.id) + (list.without_vote.contains(member.id) ? "-" : "") +
            (list.newcomers.contains(member.id) ? "+" : "");
  }
  return text + " }";
}

// --- Time and network
// -----------------------------------------------------------------------------

void MembershipWorld::At(int64_t time, std::function<void()> what) {
  events_.push({time, ++order_, std::move(what)});
}

bool MembershipWorld::CanAct(int index) {
  const Process& one = process(index);
  return !one.is_dead && !one.is_stopped && !one.has_halted;
}

bool MembershipWorld::Reaches(int from, int to) {
  return CanAct(from) && CanAct(to) && !cut_.contains({from, to});
}

bool MembershipWorld::AreConnected(const MemberList& list) {
  return std::ranges::all_of(list.members, [&](const Member& from) {
    return std::ranges::all_of(
        list.members, [&](const Member& to) { return Reaches(IndexOf(from), IndexOf(to)); });
  });
}

/// By the kernel of its host, of which others ask whether anybody listens there.
bool MembershipWorld::SeesEnd(int from, int of) {
  const Process& one = process(of);
  const bool is_cut = cut_.contains({from, of}) || cut_.contains({of, from});
  return one.is_dead && !is_cut && (!one.is_silent || process(from).self.host == one.self.host);
}

void MembershipWorld::On(int index, int64_t delay_ns, std::function<void()> what) {
  At(now_ + delay_ns, [this, index, what = std::move(what)] {
    Process& one = process(index);
    if (one.is_dead || one.has_halted) return;
    if (one.is_stopped) return one.backlog.push_back([this, index, what] { On(index, 0, what); });
    one.machine->Tick(now_);
    what();
    Drain(index);
  });
}

void MembershipWorld::Drain(int index) {
  Process& one = process(index);
  for (std::vector<MembershipAction> actions = one.machine->TakeActions(); !actions.empty();
       actions = one.machine->TakeActions()) {
    for (MembershipAction& action : actions) {
      if (one.is_dead || one.has_halted) return;
      Do(index, action);
    }
  }
  const std::optional<int64_t> timer_ns = one.machine->NextTimer();
  if (!timer_ns || *timer_ns >= one.timer_ns) return;
  one.timer_ns = *timer_ns;
  On(index, *timer_ns - now_, [&one] { one.timer_ns = INT64_MAX; });
}

void MembershipWorld::Do(int index, MembershipAction& action) {
  Process& one = process(index);
  switch (action.kind) {
    case Action::kSend: {
      const bool is_proposal = action.message.kind == MembershipMessage::Kind::kProposal;
      if (is_proposal && one.dies_in_sends-- == 0) return Crash(index, random_.Percent(50));
      return Send(index, action.to, action.message);
    }
    case Action::kOpen:
      return On(index, Ms(0, 5),
                [this, &one] { one.machine->Opened(random_.Percent(95) ? "here" : ""); });
    case Action::kJoin:
      return BeginJoin(index, action.list);
    case Action::kEnd:
      if (one.joining) {
        const GenerationNumber generation = *one.joining;
        On(index, Ms(0, 20), [this, index, generation] { EndJoin(index, generation, false); });
      } else if (one.engine) {
        On(index, Ms(0, 20), [this, index] { Leave(index, {}, {}); });
      }
      return;
    case Action::kHalt:
      CheckHalt(index, action.text);
      one.has_halted = true;
      for (const Member& other : one.machine->Others()) {
        const int to = IndexOf(other);
        const std::set<MemberId> left = {one.self.id};
        if (cut_.contains({index, to}) || process(to).machine == nullptr) continue;
        On(to, Ms(0, 20), [this, to, left] { process(to).machine->Died(left); });
      }
      return End(index, true);
  }
}

/// What cannot be delivered is reported, sooner or later. So is some of what was delivered; and of
/// what a stopped process gets, it reads some when it goes on.
void MembershipWorld::Send(int from, const Member& to, const MembershipMessage& message) {
  ++totals_.messages;
  const int target = to.id != 0 ? IndexOf(to) : std::stoi(to.address);
  if (prints_) {
    std::printf("%6ld ms: %d -> %d kind %d accepted %lu.%lu proposal %s\n", long(now_ / 1'000'000),
                from + 1, target + 1, int(message.kind), message.accepted.number,
                message.accepted.proposer, Describe(message.proposal).c_str());
  }
  const bool is_lost = random_.Percent(lost_percent_);
  const bool is_taken =
      Reaches(from, target) || (process(target).is_stopped && random_.Percent(50));
  const int64_t delay_ns = random_.Percent(slow_percent_) ? Ms(0, slow_percent_ * 100) : Ms(0, 3);
  if (is_taken && (!is_lost || random_.Percent(50))) {
    On(target, delay_ns, [this, target, message] {
      Process& receiver = process(target);
      receiver.told.insert({message.started.generation, message.proposal.generation});
      for (const MemberList& list : message.pending) receiver.told.insert(list.generation);
      receiver.machine->Received(message);
    });
  }
  if (Reaches(from, target) && !is_lost) return;
  if (is_lost && random_.Percent(20)) return;
  const bool is_refused = SeesEnd(from, target) && !is_lost;
  On(from, is_refused ? Ms(0, 5) : Ms(0, 1000), [this, from, to, is_refused] {
    if (is_refused && to.id != 0) process(from).machine->Died({to.id});
    process(from).machine->Unreachable(to);
  });
}

// --- Engines
// --------------------------------------------------------------------------------------

void MembershipWorld::BeginJoin(int index, const MemberList& list) {
  Process& one = process(index);
  if (one.engine) Fail("joins while its engine runs");
  one.joining = list.generation;
  Generation& generation = generations_[list.generation];
  if (generation.list.members.empty()) generation.list = list;
  if (generation.list != list) Fail("two lists have the number of " + Describe(list));
  generation.begun.insert(index);
  if (prints_)
    std::printf("%6ld ms: %d joins %s\n", long(now_ / 1'000'000), index + 1,
                Describe(list).c_str());
  if (generation.begun.size() == list.members.size()) DecideJoin(generation);
}

/// All have begun, so that any of them may succeed; those that have given up do not any more.
void MembershipWorld::DecideJoin(Generation& generation) {
  const bool is_calm = now_ > faults_end_ns_ && AreConnected(generation.list);
  const bool is_split = !AreConnected(generation.list) || random_.Percent(split_percent_);
  const int percent = is_calm ? 100 : is_split ? random_.Between(10, 90) : 100;
  const GenerationNumber number = generation.list.generation;
  for (const int index : generation.begun) {
    const bool ok = random_.Percent(percent);
    On(index, Ms(0, is_calm ? 20 : 200), [this, index, number, ok] { EndJoin(index, number, ok); });
  }
  At(now_ + Ms(1, 300), [this, number] { TryStep(number); });
}

void MembershipWorld::EndJoin(int index, const GenerationNumber& number, bool ok) {
  Process& one = process(index);
  if (one.joining != number) return;
  one.joining.reset();
  Generation& generation = generations_[number];
  if (ok) {
    one.engine = number;
    generation.inside.insert(index);
    generation.has_started = true;
    generation.progress_ns = now_;
  } else {
    ++totals_.failed_joins;
    if (!generation.inside.empty()) ++totals_.split_joins;
    NotifyPeers(index, number);
  }
  one.machine->Joined(number, ok);
}

/// Whoever was with it in a generation, or joins the same one, notices soon, or never.
void MembershipWorld::NotifyPeers(int index, const GenerationNumber& number) {
  for (const Member& member : generations_[number].list.members) {
    const int peer = IndexOf(member);
    if (peer == index || cut_.contains({index, peer}) || random_.Percent(20)) continue;
    const bool suspects = random_.Percent(30);
    const bool gives_up = random_.Percent(50);
    On(peer, Ms(1, 50), [this, index, peer, number, suspects, gives_up] {
      if (process(peer).engine == number) {
        std::set<MemberId> lost;
        if (suspects) lost.insert(process(index).self.id);
        Leave(peer, {}, lost);
      } else if (process(peer).joining == number && gives_up) {
        EndJoin(peer, number, false);
      }
    });
  }
}

void MembershipWorld::Leave(int index, const std::set<MemberId>& dead,
                            const std::set<MemberId>& suspects) {
  Process& one = process(index);
  if (!one.engine) return;
  const GenerationNumber number = *one.engine;
  one.engine.reset();
  generations_[number].inside.erase(index);
  NotifyPeers(index, number);
  one.machine->Ended(dead, suspects);
}

/// A step needs all members. Who waits for long leaves, and suspects whom it cannot reach.
void MembershipWorld::TryStep(const GenerationNumber& number) {
  Generation& generation = generations_[number];
  if (generation.inside.empty()) {
    const auto joins = [&](int index) { return process(index).joining == number; };
    if (std::ranges::none_of(generation.begun, joins)) return;
  } else if (generation.inside.size() == generation.list.members.size() &&
             AreConnected(generation.list)) {
    Compute(generation);
  } else if (now_ - generation.progress_ns > 2 * kSecond) {
    const std::set<int> inside = generation.inside;
    for (const int index : inside) {
      std::set<MemberId> suspects;
      for (const Member& member : generation.list.members) {
        const int other = IndexOf(member);
        if (!Reaches(index, other) || !Reaches(other, index)) suspects.insert(member.id);
      }
      On(index, Ms(0, 300), [this, index, number, suspects] {
        if (process(index).engine == number) Leave(index, {}, suspects);
      });
    }
  }
  At(now_ + Ms(100, 500), [this, number] { TryStep(number); });
}

/// The first thing that is computed is the state, which newcomers and those behind take. A result
/// may reach some members and not others.
void MembershipWorld::Compute(Generation& generation) {
  const GenerationNumber number = generation.list.generation;
  if (generation.is_closed) {
    return Fail("generation " + Describe(generation.list) + " computes after " +
                Describe(generations_[*computing_].list));
  }
  const bool is_step = generation.has_state;
  if (!is_step) {
    int best = -1;
    for (const Member& member : generation.list.members) {
      best = std::max(best, process(IndexOf(member)).state);
    }
    CheckState(generation, best);
    generation.state = best < 0 ? 0 : best;  // 0: from a checkpoint
    generation.has_state = true;
    ++totals_.generations;
  } else {
    steps_.push_back({generation.state, number});
    generation.state = last_step_ = static_cast<int>(steps_.size()) - 1;
    ++totals_.steps;
    ++generation.steps;
  }
  if (computing_ != number) generations_[*computing_].is_closed = true;
  computing_ = number;
  generation.progress_ns = now_;
  const bool is_torn = now_ < faults_end_ns_ && random_.Percent(5);
  for (const Member& member : generation.list.members) {
    const int index = IndexOf(member);
    if (is_torn && random_.Percent(50)) {
      On(index, Ms(0, 20), [this, index, number] {
        if (process(index).engine == number) Leave(index, {}, {});
      });
    } else {
      process(index).state = generation.state;
      process(index).machine->Computed(number);
    }
  }
  if (is_step && !is_torn) EndGently(generation);
}

/// States are numbered as they come to be, so that of two in one line the later is ahead.
void MembershipWorld::CheckState(const Generation& generation, int best) {
  const Generation& last = generations_[*computing_];
  const int needed = std::max(steps_[static_cast<size_t>(last_step_)].before, 0);
  int state = best;
  while (state > needed) state = steps_[static_cast<size_t>(state)].before;
  if (state == needed) return;
  const bool has_ended = std::ranges::all_of(last.list.members, [&](const Member& member) {
    return last.list.without_vote.contains(member.id) || process(IndexOf(member)).is_dead;
  });
  // Newcomers of a list that has started outvote those whose state they have not taken yet.
  if (!has_ended && best >= 0) {
    return Fail("generation " + Describe(generation.list) + " lacks steps of " +
                Describe(last.list));
  }
  ++totals_.rolled_back;
  last_step_ = std::max(best, 0);
}

/// At a step's end: newcomers are let in, and members leave.
void MembershipWorld::EndGently(Generation& generation) {
  const GenerationNumber number = generation.list.generation;
  const int first = IndexOf(generation.list.members.front());
  const size_t size = generation.list.members.size();
  std::set<MemberId> gone;
  if (now_ < faults_end_ns_ && size > 1 && random_.Percent(2)) {
    const int leaver = IndexOf(
        generation.list.members[static_cast<size_t>(random_.Below(static_cast<int>(size)))]);
    process(leaver).is_dead = true;
    process(leaver).ended_ns = now_;
    generation.inside.erase(leaver);
    gone = {process(leaver).self.id};
    ++totals_.leavers;
    if (prints_) std::printf("%6ld ms: %d leaves\n", long(now_ / 1'000'000), leaver + 1);
  } else if (!process(first).machine->IsChangeDue()) {
    return;
  }
  for (const int index : std::set<int>(generation.inside)) {
    On(index, Ms(0, 30), [this, index, number, gone] {
      if (process(index).engine == number) Leave(index, gone, {});
    });
  }
}

// --- Faults
// ---------------------------------------------------------------------------------------

void MembershipWorld::AddProcess(bool is_newcomer) {
  const auto index = static_cast<int>(processes_.size());
  const auto id = static_cast<MemberId>(index) + 1;
  processes_.emplace_back().self = {
      .id = id, .address = std::to_string(index), .host = std::to_string(random_.Below(hosts_))};
  if (!is_newcomer) return;
  ++totals_.newcomers;
  std::vector<std::string> addresses;
  for (int i = random_.Between(1, 4); i > 0; --i) {
    addresses.push_back(std::to_string(random_.Below(index)));
  }
  const MembershipOptions options = {
      .self = processes_.back().self, .seed = random_.Next(), .join_ns = kJoinNs};
  processes_.back().machine = std::make_unique<Membership>(options, addresses);
  On(index, 0, [] {});
}

void MembershipWorld::Strike() {
  fault_ns_ = now_;
  const int index = random_.Below(static_cast<int>(processes_.size()));
  switch (random_.Below(9)) {
    case 0:
    case 1:
      for (int i = random_.Percent(70) ? 1 : 3; i > 0; --i) {
        const bool is_seen = random_.Percent(70);  // compilers differ in the order of arguments
        Crash(random_.Below(static_cast<int>(processes_.size())), is_seen);
      }
      return;
    case 2:
    case 3:
      return Stop(index);
    case 4:
    case 5:
      return Cut();
    case 6:
      return AddProcess(true);
    case 7:
      process(index).dies_in_sends = random_.Below(4);
      return;
    case 8:
      return On(index, 0, [this, index] {
        const int other = random_.Below(static_cast<int>(processes_.size()));
        Leave(index, {}, {process(other).self.id});
      });
  }
}

void MembershipWorld::Crash(int index, bool is_seen_everywhere) {
  if (process(index).is_dead) return;
  fault_ns_ = now_;
  ++totals_.crashes;
  if (prints_) std::printf("%6ld ms: %d crashes\n", long(now_ / 1'000'000), index + 1);
  End(index, is_seen_everywhere);
}

/// Its own host sees it nearly always, others if its launcher tells them, or its host still
/// answers.
void MembershipWorld::End(int index, bool is_seen_everywhere) {
  Process& one = process(index);
  one.is_dead = true;
  one.is_silent = !is_seen_everywhere;
  one.ended_ns = now_;
  const std::set<MemberId> dead = {one.self.id};
  for (int other = 0; other < static_cast<int>(processes_.size()); ++other) {
    const bool is_here = process(other).self.host == one.self.host;
    if (is_here ? random_.Percent(95) : is_seen_everywhere && random_.Percent(80)) {
      On(other, is_here ? Ms(0, 30) : Ms(5, 200),
         [this, other, dead] { process(other).machine->Died(dead); });
    }
  }
  for (const auto& [number, generation] : generations_) {
    if (one.engine == number || one.joining == number) NotifyPeers(index, number);
    generations_[number].inside.erase(index);
  }
}

void MembershipWorld::Stop(int index) {
  if (!CanAct(index)) return;
  ++totals_.stops;
  process(index).is_stopped = true;
  if (prints_) std::printf("%6ld ms: %d stops\n", long(now_ / 1'000'000), index + 1);
  process(index).goes_on = random_.Percent(95);
  if (!process(index).goes_on) return;
  At(now_ + (random_.Percent(50) ? Ms(100, 1500) : Ms(1500, 20'000)), [this, index] {
    Process& one = process(index);
    if (prints_) std::printf("%6ld ms: %d goes on\n", long(now_ / 1'000'000), index + 1);
    one.is_stopped = false;
    fault_ns_ = now_;
    for (const std::function<void()>& what : std::exchange(one.backlog, {})) what();
  });
}

/// Between two halves, by process or by host, or of one process from some others; perhaps in one
/// direction only.
void MembershipWorld::Cut() {
  ++totals_.cuts;
  const auto count = static_cast<int>(processes_.size());
  const bool is_one_way = random_.Percent(25), is_by_host = random_.Percent(40);
  const int one = random_.Percent(30) ? random_.Below(count) : -1;
  std::set<std::pair<int, int>> cut;
  std::vector<bool> side;
  for (int i = 0; i < count; ++i) {
    side.push_back(is_by_host ? process(i).self.host == "0" : random_.Percent(50));
  }
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      const bool is_apart = one < 0 ? side[static_cast<size_t>(a)] && !side[static_cast<size_t>(b)]
                                    : a == one && side[static_cast<size_t>(b)] && a != b;
      if (!is_apart) continue;
      cut.insert({a, b});
      if (!is_one_way) cut.insert({b, a});
    }
  }
  cut_.insert(cut.begin(), cut.end());
  if (prints_) {
    std::printf("%6ld ms: cut", long(now_ / 1'000'000));
    for (const auto& [a, b] : cut) std::printf(" %d-%d", a + 1, b + 1);
    std::printf("\n");
  }
  At(now_ + (random_.Percent(50) ? Ms(100, 2500) : Ms(2500, 20'000)), [this, cut] {
    for (const auto& link : cut) cut_.erase(link);
    fault_ns_ = now_;
    if (prints_) std::printf("%6ld ms: a cut heals\n", long(now_ / 1'000'000));
  });
}

/// What is cut or stopped now may stay so for long; nothing new happens.
void MembershipWorld::Heal() {
  lost_percent_ = 0;
  slow_percent_ = 10;
  for (Process& one : processes_) one.dies_in_sends = -1;
  fault_ns_ = now_;
}

// --- Rules
// ----------------------------------------------------------------------------------------

void MembershipWorld::CheckHalt(int index, const std::string& text) {
  Process& one = process(index);
  if (prints_)
    std::printf("%6ld ms: %d halts: %s\n", long(now_ / 1'000'000), index + 1, text.c_str());
  ++totals_.halted;
  if (text.find("gone on") != std::string::npos) ++totals_.told;
  std::set<MemberId> connected;
  for (const Process& other : processes_) {
    if (Reaches(index, IndexOf(other.self))) connected.insert(other.self.id);
  }
  const bool is_clique = std::ranges::none_of(cut_, [&](const auto& link) {
    return connected.contains(static_cast<MemberId>(link.first) + 1) &&
           connected.contains(static_cast<MemberId>(link.second) + 1);
  });
  if (now_ - fault_ns_ < kCalmNs || !is_clique) return;
  const MemberList& last = generations_[*computing_].list;
  std::set<MemberId> voters = connected;  // in all lists that the connected ones know of
  for (const auto& [number, generation] : generations_) {
    const MemberList& list = generation.list;
    const auto lives = [&](int at) { return !process(at).is_dead; };
    // The last one that is left may have heard of it from somebody who is dead.
    const bool is_told = connected.size() == 1 && one.told.contains(number);
    const bool is_known =
        number > last.generation && (is_told || std::ranges::any_of(generation.begun, lives));
    if (number != last.generation && !is_known) continue;
    int count = 0, present = 0, lost = 0;
    std::set<MemberId> both;
    for (const Member& member : list.members) {
      const bool is_new = number != last.generation && !generation.has_started &&
                          list.newcomers.contains(member.id);
      if (is_new || list.without_vote.contains(member.id)) continue;
      ++count;
      present += connected.contains(member.id) ? 1 : 0;
      const int at = IndexOf(member);
      lost += SeesEnd(index, at) && now_ - process(at).ended_ns > kCalmNs ? 1 : 0;
      if (voters.contains(member.id)) both.insert(member.id);
    }
    if (2 * present <= count && (present == 0 || present + lost < count)) return;
    voters = both;
  }
  // Leaders whose answers don't arrive take long; TCP has no such connections.
  const bool is_one_way = std::ranges::any_of(cut_, [&](const auto& link) {
    return !cut_.contains({link.second, link.first});
  });
  if (!voters.contains(one.self.id) || is_one_way) return;
  Fail("process " + std::to_string(index + 1) + " halts, although a majority of " + Describe(last) +
       " is connected: " + text);
}

bool MembershipWorld::IsSettled() {
  const Generation& last = generations_[*computing_];
  went_on_ = false;
  for (int index = 0; index < static_cast<int>(processes_.size()); ++index) {
    const Process& one = process(index);
    if (!one.is_dead && one.is_stopped && one.goes_on) return false;
    if (!CanAct(index)) continue;
    went_on_ = true;
    if (one.engine != *computing_) return false;
  }
  const bool is_whole = last.inside.size() == last.list.members.size();
  const int first = IndexOf(last.list.members.front());
  const bool gets_votes = std::ranges::all_of(
      last.list.left_out, [&](const auto& one) { return SeesEnd(first, IndexOf(one.second)); });
  if (went_on_ && gets_votes && !last.list.without_vote.empty()) return false;
  return !went_on_ || (is_whole && now_ - last.progress_ns < kSecond && cut_.empty());
}

std::optional<std::string> RunMembershipSeed(uint64_t seed, MembershipTotals* totals, bool prints) {
  MembershipTotals own;
  return MembershipWorld(seed, totals == nullptr ? own : *totals, prints).Run();
}

}  // namespace farandole::simulation
