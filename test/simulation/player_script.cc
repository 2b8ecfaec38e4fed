// The script's side of a player: what it submits, when it joins, when it leaves.

#include <algorithm>

#include "test/simulation/player.h"

namespace farandole::simulation {

bool Player::Over(int op) const {
  const auto it = submissions_.find(op);
  return it != submissions_.end() && (it->second->state == Submission::State::kDone ||
                                      it->second->state == Submission::State::kEnded);
}

/// Whether all submissions before `end` in the script have ended.
bool Player::AllOver(int end) const {
  return std::all_of(submissions_.begin(), submissions_.lower_bound(end),
                     [this](const auto& one) { return Over(one.first); });
}

std::optional<uint32_t> Player::UidOf(int logical_set) const {
  for (const auto& [uid, logical] : logical_) {
    if (logical == logical_set) return uid;
  }
  return std::nullopt;
}

/// True if this rank has no part in the operation: no member, or the set was never made.
bool Player::Passes(int op) {
  const Op& what = OpAt(op);
  if (!world_.scenario().IsMember(what, rank_)) return true;
  const bool removes = what.kind == OpKind::kRemoveSet && what.flavour != Flavour::kInvalid;
  const int needed = removes ? what.target : what.set;
  if (UidOf(needed)) return false;
  const int add = world_.scenario().add_op[static_cast<size_t>(needed)];
  return progress_[static_cast<size_t>(add)] == Progress::kPassed || Over(add);
}

bool Player::CanSubmit(int op) {
  const Op& what = OpAt(op);
  const bool removes = what.kind == OpKind::kRemoveSet && what.flavour != Flavour::kInvalid;
  if (!UidOf(removes ? what.target : what.set)) return false;
  int before = what.previous;
  while (before >= 0 && progress_[static_cast<size_t>(before)] == Progress::kPassed) {
    before = OpAt(before).previous;
  }
  if (before < 0) return true;
  if (progress_[static_cast<size_t>(before)] == Progress::kWaiting) return false;
  const bool handed = submissions_[before]->state != Submission::State::kPending;
  return world_.scenario().eager ? handed : Over(before);
}

/// Up to where operations may be submitted now.
int Player::Limit() const {
  const Scenario& s = world_.scenario();
  const auto phase = static_cast<size_t>(phase_);
  int limit = join_void_ ? s.phase_end[phase] : s.join_at[static_cast<size_t>(rank_)][phase];
  if (s.part_at >= 0) limit = std::min(limit, s.part_at);
  const int leave = s.leave_at[static_cast<size_t>(rank_)];
  return leave >= 0 ? std::min(limit, leave) : limit;
}

void Player::SkipPassed() {
  const int end = world_.scenario().phase_end[static_cast<size_t>(phase_)];
  for (int op = head_; op < end; ++op) {
    Progress& progress = progress_[static_cast<size_t>(op)];
    if (progress == Progress::kWaiting && Passes(op)) progress = Progress::kPassed;
    if (op == head_ && progress != Progress::kWaiting) ++head_;
  }
}

void Player::Act() {
  act_scheduled_ = false;
  acting_ = true;
  ActOnce();
  acting_ = false;
}

void Player::ActOnce() {
  if (left_ || absent_ || failed_ || agreeing_) return;
  const Scenario& s = world_.scenario();
  if (phase_ == static_cast<int>(s.phase_end.size())) {
    if (AllOver(head_)) LeaveNow();
    return;
  }
  SkipPassed();
  if (s.part_at >= 0 && head_ >= s.part_at) {
    const int apart = static_cast<int>(s.ops.size()) - 2 + rank_ % 2;
    if (!submissions_.contains(apart)) Submit(apart);
    return;
  }
  const int leave = s.leave_at[static_cast<size_t>(rank_)];
  if (leave >= 0 && head_ >= leave) return LeaveNow();
  if (head_ >= Limit()) return EndPhase();
  if (s.agrees && world_.random().Percent(20)) AnnounceStep();
  if (SubmitOne()) ScheduleAct();
}

bool Player::SubmitOne() {
  const Scenario& s = world_.scenario();
  if (s.WaitsAt(rank_, head_) && !AllOver(head_)) return false;
  const int end = std::min(Limit(), head_ + s.look_ahead);
  std::vector<int> able;
  for (int op = head_; op < end; ++op) {
    if (op > head_ && s.WaitsAt(rank_, op)) break;
    if (progress_[static_cast<size_t>(op)] == Progress::kWaiting && CanSubmit(op)) {
      able.push_back(op);
    }
  }
  if (able.empty()) return false;
  Submit(able[static_cast<size_t>(world_.random().Below(static_cast<int>(able.size())))]);
  return true;
}

void Player::Submit(int op) {
  const Op& what = OpAt(op);
  const bool removes = what.kind == OpKind::kRemoveSet && what.flavour != Flavour::kInvalid;
  const uint32_t target = removes ? *UidOf(what.target) : 0;
  Submission& submission =
      world_.oracle().Submitted(rank_, op, world_.scenario().SignatureOf(what, rank_, target),
                                world_.scenario().VoteOf(what, rank_));
  ++world_.totals().submissions;
  progress_[static_cast<size_t>(op)] = Progress::kSubmitted;
  submissions_[op] = &submission;
  const KeyId key = negotiation_.Intern({*UidOf(what.set), what.kind, what.name});
  if (!pending_.emplace(key, &submission).second) world_.oracle().Fail("the key is pending");
  // As the engine does, which calls Tick between its iterations; or as the contract allows.
  if (world_.scenario().repeats) {
    negotiation_.SetTime(world_.now());
  } else {
    Tick();
  }
  if (!Agrees(key, submission)) CastVote(key, submission);
}

void Player::CastVote(KeyId key, const Submission& submission) {
  Check(negotiation_.Submit(key, submission.signature, submission.vote), "submit");
  AfterCall();
}

/// As an optimizer after its step. Its decision may come at any time.
void Player::AnnounceStep() {
  if (has_announced_ || join_void_) return;
  has_announced_ = true;
  Signature signature;
  signature.kind = OpKind::kStep;
  Vote vote;
  vote.step.step = 1;
  Tick();
  const KeyId key = negotiation_.Intern({kGlobalSet, OpKind::kStep, "step"});
  Check(negotiation_.Submit(key, signature, vote), "submit a step");
  AfterCall();
}

/// As EngineLoop::RunAgreed. @return whether this rank waits for the others now, or they agree.
bool Player::Agrees(KeyId key, Submission& submission) {
  const bool is_alone = pending_.size() == 1 && std::ranges::all_of(queues_, [](const auto& q) {
                          return q.second.empty();
                        });
  if (!world_.scenario().agrees || !is_alone || submission.signature.device == DeviceKind::kCuda)
    return false;
  const Negotiation::Known known =
      negotiation_.FindKnown(key, submission.signature, submission.vote);
  if (known.id == kNoId) return false;
  const uint32_t set = known.key.name->set;
  const int members = static_cast<int>(world_.oracle().RanksOf(set)->size());
  agreements_.try_emplace(set, world_.WordOf(set), members);
  agreeing_ = {key, &submission, known, {}};
  Note(agreements_.at(set).Propose(known.round, known.id));
  return true;
}

void Player::Note(Agreement::State state) {
  const uint32_t set = agreeing_->known.key.name->set;
  if (state == Agreement::State::kOpen) {
    Random& random = world_.random();
    const int soon = random.Between(1, world_.scenario().think + 1);
    const int64_t later = random.Percent(20) ? int64_t{soon} * 200 : soon;  // it loses its core
    return world_.In(rank_, later, [this, set] {
      Agreement& view = agreements_.at(set);
      Note(world_.random().Percent(10) ? view.Decline() : view.Look());
    });
  }
  const Agreeing over = *std::exchange(agreeing_, {});
  if (state == Agreement::State::kAgreed) {
    ++world_.totals().agreed;
    OnWork({-++agreed_[set], set, {&over.known.key, 1}});
    AfterCall();
  } else {
    ++world_.totals().declined;
    CastVote(over.key, *over.submission);
  }
  for (const auto& what : over.held) what();
  ScheduleAct();
}

bool Player::IsHeld(std::function<void()> what) {
  if (agreeing_) agreeing_->held.push_back(std::move(what));
  return agreeing_.has_value();
}

void Player::EndPhase() {
  const bool last = phase_ + 1 == static_cast<int>(world_.scenario().phase_end.size());
  if (join_void_ ||
      (last && world_.scenario().seed % 2 == 0 && head_ >= world_.scenario().phase_end.back())) {
    ++phase_;
    return ScheduleAct();
  }
  joined_ = absent_ = true;
  Tick();
  Check(negotiation_.Join(), "join");
  AfterCall();
}

void Player::LeaveNow() {
  if (failed_ || IsHeld([this] { LeaveNow(); })) return;
  left_ = true;
  Tick();
  Check(negotiation_.Leave(), "leave");
  AfterCall();
}

void Player::ScheduleAct() {
  if (act_scheduled_) return;
  act_scheduled_ = true;
  world_.In(rank_, world_.random().Below(world_.scenario().think + 1), [this] { Act(); });
}

}  // namespace farandole::simulation
