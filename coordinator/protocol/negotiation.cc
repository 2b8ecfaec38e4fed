#include "coordinator/protocol/negotiation.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "coordinator/protocol/applier.h"
#include "coordinator/protocol/decider.h"
#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/node_state.h"
#include "coordinator/protocol/splits.h"
#include "coordinator/protocol/vote_tally.h"
#include "core/clock.h"

namespace farandole {
namespace {

/// Rows are compared apart from this (HasKnownRows); a step count travels beside an id.
bool IsPlain(const Vote& vote) {
  return !AnyBit(vote.absent) && !AnyBit(vote.clean) && vote.failed.empty();
}

/// Whether a vote by id alone says that an allgather gets these rows from this rank: as many as in
/// the last decision of the id.
bool HasKnownRows(const NodeState& node, const SetState& set, const CachedSignature& cached,
                  const std::vector<int64_t>& rows) {
  const std::vector<int32_t>& ranks = set.info.ranks;
  const size_t position = PositionOf(node.options.rank, ranks);
  for (size_t t = 0; t < rows.size(); ++t) {
    if (OfTensor(cached.rows, t, ranks.size())[position] != rows[t]) return false;
  }
  return true;
}

Status CheckSubmit(const NodeState& node, const Key& key, const SetState* set) {
  const auto refuse = [&](const char* why) {
    return InvalidArgument(Describe(node.sets.ForUser(key.name)) + why);
  };
  const bool ended = set == nullptr ? node.sets.Ended(key.name.set) : !set->live;
  if (set == nullptr && !ended) return refuse(": there is no such process set");
  if (node.leaves) return refuse(": this rank has left");
  // Not refused: the submission ends with the reason why the set ended (EndAtOnce).
  if (ended) return {};
  if (!set->member) return refuse(": this rank is no member of the process set");
  if (node.sets.Joined(node.options.rank)) return refuse(": this rank has joined");
  if (key.pending) return refuse(": already pending on this rank");
  return {};
}

/// Of a vote that an id alone cannot say. A plain vote needs no such check: its signature passed
/// this when it was submitted without an id.
Status CheckRecord(const NodeState& node, const Key& key, const SetState& set,
                   const Signature& signature, const Vote& vote) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimits(key.name, signature));
  FARANDOLE_RETURN_IF_ERROR(
      CheckGroupFits(node.sets.ForUser(key.name), signature, set.info.ranks.size()));
  const auto tensors = static_cast<int>(signature.tensors.size());
  const size_t rows = signature.kind == OpKind::kAllgather ? signature.tensors.size() : 0;
  if (vote.rows.size() != rows || std::ranges::any_of(vote.rows, [](auto n) { return n < 0; })) {
    return InvalidArgument(Describe(node.sets.ForUser(key.name)) + ": rows " +
                           DescribeRows(vote.rows) + " of " + std::to_string(rows) + " tensors");
  }
  if (FitsMask(vote.absent, tensors) && FitsMask(vote.clean, tensors)) return {};
  return InvalidArgument(Describe(node.sets.ForUser(key.name)) +
                         ": the vote marks a tensor beyond the last");
}

KeyVotes OwnVotes(const NodeState& node, const Key& key, const CachedSignature* cached,
                  const Signature& signature, const Vote& vote) {
  KeyVotes votes;
  votes.key = key.name;
  votes.signatures.emplace_back();
  if (cached != nullptr) votes.signatures.back().id = cached->id;
  if (cached == nullptr) votes.signatures.back().signature = signature;
  if (AnyBit(vote.absent)) votes.absent.push_back({node.options.rank, vote.absent});
  if (AnyBit(vote.clean)) votes.clean.push_back({node.options.rank, vote.clean});
  // The parent's parser refuses a longer text.
  if (!vote.failed.empty()) {
    votes.failed.push_back({node.options.rank, vote.failed.substr(0, kMaxNameBytes)});
  }
  if (vote.step.step > 0) votes.steps.push_back({vote.step, {}});
  if (!vote.rows.empty()) votes.rows.push_back({node.options.rank, vote.rows});
  return votes;
}

/// What CheckOwnVote compares the decision with, and what answers to queries describe. Only a
/// signature without an id is copied; one with an id lives as long as the key.
void Remember(NodeState& node, Key& key, const CachedSignature* cached, const Signature& signature,
              const Vote& vote) {
  key.pending = true;
  key.own_is_plain = IsPlain(vote);
  key.own_cached = cached;
  if (cached == nullptr) key.own = std::make_unique<Signature>(signature);
  key.own_absent = vote.absent;
  key.own_rows = vote.rows;
  key.own_failure = vote.failed.substr(0, kMaxNameBytes);
  if (IsWaitedFor(key)) ++node.pending;
}

/// The others hear of a failed submission when they have voted too. A rank that leaves before that
/// takes the reason along.
std::string UnreportedFailure(const SignatureCache& keys) {
  for (KeyId id = 0; id < keys.size(); ++id) {
    const Key& key = keys.Peek(id);  // the votes of known work say nothing of failures
    if (key.pending && !key.own_failure.empty()) return key.own_failure;
  }
  return {};
}

}  // namespace

/// Observers -> Decider -> Applier -> VoteTally; each of them tells the observers what happens.
struct Negotiation::Components {
  Components(NegotiationOptions options, NegotiationListener& listener)
      : node(std::move(options), listener),
        tally(node),
        applier(node, tally),
        decider(node, tally, applier) {}

  bool SubmitKnown(KeyId id, const Signature& signature, const Vote& vote);
  void ForgetIdleKeys();
  void EndAtOnce(KeyId id, const Status& why);
  Status ReceiveLeave(const UpMessage& message);
  bool DecidedHere(int64_t number) const { return LevelOfNumber(number) == node.sets.depth(); }

  NodeState node;
  VoteTally tally;
  Applier applier;
  Decider decider;
  size_t forget_above = node.options.idle_keys;  // live keys
};

/// As Negotiation::Submit of the next key of known work, by its id alone. All that Submit checks
/// has been checked with the key's last submission, or dissolves what is known.
/// @return false, and nothing has changed, unless it is that.
bool Negotiation::Components::SubmitKnown(KeyId id, const Signature& signature, const Vote& vote) {
  Key& key = node.keys.Peek(id);
  KnownWork& work = *key.known;
  const bool is_next = key.known_at == work.own && work.keys[work.own].mine && !node.leaves;
  if (!is_next || !IsPlain(vote) || vote.step.step > 0 || !vote.rows.empty()) return false;
  const CachedSignature* const cached = node.keys.Match(key, signature);
  if (cached == nullptr || &cached->signature != work.keys[work.own].signature) return false;
  Remember(node, key, cached, signature, vote);
  for (const auto& one : node.observers) one->OnSubmitted(id);
  tally.CountOwn(work);
  return true;
}

/// Of a key without an id a rank keeps nothing that others rely on, so each forgets its own, once
/// there are a quarter more than the last time left: those for which nobody has voted since the
/// time before. While ids are retired, late votes by them look for their keys.
void Negotiation::Components::ForgetIdleKeys() {
  if (node.keys.live() <= forget_above) return;
  node.keys.ForgetIf([this](KeyId id) {
    if (node.keys.Peek(id).known != nullptr) return false;  // it has an id
    Key& key = node.keys.At(id);
    const SetState* set = node.sets.Find(key.name.set);
    const bool is_free =
        key.cached.empty() && key.IsAtRest() && !key.round.stalled && !key.round.asked &&
        set != nullptr && set->live && set->retired.empty() && !node.listener.Holds(id) &&
        std::ranges::none_of(node.observers, [id](const auto& one) { return one->Knows(id); });
    if (!key.TestIdle() || !is_free) return false;
    for (const auto& one : node.observers) one->OnKeyReleased(id);
    node.listener.OnKeyReleased(id);
    return true;
  });
  const size_t least = node.options.idle_keys;
  const size_t left = node.keys.live();
  forget_above = least == 0 ? 0 : left + std::max(least, left / 4);
}

/// A submission in a set that has ended. The set's keys were released when it ended. This key has
/// been interned since, for this call, and is released again; keys of the global set stay.
void Negotiation::Components::EndAtOnce(KeyId id, const Status& why) {
  const KeyName& name = node.keys.At(id).name;
  const uint32_t set = name.set;
  node.listener.OnEnded(id, DescribeEnd(node.sets.ForUser(name), why));
  if (set != kGlobalSet) applier.ReleaseKey(id);
}

Status Negotiation::Components::ReceiveLeave(const UpMessage& message) {
  if (!node.IsRoot()) {
    tally.SendLeave(message);
  } else if (message.type == UpType::kLeave) {
    return decider.Leave(message.rank, message.facts);
  } else {
    decider.AnnounceLeave(message.rank);
  }
  return {};
}

Negotiation::Negotiation(NegotiationOptions options, NegotiationListener& listener,
                         const ObserveNegotiation& observe)
    : components_(std::make_unique<Components>(std::move(options), listener)) {
  if (observe) components_->node.observers = observe(components_->node, components_->decider);
}
Negotiation::~Negotiation() = default;

void Negotiation::SetStallShutdown(int64_t age_ns) {
  components_->node.options.stall_shutdown_ns = age_ns;
}

KeyId Negotiation::Intern(const KeyName& name) { return components_->node.keys.Intern(name); }
const KeyName& Negotiation::NameOf(KeyId key) const {
  return components_->node.keys.Peek(key).name;
}

/// The submission is entered before its vote is counted, as this vote may complete the round. Until
/// all checks have passed nothing changes but the name of the key's use, by which messages call it.
Status Negotiation::Submit(KeyId id, const Signature& signature, const Vote& vote) {
  FARANDOLE_RETURN_IF_ERROR(fault());
  NodeState& node = components_->node;
  if (node.keys.Peek(id).known != nullptr) {
    if (components_->SubmitKnown(id, signature, vote)) return {};
    components_->tally.CountPartial();
  }
  Key& key = node.keys.At(id);
  SetState* set = node.sets.Find(key.name.set);
  FARANDOLE_RETURN_IF_ERROR(CheckSubmit(node, key, set));
  if (SpaceOf(signature.kind) != SpaceOf(key.name.kind)) {
    return InvalidArgument(Describe(node.sets.ForUser(key.name)) + ": the signature is that of " +
                           std::string(Name(signature.kind)));
  }
  key.NameAfter(signature);
  if (set == nullptr || !set->live) {
    components_->EndAtOnce(id, set == nullptr ? node.sets.WhyEnded(key.name.set) : set->why);
    return {};
  }
  const CachedSignature* cached = node.keys.Match(key, signature);
  const bool plain =
      cached != nullptr && IsPlain(vote) && HasKnownRows(node, *set, *cached, vote.rows);
  if (!plain) FARANDOLE_RETURN_IF_ERROR(CheckRecord(node, key, *set, signature, vote));
  Remember(node, key, cached, signature, vote);
  for (const auto& one : node.observers) one->OnSubmitted(id);
  if (plain) return components_->tally.CountOwn(id, *cached, vote.step);
  node.listener.OnVoteByName();
  return components_->tally.CountOwn(id, OwnVotes(node, key, cached, signature, vote));
}

/// The rows of an allgather are known if each member passes what it passed the last time.
Negotiation::Known Negotiation::FindKnown(KeyId id, const Signature& signature, const Vote& vote) {
  static const Mask kNone;
  NodeState& node = components_->node;
  Key& key = node.keys.Peek(id);
  const SetState* const set = node.sets.Find(key.name.set);
  const bool may_agree = node.pending == 0 && set != nullptr && set->live && set->member &&
                         set->joined == 0 && !node.leaves && fault().ok();
  if (!may_agree || !IsPlain(vote) || vote.step.step > 0) return {};
  const CachedSignature* const cached = node.keys.Match(key, signature);
  if (cached == nullptr || !HasKnownRows(node, *set, *cached, vote.rows)) return {};
  key.NameAfter(signature);
  return {IndexOfId(cached->id),
          set->last_round,
          {id, true, &key.name, &cached->signature, {}, &kNone, cached->rows}};
}

void Negotiation::NoteAgreed(const Known& known) {
  NodeState& node = components_->node;
  node.keys.Peek(known.key.key).is_idle = false;
  for (const auto& one : node.observers) one->OnSubmitted(known.key.key);
}

/// Sent at once, even with submissions pending. If it were held back until they end, other ranks
/// might wait for this one in another key and never submit those.
Status Negotiation::Join() {
  components_->tally.CountPartial();
  const NodeState& node = components_->node;
  if (node.leaves) return InvalidArgument("join: this rank has left");
  if (node.sets.Joined(node.options.rank)) {
    return InvalidArgument("join: this rank has joined already");
  }
  const SetState& global = *node.sets.Find(kGlobalSet);
  if (!global.live) return global.why;
  return components_->tally.Join(node.options.rank);
}

Status Negotiation::AnnounceLeave() {
  components_->tally.CountPartial();
  NodeState& node = components_->node;
  if (node.leaves) return InvalidArgument("leave: this rank has left already");
  node.leaves = true;
  UpMessage message;
  message.type = UpType::kLeaving;
  message.rank = node.options.rank;
  return components_->ReceiveLeave(message);
}

Status Negotiation::Leave(FailureFacts failure) {
  components_->tally.CountPartial();
  NodeState& node = components_->node;
  if (node.left) return InvalidArgument("leave: this rank has left already");
  node.leaves = node.left = true;
  if (failure.cause.empty()) {
    failure.cause = UnreportedFailure(node.keys);
    failure.kind = FailureKind::kError;
  }
  failure.cause.resize(std::min(failure.cause.size(), kMaxNameBytes));
  UpMessage message;
  message.type = UpType::kLeave;
  message.rank = node.options.rank;
  message.facts = std::move(failure);
  return components_->ReceiveLeave(message);
}

void Negotiation::BatchDone(int64_t number, int32_t index) {
  if (!components_->applier.TakeReport(number, index)) return;
  if (components_->DecidedHere(number)) return components_->decider.FreeOwnBatch(number, index);
  UpMessage done;
  done.type = UpType::kDone;
  done.number = number;
  done.index = index;
  components_->node.SendUp(done);
}

Status Negotiation::ReceiveUp(int from, const UpMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(fault());
  components_->tally.CountPartial();
  NodeState& node = components_->node;
  const int child = node.sets.ChildOf(from);
  if (child < 0) return Internal("protocol: rank " + std::to_string(from) + " is no child");
  switch (message.type) {
    case UpType::kVotes:
      return components_->tally.ReceiveVotes(child, message);
    // No child speaks for a rank outside its branch: `break` leads to the error at the end.
    case UpType::kJoin:
      if (node.sets.ContributorOf(message.rank) != ContributorOfChild(child)) break;
      return components_->tally.Join(message.rank);
    case UpType::kLeaving:
    case UpType::kLeave:
      if (node.sets.ContributorOf(message.rank) != ContributorOfChild(child)) break;
      return components_->ReceiveLeave(message);
    case UpType::kDone:
      // Nodes on the way do not know which batches are unfinished, and pass it on as it is.
      if (components_->DecidedHere(message.number))
        return components_->decider.FreeBatch(message.number, message.index);
      if (message.number < 0 || LevelOfNumber(message.number) > node.sets.depth()) {
        return Internal("protocol: a batch of decision " + std::to_string(message.number) +
                        ", which no node above has made");
      }
      node.SendUp(message);
      return {};
    case UpType::kUnused:
      return components_->applier.ReceiveUnused(child, message);
    case UpType::kStall:
    case UpType::kAnswer:
    case UpType::kBlocked:
    case UpType::kWaits:
    case UpType::kSteps:
      for (const auto& one : node.observers) {
        FARANDOLE_RETURN_IF_ERROR(one->ReceiveUp(child, message));
      }
      return {};
  }
  return Internal("protocol: rank " + std::to_string(message.rank) + " is not in the branch of " +
                  std::to_string(from));
}

Status Negotiation::ReceiveDown(int from, const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(fault());
  components_->tally.CountPartial();
  if (from != components_->node.sets.parent()) {
    return Internal("protocol: rank " + std::to_string(from) + " is not the parent");
  }
  components_->decider.DecideBefore(message);
  FARANDOLE_RETURN_IF_ERROR(fault());
  return components_->applier.Dispatch(message);
}

/// Called when an iteration of the engine loop has taken in all that has come, so that keys
/// completed together share a message or a batch.
void Negotiation::Flush() {
  components_->tally.CountPartial();
  components_->decider.Decide();
  components_->tally.SendVotes();
  components_->ForgetIdleKeys();
}

void Negotiation::SetTime(int64_t now_ns) { components_->node.now_ns = now_ns; }
int64_t Negotiation::Tick(int64_t now_ns) {
  SetTime(now_ns);
  components_->tally.CountPartial();
  int64_t next_ns = kNever;
  for (const auto& one : components_->node.observers) next_ns = std::min(next_ns, one->Tick());
  return std::min(next_ns, due_ns());
}
int64_t Negotiation::due_ns() const {
  int64_t due_ns = kNever;
  for (const auto& one : components_->node.observers) due_ns = std::min(due_ns, one->due_ns());
  return due_ns;
}

/// An open round counts also where this rank has not submitted: somebody waits for it, and the
/// engine polls more often.
bool Negotiation::Busy() const {
  return Pending() > 0 || components_->tally.open_rounds() > 0 ||
         std::ranges::any_of(components_->node.observers,
                             [](const auto& one) { return one->Busy(); });
}
int64_t Negotiation::Pending() const { return components_->node.pending; }
Negotiation::TableSizes Negotiation::Sizes() const {
  const NodeState& node = components_->node;
  return {
      node.sets.all().size(),        node.keys.live(), node.keys.size(), components_->decider.ids(),
      components_->decider.queues(), node.keys.known()};
}
int64_t Negotiation::last_number(uint32_t set) const {
  const SetState* state = components_->node.sets.Find(set);
  return state == nullptr ? components_->node.last_number() : state->last_number;
}
Status Negotiation::fault() const { return components_->decider.fault(); }

}  // namespace farandole
