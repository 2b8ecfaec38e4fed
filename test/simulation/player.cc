// One file: one random program per rank and the checks on each of its steps share the same state.
// The engine's side of a player: messages, time, work and what the oracle is told.

#include "test/simulation/player.h"

#include <algorithm>

#include "coordinator/control/wire/wire.h"
#include "coordinator/protocol/splits.h"
#include "coordinator/protocol/state.h"

namespace farandole::simulation {
namespace {

NegotiationOptions OptionsOf(const World& world, int rank) {
  const Scenario& s = world.scenario();
  NegotiationOptions options;
  options.rank = rank;
  options.size = s.size;
  options.parent = s.parent;
  options.fusion_threshold_bytes = s.FusionThreshold(DeviceKind::kCpu);
  options.cuda_fusion_threshold_bytes = s.FusionThreshold(DeviceKind::kCuda);
  options.window = s.window;
  options.max_ids = s.max_ids;
  options.least_known_ids = 2;
  if (s.forgets) options.idle_id_bytes = options.idle_keys = 0;
  options.stall_ns = s.stall_ns;
  options.answer_wait_ns = 5 * s.link_delay;
  // With faults alone, which are slow: else a deadlock has to be found as such.
  options.divergence_check = s.link_delay >= 1'000;
  options.planes = {0, 0};
  return options;
}

}  // namespace

Player::Player(World& world, int rank)
    : world_(world),
      rank_(rank),
      negotiation_(OptionsOf(world, rank), *this, Detectors(*this)),
      transport_(world, rank),
      coalescer_(transport_, counters_, liveness_),
      progress_(world.scenario().ops.size(), Progress::kWaiting) {
  logical_[kGlobalSet] = 0;
}

std::string Player::Describe() const {
  std::string text = "rank " + std::to_string(rank_) + " at operation " + std::to_string(head_) +
                     (joined_ ? " (joined)" : "") + (left_ ? " (left)" : "");
  for (const auto& [key, submission] : pending_) {
    text += ", pending " + farandole::Describe(negotiation_.NameOf(key));
  }
  return text;
}

void Player::Check(const Status& status, const char* what) {
  if (status.ok()) return;
  world_.oracle().Fail("rank " + std::to_string(rank_) + ": " + what + ": " + status.ToString());
}

/// What EngineLoop does with an error that is final: everything here ends with it, and the other
/// ranks are told. The negotiation is not asked any more.
void Player::FailEverywhere(const Status& error) {
  if (failed_ || shut_down_) return;
  failed_ = true;
  agreed_error_.ok() ? liveness_.Note(error) : liveness_.NoteAgreed(error);
  const LivenessTable::Cause cause = liveness_.Judge();
  const Status why = cause.is_shared ? cause.error : FailedHere(rank_, cause.error);
  world_.oracle().Failed(rank_, why);
  const bool diverged = why.facts().kind == FailureKind::kDiverged;
  ++(diverged ? world_.totals().diverged : world_.totals().lost);
  coalescer_.SpreadAbort(why, cause.is_shared);
  for (const auto& [op, submission] : submissions_) {
    if (Over(op)) continue;
    submission->state = Submission::State::kEnded;
    submission->ended = why;
  }
  pending_.clear();
  queues_.clear();
}

void Player::AfterCall() {
  if (!agreed_error_.ok()) FailEverywhere(agreed_error_);
  if (failed_) return;
  if (negotiation_.Pending() != static_cast<int64_t>(pending_.size())) {
    world_.oracle().Fail("rank " + std::to_string(rank_) + ": Pending is " +
                         std::to_string(negotiation_.Pending()) + ", not " +
                         std::to_string(pending_.size()));
  }
  if (flush_scheduled_) return;
  flush_scheduled_ = true;
  world_.In(rank_, world_.random().Below(world_.scenario().flush_delay + 1), [this] { Flush(); });
}

void Player::Flush() {
  if (IsHeld([this] { Flush(); })) return;
  flush_scheduled_ = false;
  if (failed_) return;
  negotiation_.Flush();
  Tick();
  if (!agreed_error_.ok()) FailEverywhere(agreed_error_);
}

void Player::Tick() {
  if (failed_) return;
  const int64_t next = negotiation_.Tick(world_.now());
  if (next == INT64_MAX || next >= tick_at_) return;
  tick_at_ = std::max(next, world_.now() + 1);
  world_.At(rank_, tick_at_, [this] {
    tick_at_ = INT64_MAX;
    if (agreeing_) return;  // ticks when that is over
    Tick();
    AfterCall();
  });
}

void Player::Lose(int rank) {
  if (failed_ || IsHeld([this, rank] { Lose(rank); })) return;
  Tick();
  const FailureFacts facts = {.kind = FailureKind::kKilled};
  FailEverywhere(FailedOn(rank, Status(Code::kUnavailable, "killed", facts)));
}

void Player::Receive(int from, std::span<const std::byte> bytes) {
  if (failed_) return;
  if (agreeing_) {
    const std::vector<std::byte> kept(bytes.begin(), bytes.end());
    agreeing_->held.push_back([this, from, kept] { Receive(from, kept); });
    return;
  }
  Tick();
  transport_.Put({from, bytes});
  const Result<int> received = coalescer_.Receive(negotiation_, 1);
  if (!received.ok()) FailEverywhere(received.status());
  AfterCall();
}

void Player::CountRecords(int to, const KeyName& key, const Signature& signature) {
  world_.oracle().RecordSent(rank_, to, key, Hash(signature));
}

void Player::SendUp(int parent, const UpMessage& message) {
  if (message.type == UpType::kDone && reporter_) {
    reported_ = true;
    if (*reporter_ != rank_) {
      world_.oracle().Fail("rank " + std::to_string(rank_) + " reports a batch of rank " +
                           std::to_string(*reporter_));
    }
  }
  for (const KeyVotes& votes : message.keys) {
    for (const SignatureVotes& one : votes.signatures) {
      if (one.id == kNoId) CountRecords(parent, votes.key, one.signature);
    }
  }
  bytes_.clear();
  Check(Encode(message, bytes_), "encode");
  world_.Send(rank_, parent, bytes_);
}

void Player::SendDown(int child, const DownMessage& message) {
  if (message.type == DownType::kRetire) world_.totals().retired += std::ssize(message.ids);
  for (const WorkItem& item : message.items) {
    if (item.id == kNoId) CountRecords(child, item.key, item.signature);
  }
  if (message.type == DownType::kSkip || message.type == DownType::kRefuse) {
    world_.oracle().RoundEnded(message.key, message.number);
  }
  bytes_.clear();
  Check(Encode(message, bytes_), "encode");
  world_.Send(rank_, child, bytes_);
}

/// An allgather is decided with the rows that this rank passed, of the tensors it is not absent
/// from.
void Player::CheckRows(const WorkDecision& work, const DecidedKey& key, const Vote& vote) {
  const std::vector<int32_t>& ranks = *world_.oracle().RanksOf(work.set);
  const size_t position = PositionOf(rank_, ranks);
  if (key.rows.size() != vote.rows.size() * ranks.size()) {
    return world_.oracle().Fail("decided with rows of other tensors");
  }
  for (size_t t = 0; t < vote.rows.size(); ++t) {
    const int64_t own = TestBit(vote.absent, static_cast<int>(t)) ? 0 : vote.rows[t];
    if (OfTensor(key.rows, t, ranks.size())[position] == own) continue;
    world_.oracle().Fail("decided with rows that were not passed");
  }
}

/// What is remembered of the batches is what the decision says.
void Player::CheckPlans(const WorkDecision& work, std::span<const BatchPlan> formed) {
  if (work.plans.empty()) return;
  ++world_.totals().known;
  const auto same = [](const BatchPlan& a, const BatchPlan& b) {
    const auto same_entry = [](const BatchEntry& x, const BatchEntry& y) {
      return x.key == y.key && x.tensor == y.tensor;
    };
    return a.bytes == b.bytes && a.absent == b.absent &&
           std::ranges::equal(a.entries, b.entries, same_entry);
  };
  if (std::ranges::equal(work.plans, formed, same)) return;
  world_.oracle().Fail("handed batches that are not those of the work");
}

void Player::OnWork(const WorkDecision& work) {
  // Alone, and without a batch: before or after what members agree on.
  if (work.keys.front().name->kind == OpKind::kStep) {
    has_announced_ = false;
    return;
  }
  size_t count = 0;
  FormBatches(work, world_.scenario().FusionThreshold(work.device()), plans_, &count);
  CheckPlans(work, std::span(plans_).first(count));
  world_.oracle().Handed(rank_, work, plans_, count);
  ++world_.totals().works;
  const std::vector<int32_t>& members = *world_.oracle().RanksOf(work.set);
  std::vector<Submission*> owners;
  for (const DecidedKey& key : work.keys) {
    const auto it = pending_.find(key.key);
    if (key.mine != (it != pending_.end())) world_.oracle().Fail("handed work is not as submitted");
    if (!key.mine && !absent_) world_.oracle().Fail("handed foreign work without having joined");
    owners.push_back(key.mine && it != pending_.end() ? it->second : nullptr);
    if (owners.back() == nullptr) continue;
    CheckRows(work, key, owners.back()->vote);
    owners.back()->state = Submission::State::kDone;
    owners.back()->set = work.set;
    owners.back()->number = work.number;
    pending_.erase(it);
  }
  for (size_t i = 0; i < count; ++i) {
    Waiting batch;
    batch.set = work.set;
    batch.number = work.number;
    batch.index = static_cast<int32_t>(i);
    for (const BatchEntry& entry : plans_[i].entries) {
      batch.owners.push_back(owners[static_cast<size_t>(entry.key)]);
      if (batch.owners.back() == nullptr) continue;
      batch.owners.back()->state = Submission::State::kRunning;
      ++batch.owners.back()->batches;
    }
    const bool idle = std::all_of(batch.owners.begin(), batch.owners.end(),
                                  [](const Submission* owner) { return owner == nullptr; });
    if (idle && !world_.scenario().joined_ranks_run) continue;
    batch.participants = Participants(work, plans_[i], batch.owners);
    for (const int32_t rank : members) {
      if (batch.reporter < 0 &&
          !std::binary_search(plans_[i].absent.begin(), plans_[i].absent.end(), rank)) {
        batch.reporter = rank;
      }
    }
    const DecidedKey& first = work.keys[static_cast<size_t>(plans_[i].entries.front().key)];
    const DeviceKind device = first.signature->device;
    const bool serial = device == DeviceKind::kCuda && world_.scenario().serial_cuda;
    const QueueKey queue{serial ? UINT32_MAX : work.set, device};
    queues_[queue].push_back(std::move(batch));
    AnnounceHead(queue);
  }
  ScheduleAct();
}

/// Members that take part in a batch; empty if this rank cannot know. A present member owns all of
/// a batch's keys, so it can tell which absent members have submitted one of them.
std::vector<int> Player::Participants(const WorkDecision& work, const BatchPlan& plan,
                                      const std::vector<Submission*>& owners) const {
  const std::vector<int32_t>& members = *world_.oracle().RanksOf(work.set);
  std::vector<int> participants;
  if (!world_.scenario().joined_ranks_run &&
      std::find(owners.begin(), owners.end(), nullptr) != owners.end()) {
    return participants;
  }
  for (const int32_t rank : members) {
    const bool absent = std::binary_search(plan.absent.begin(), plan.absent.end(), rank);
    const bool submitted = std::any_of(owners.begin(), owners.end(), [&](const Submission* owner) {
      return owner != nullptr && world_.oracle().Has(rank, owner->op);
    });
    if (!absent || submitted || world_.scenario().joined_ranks_run) participants.push_back(rank);
  }
  return participants;
}

void Player::AnnounceHead(const QueueKey& queue) {
  std::deque<Waiting>& waiting = queues_[queue];
  if (waiting.empty() || waiting.front().announced) return;
  Waiting& head = waiting.front();
  head.announced = true;
  world_.BatchAtHead(rank_, head.set, head.number, head.index, head.participants);
}

/// Tick may ask IsBlocked, so it comes before the batch is taken away, after which this rank is
/// about to act.
void Player::FinishBatch(int64_t number, int32_t index) {
  if (failed_) return;
  Tick();
  for (auto& [queue, waiting] : queues_) {
    if (waiting.empty() || waiting.front().number != number || waiting.front().index != index) {
      continue;
    }
    const Waiting done = std::move(waiting.front());
    waiting.pop_front();
    for (Submission* owner : done.owners) {
      if (owner != nullptr && --owner->batches == 0) owner->state = Submission::State::kDone;
    }
    reporter_ = done.reporter;
    reported_ = false;
    const bool is_decided = number > 0;  // else agreed on
    if (is_decided) negotiation_.BatchDone(number, index);
    const int decider = DecidesFor(*world_.oracle().RanksOf(done.set));
    if (is_decided && done.reporter == rank_ && rank_ != decider && !reported_) {
      world_.oracle().Fail("rank " + std::to_string(rank_) + " does not report its batch");
    }
    reporter_.reset();
    AnnounceHead(queue);
    ScheduleAct();
    return AfterCall();
  }
  world_.oracle().Fail("a batch finished that does not run");
}

void Player::OnEnded(KeyId key, const Status& status) {
  if (negotiation_.NameOf(key).kind == OpKind::kStep) {
    has_announced_ = false;
    return;
  }
  const auto it = pending_.find(key);
  if (it == pending_.end()) {
    return world_.oracle().Fail("rank " + std::to_string(rank_) + ": " +
                                farandole::Describe(negotiation_.NameOf(key)) +
                                " ended but was not pending");
  }
  it->second->state = Submission::State::kEnded;
  it->second->ended = status;
  pending_.erase(it);
  Totals& totals = world_.totals();
  ++(status.ok()                       ? totals.skipped
     : status.code() == Code::kAborted ? totals.aborted
                                       : totals.refused);
  ScheduleAct();
}

void Player::OnSetAdded(const ProcessSetInfo& set) {
  world_.oracle().SetAdded(rank_, set);
  const auto& sets = world_.scenario().sets;
  const auto it = std::find(sets.begin(), sets.end(), set.ranks);
  if (it == sets.end()) return world_.oracle().Fail("a set nobody asked for");
  logical_[set.uid] = static_cast<int>(it - sets.begin());
  ScheduleAct();
}

void Player::OnSetEnded(uint32_t set, const Status& why) {
  world_.oracle().SetEnded(rank_, set, why);
  if (set != kGlobalSet) return;
  join_void_ = true;
  if (!joined_) return;
  joined_ = left_;  // a rank whose join cannot complete any more leaves
  if (!left_) world_.In(rank_, 1, [this] { LeaveNow(); });
}

void Player::OnJoinDone(int last_rank) {
  world_.oracle().JoinDone(rank_, last_rank);
  ++world_.totals().joins;
  if (!joined_) world_.oracle().Fail("a join is done that was not asked for");
  joined_ = absent_ = false;
  const int end = world_.scenario().phase_end[static_cast<size_t>(phase_)];
  for (int op = head_; op < end; ++op) {
    Progress& progress = progress_[static_cast<size_t>(op)];
    if (progress == Progress::kWaiting) progress = Progress::kPassed;
  }
  head_ = end;
  ++phase_;
  ScheduleAct();
}

void Player::OnLeft(int rank) { world_.oracle().Left(rank_, rank); }

void Player::OnShutdown() {
  if (shut_down_ || !left_) world_.oracle().Fail("shut down twice, or without having left");
  shut_down_ = true;
  world_.oracle().ShutDown(rank_);
}

void Player::OnReport(const std::string& text) { world_.oracle().Report(rank_, text); }

/// Ranks disagree about what is idle.
bool Player::Holds(KeyId key) const {
  return pending_.contains(key) || (key + static_cast<KeyId>(rank_)) % 3 == 0;
}

/// The members' lowest common ancestor in the tree.
int Player::DecidesFor(const std::vector<int>& ranks) const {
  const std::vector<int>& parent = world_.scenario().parent;
  std::vector<int> above(parent.size());  // how many of `ranks` are below each node, or it
  for (const int rank : ranks) {
    for (int at = rank; at >= 0; at = parent[static_cast<size_t>(at)]) {
      if (++above[static_cast<size_t>(at)] == static_cast<int>(ranks.size())) return at;
    }
  }
  return -1;
}

std::vector<std::string> Player::OnStalls(const std::vector<StallFacts>& stalls, int64_t) {
  for (const StallFacts& stall : stalls) {
    std::vector<int> members(stall.silent.begin(), stall.silent.end());
    for (const Answer& answer : stall.answers) members.push_back(answer.rank);
    if (DecidesFor(members) == rank_) continue;
    world_.oracle().Fail("rank " + std::to_string(rank_) + " reports a stall of others");
  }
  std::vector<std::string> lines = DescribeStalls(stalls, kMostStallLines);
  world_.totals().reports += static_cast<int64_t>(lines.size());
  return lines;
}

void Player::OnStallShutdown(const Status& error) { agreed_error_ = error; }

/// Nothing is about to be submitted before an operation, or the join, ends here.
bool Player::IsBlocked() const {
  const bool leaves = left_ || (absent_ && !joined_);
  return !failed_ && !leaves && !act_scheduled_ && !acting_ && !agreeing_ &&
         std::ranges::all_of(queues_, [](const auto& queue) { return queue.second.empty(); });
}

}  // namespace farandole::simulation
