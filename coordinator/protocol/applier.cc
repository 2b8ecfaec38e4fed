#include "coordinator/protocol/applier.h"

#include <algorithm>

#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/splits.h"
#include "coordinator/protocol/validate.h"

namespace farandole {
namespace {

// Of keys that are decided by id alone: every rank contributes every tensor.
const Mask kNoMask;
const std::vector<RankMask> kNobody;

Status Broke(const std::string& what) { return Internal("protocol: " + what); }

/// Whether `mask` has the bits of `of` that are not in `without`.
bool IsDifference(const Mask& mask, const Mask& of, const Mask& without) {
  const auto word = [](const Mask& bits, size_t w) { return w < bits.size() ? bits[w] : 0; };
  for (size_t w = 0; w < std::max(mask.size(), of.size()); ++w) {
    if (word(mask, w) != (word(of, w) & ~word(without, w))) return false;
  }
  return true;
}

std::string DescribeSubmitted(const Signature& signature) {
  return std::string(Name(signature.kind)) + " of " + DescribeShort(signature);
}

/// The lowest member that contributes to the batch: it alone reports it done. An absent rank may
/// finish early or have nothing to run, so its report could open the window before the others have
/// finished. -1 if all are absent, which is never decided: such tensors are skipped.
int32_t ReporterOf(const std::vector<int32_t>& ranks, const std::vector<int32_t>& absent) {
  for (const int32_t rank : ranks) {
    if (!std::binary_search(absent.begin(), absent.end(), rank)) return rank;
  }
  return -1;
}

Status FinalErrorOf(const DownMessage& message) {
  FailureFacts facts = message.facts;
  facts.ranks = message.ranks;
  const auto code = IsErrorCode(message.code) ? static_cast<Code>(message.code) : Code::kInternal;
  return Status(code, message.text, std::move(facts));
}

/// What ends with a rank that has left, and is the failure of that rank if the kind is known.
Status WhyLeft(int rank, FailureFacts facts) {
  if (facts.cause.empty()) return Aborted("rank " + std::to_string(rank) + " has left");
  const std::string who = RankWithProcess(rank, facts);
  std::string text = who + " has left after it failed: " + facts.cause;
  if (facts.kind == FailureKind::kExited) facts.cause = text = who + " " + facts.cause;
  if (facts.kind != FailureKind::kUnknown) facts.ranks = {rank};
  return Status(Code::kAborted, text, std::move(facts));
}

}  // namespace

/// A child's next vote may come at once, so what closes its round here comes first. An error stops
/// the decision here, so that no child acts on it.
Status Applier::Dispatch(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(Apply(message));
  Forward(message);
  Notify(message);
  return {};
}

/// A node gets the decisions for its branches only, so the numbers of a level ascend with gaps. The
/// number is kept first, as rounds and sets that the decision closes are stamped with it.
Status Applier::Apply(const DownMessage& message) {
  const int level = LevelOfNumber(message.number);
  // What ends sets and joins is rank 0's, whose numbers late votes are recognised by.
  const bool is_of_root = message.type >= DownType::kAddSet;
  if (message.number < 0 || level > (is_of_root ? 0 : node_.sets.depth())) {
    return Broke("decision " + std::to_string(message.number) + " is of no node above");
  }
  int64_t& last_number = node_.last_numbers[static_cast<size_t>(level)];
  if (message.number <= last_number) {
    return Broke("decision " + std::to_string(message.number) + " after " +
                 std::to_string(last_number));
  }
  last_number = message.number;
  batches_ = 0;
  switch (message.type) {
    case DownType::kWork:
      return ApplyWork(message);
    case DownType::kSkip:
    case DownType::kRefuse:
      return ApplyRefusal(message);
    case DownType::kAddSet:
    case DownType::kRemoveSet:
      return ApplySetChange(message);
    case DownType::kJoinDone:
      return ApplyJoinDone(message);
    case DownType::kLeft:
      return ApplyLeft(message);
    case DownType::kRetire:
      return ApplyRetirement(message);
    case DownType::kStallShutdown:
      return {};
    case DownType::kQuery:
    case DownType::kReport:
    case DownType::kWhoWaits:
      for (const auto& one : node_.observers) {
        FARANDOLE_RETURN_IF_ERROR(one->ReceiveDown(message));
      }
      return {};
    case DownType::kShutdown:
      return node_.leaves ? Status() : Broke("a shutdown, though this rank has not left");
  }
  return Broke("unknown decision");
}

/// Decisions about the keys of a set are made by one node, here or above.
/// @return the set, about which `message` is now the last decision.
Result<SetState*> Applier::FindDecided(uint32_t uid, const DownMessage& message) {
  SetState* const set = node_.sets.Find(uid);
  const bool is_live = set != nullptr && set->live;
  const bool is_own = LevelOfNumber(message.number) == node_.sets.depth();
  if (is_live && is_own == set->IsDecidedHere()) {
    set->last_number = message.number;
    return set;
  }
  return Broke("a decision about process set " + std::to_string(uid) +
               (is_live ? ", which another node decides for" : ", which is not live"));
}

/// The masks and rows of its vote are not cleared: they are read only while the key is pending, and
/// the next submission overwrites them.
/// @return true if this rank had a submission, which the caller has to end.
bool Applier::TakePending(Key& key) {
  if (!key.pending) return false;
  key.pending = false;
  key.own.reset();
  key.own_cached = nullptr;
  if (IsWaitedFor(key)) --node_.pending;
  return true;
}

/// Keys are entered in the order of the message, ids before items, in which all members run them.
/// After an error the rounds of some keys are closed already; but nothing has been forwarded or
/// handed out, and the error is final. `decided_` points into `message` and is good for this
/// Dispatch only.
Status Applier::ApplyWork(const DownMessage& message) {
  decided_.clear();
  known_.reset();
  const Result<SetState*> found = FindDecided(message.set, message);
  if (!found.ok()) return found.status();
  SetState* const set = found.value();
  std::span<const uint32_t> ids = message.ids;
  while (!ids.empty()) {
    KnownWork* const known = node_.keys.FindKnown(ids, INT64_MAX);
    if (known != nullptr && ApplyKnown(*known, *set)) {
      ids = ids.subspan(known->ids.size());
      if (ids.empty() && decided_.empty() && message.items.empty()) {
        known_ = known->shared_from_this();
      } else {
        decided_.insert(decided_.end(), known->keys.begin(), known->keys.end());
      }
      continue;
    }
    const CachedSignature* cached = node_.keys.ById(ids.front());
    if (cached == nullptr) return Broke("work with unknown id " + std::to_string(ids.front()));
    FARANDOLE_RETURN_IF_ERROR(ApplyId(*cached, *set));
    ids = ids.subspan(1);
  }
  for (const WorkItem& item : message.items) FARANDOLE_RETURN_IF_ERROR(ApplyItem(item, *set));
  // WorkDecision::device() is that of the first key and stands for all.
  for (const DecidedKey& key : decided_) {
    if (key.signature->device == decided_.front().signature->device) continue;
    return Broke(Describe(*key.name) + ": decided with tensors on another kind of device");
  }
  // A step is always alone. Nobody waits for it, so it says nothing of what its members have run.
  const bool is_step = !decided_.empty() && decided_.front().name->kind == OpKind::kStep;
  if (!is_step) set->last_round = message.number;
  TrackBatches(message, *set);
  KnowRepeated(message, *set);
  return {};
}

/// What ApplyId says of each of its keys. @return false, and nothing has changed, if it is to be
/// applied key by key, as where this rank has joined, or something is wrong.
bool Applier::ApplyKnown(KnownWork& work, SetState& set) {
  const bool as_voted = work.set == set.info.uid && work.own == (set.member ? work.keys.size() : 0);
  if (!as_voted || !tally_.CloseRound(work, set)) return false;
  if (set.member) node_.pending -= static_cast<int64_t>(work.keys.size());
  return true;
}

/// After a decision of ids whose keys can be decided together: all are at rest now. Keys whose rows
/// or step counts change, and of sets in which somebody has joined, are looked at one by one.
void Applier::KnowRepeated(const DownMessage& message, const SetState& set) {
  const bool is_large = decided_.size() >= std::max<size_t>(node_.options.least_known_ids, 2);
  if (!is_large || !message.items.empty() || set.joined > 0) return;
  const CachedSignature& first = *node_.keys.ById(message.ids.front());
  if (node_.keys.Peek(first.key).round.step.step > 0 || !repeated_.Repeats(message.ids)) return;
  auto known = std::make_shared<KnownWork>();
  for (size_t i = 0; i < decided_.size(); ++i) {
    const CachedSignature& cached = *node_.keys.ById(message.ids[i]);
    const Key& key = node_.keys.At(cached.key);  // dissolves what it is a part of
    const bool is_plain = key.IsAtRest() && cached.rows.empty() && !cached.retired;
    if (!is_plain || !first.fusion_key.With(cached.fusion_key)) return;
    if (decided_[i].mine != set.member) return;
    known->fusion_key.bytes += cached.fusion_key.bytes;
  }
  known->fusion_key = {first.fusion_key.collective, first.fusion_key.dtype, true,
                       known->fusion_key.bytes};
  known->set = set.info.uid;
  known->ids = message.ids;
  known->keys = decided_;
  const WorkDecision work = Work(message);
  size_t count = 0;
  FormBatches(work, node_.options.FusionThreshold(work.device()), known->plans, &count);
  node_.keys.Know(std::move(known));
}

/// The steady state: this rank has voted for the key by this id alone, so there is nothing to
/// compare.
Status Applier::ApplyId(const CachedSignature& cached, SetState& set) {
  Key& key = node_.keys.At(cached.key);
  const bool as_voted =
      key.pending && key.own_is_plain && key.own_cached == &cached && cached.rows.empty();
  if (!as_voted || key.name.set != set.info.uid) {
    return ApplyKey(cached.key, cached.signature, set, kNobody, kNoMask, cached.rows);
  }
  FARANDOLE_RETURN_IF_ERROR(tally_.CloseRound(key, set));
  TakePending(key);
  decided_.push_back({cached.key, true, &key.name, &cached.signature, kNobody, &kNoMask, {}});
  return {};
}

/// An item by name, before it enters the table.
Status Applier::CheckItem(const WorkItem& item, const SetState& set) const {
  if (item.key.set != set.info.uid) return Broke(Describe(item.key) + ": work for another set");
  if (SpaceOf(item.key.kind) == SpaceOf(item.signature.kind)) return {};
  return Broke(Describe(item.key) + ": decided as " + std::string(Name(item.signature.kind)));
}

/// Everything that indexes something is in range, and this rank's contribution is what it
/// submitted: its memory is read and written by this.
Status Applier::CheckDecided(const Key& key, const Signature& signature, const SetState& set,
                             const std::vector<RankMask>& absent, const Mask& skipped,
                             const std::vector<int64_t>& rows) const {
  const auto tensors = static_cast<int>(signature.tensors.size());
  const auto broke = [&](const std::string& what) {
    return Broke(Describe(key.name) + ": " + what);
  };
  // CloseRound has stamped the key if it occurs in this decision before.
  if (key.closed == set.last_number) return broke("decided twice at once");
  if (!FitsMask(skipped, tensors)) return broke("a tensor beyond the last is skipped");
  int32_t before = -1;
  for (const RankMask& one : absent) {
    if (one.rank <= before || !set.Contains(one.rank)) {
      return broke("absent rank " + std::to_string(one.rank) +
                   " is no member of the process set, or out of order");
    }
    if (!FitsMask(one.mask, tensors)) return broke("a rank is absent beyond the last tensor");
    before = one.rank;
  }
  if (const Status fit = CheckRows(key.name, signature, rows, set.info.ranks.size()); !fit.ok()) {
    return Broke(fit.message());
  }
  // A node that only relays for the set has submitted nothing to compare with.
  if (!set.member) return {};
  FARANDOLE_RETURN_IF_ERROR(CheckOwnRows(key, set, rows));
  return CheckOwnVote(key, signature, set, absent, skipped);
}

/// An allgather gets the rows that this rank passed, and none of a tensor that it is absent from.
/// After a vote by id alone `rows` are those of the last decision, which is what that vote said. A
/// rank that has joined passes none.
Status Applier::CheckOwnRows(const Key& key, const SetState& set,
                             const std::vector<int64_t>& rows) const {
  const size_t size = set.info.ranks.size();
  const size_t position = PositionOf(node_.options.rank, set.info.ranks);
  for (size_t t = 0; t < rows.size() / size; ++t) {
    const bool passes =
        key.pending && t < key.own_rows.size() && !TestBit(key.own_absent, static_cast<int>(t));
    const int64_t decided = OfTensor(rows, t, size)[position];
    if (decided == (passes ? key.own_rows[t] : 0)) continue;
    return Broke(Describe(key.name) + ": decided with " + std::to_string(decided) +
                 " rows of rank " + std::to_string(node_.options.rank) + ", which has others");
  }
  return {};
}

/// This rank must be decided as it voted: with its signature, and absent where it said so, apart
/// from tensors that nobody runs. A rank that has joined must be absent everywhere. It has
/// described nothing itself, so nobody has validated the signature on this rank yet.
Status Applier::CheckOwnVote(const Key& key, const Signature& signature, const SetState& set,
                             const std::vector<RankMask>& absent, const Mask& skipped) const {
  const auto broke = [&](const std::string& what) {
    return Broke(Describe(key.name) + ": " + what);
  };
  if (!key.pending && !node_.sets.Joined(node_.options.rank)) {
    return broke("decided but not submitted on this rank");
  }
  const Mask* const decided = FindMask(absent, node_.options.rank);
  const Mask& absent_here = decided == nullptr ? kNoMask : *decided;
  if (!key.pending) {
    FARANDOLE_RETURN_IF_ERROR(Validate(key.name, signature, set.info.ranks));
    const Mask all = FullMask(static_cast<int>(signature.tensors.size()));
    if (IsDifference(absent_here, all, skipped)) return {};
    return broke("decided with rank " + std::to_string(node_.options.rank) + ", which has joined");
  }
  const Signature& own = key.OwnSignature();
  // With an id both are the same object, which saves the comparison of shapes.
  if (&own != &signature && own != signature) {
    return broke("decided as " + DescribeSubmitted(signature) + ", but this rank submitted " +
                 DescribeSubmitted(own));
  }
  if (key.own_failure.empty() && IsDifference(absent_here, key.own_absent, skipped)) return {};
  return broke("decided with other contributions of rank " + std::to_string(node_.options.rank) +
               " than it voted for");
}

/// Binds the id before the key is entered, because the listener gets a pointer to the signature,
/// and the table's lives as long as the key. Every node that applies the item keeps its rows: the
/// next votes by id alone refer to them (docs/protocol.md, "Rows").
Status Applier::ApplyItem(const WorkItem& item, SetState& set) {
  const CachedSignature* cached = item.id == kNoId ? nullptr : node_.keys.ById(item.id);
  if (item.id != kNoId && cached == nullptr) {
    return Broke("work with unknown id " + std::to_string(item.id));
  }
  if (cached == nullptr) FARANDOLE_RETURN_IF_ERROR(CheckItem(item, set));
  const KeyId id = cached != nullptr ? cached->key : node_.keys.Intern(item.key);
  const Signature* signature = cached != nullptr ? &cached->signature : &item.signature;
  if (item.bind != kNoId) {
    // Without this limit a broken message could make the table of ids as long as it liked.
    const bool is_valid =
        LevelOfId(item.bind) <= node_.sets.depth() && IndexOfId(item.bind) < node_.options.max_ids;
    cached = cached == nullptr && is_valid ? node_.keys.Bind(item.bind, id, *signature) : nullptr;
    if (cached == nullptr) return Broke("id " + std::to_string(item.bind) + " cannot be bound");
    signature = &cached->signature;
  }
  if (cached != nullptr && !item.rows.empty()) node_.keys.SetRows(cached->id, item.rows);
  return ApplyKey(id, *signature, set, item.absent, item.skipped,
                  cached != nullptr ? cached->rows : item.rows);
}

/// The key is named after this use first: CheckDecided and its messages go by the kind.
Status Applier::ApplyKey(KeyId id, const Signature& signature, SetState& set,
                         const std::vector<RankMask>& absent, const Mask& skipped,
                         const std::vector<int64_t>& rows) {
  Key& key = node_.keys.At(id);
  if (key.name.set != set.info.uid) return Broke(Describe(key.name) + ": work for another set");
  key.NameAfter(signature);
  FARANDOLE_RETURN_IF_ERROR(CheckDecided(key, signature, set, absent, skipped, rows));
  FARANDOLE_RETURN_IF_ERROR(tally_.CloseRound(key, set));
  const bool mine = TakePending(key);
  decided_.push_back({id, mine, &key.name, &signature, absent, &skipped, rows});
  return {};
}

WorkDecision Applier::Work(const DownMessage& message) const {
  if (known_ != nullptr) return {message.number, message.set, known_->keys, known_->plans};
  return {message.number, message.set, decided_};
}

/// Who decides counts all batches of the decision; a member those it is to report. Without items
/// nobody is absent, so the lowest member reports all batches and the others need no plans here.
void Applier::TrackBatches(const DownMessage& message, const SetState& set) {
  if (decided_.empty() && known_ == nullptr) return;
  const bool plain = message.items.empty();
  const bool may_report = set.member && (!plain || set.info.ranks.front() == node_.options.rank);
  if (!set.IsDecidedHere() && !may_report) return;
  const WorkDecision work = Work(message);
  std::span<const BatchPlan> plans = work.plans;
  if (known_ == nullptr) {
    FormBatches(work, node_.options.FusionThreshold(work.device()), plans_, &batches_);
    plans = std::span(plans_).first(batches_);
  }
  batches_ = plans.size();
  if (!set.member) return;
  for (size_t i = 0; i < batches_; ++i) {
    const int32_t reporter = ReporterOf(set.info.ranks, plans[i].absent);
    if (reporter == node_.options.rank) reports_.Add(message.number, 0, static_cast<int32_t>(i));
  }
}

bool Applier::TakeReport(int64_t number, int32_t index) {
  uint32_t tag = 0;
  return reports_.Take(number, index, &tag);
}

/// Ends this rank's submission of the message's key, if it has one. The round is closed also on
/// ranks without a submission: those that have joined, and those that only relay.
Status Applier::EndOwn(const DownMessage& message, const Status& status) {
  const KeyId id = node_.keys.Intern(message.key);
  Key& key = node_.keys.At(id);
  const Result<SetState*> found = FindDecided(message.key.set, message);
  if (!found.ok()) return found.status();
  SetState* const set = found.value();
  set->last_round = message.number;
  FARANDOLE_RETURN_IF_ERROR(tally_.CloseRound(key, *set));
  if (TakePending(key)) ended_.emplace_back(id, status);
  return {};
}

Status Applier::ApplyRefusal(const DownMessage& message) {
  if (message.key.set != message.set) {
    return Broke(Describe(message.key) + ": refused or skipped in another process set");
  }
  if (message.type == DownType::kSkip) return EndOwn(message, Status());
  if (!IsErrorCode(message.code)) {
    return Broke(Describe(message.key) + ": refused with code " + std::to_string(message.code));
  }
  return EndOwn(message, Status(static_cast<Code>(message.code), message.text,
                                {message.ranks, message.facts.cause, message.facts.tensor}));
}

/// From here on this rank votes in full for what these ids meant, and so do its open rounds. The
/// ids stay in the table until nobody below can have voted by them (FreeIfUnused). What has added
/// up goes first: it may name them.
Status Applier::ApplyRetirement(const DownMessage& message) {
  const Result<SetState*> found = FindDecided(message.set, message);
  if (!found.ok()) return found.status();
  SetState& set = *found.value();
  if (!set.retired.empty() || message.ids.empty()) return Broke("ids retired while others are");
  tally_.SendVotes();
  for (const uint32_t id : message.ids) {
    const CachedSignature* cached = node_.keys.ById(id);
    const bool is_known =
        cached != nullptr && !cached->retired && node_.keys.At(cached->key).name.set == message.set;
    if (!is_known) return Broke("id " + std::to_string(id) + " cannot be retired");
    tally_.SpellOut(*cached);
    Key& key = node_.keys.At(cached->key);
    if (key.own_cached == cached) {
      key.own = std::make_unique<Signature>(cached->signature);
      key.own_cached = nullptr;
    }
    node_.keys.Retire(id);
  }
  set.retired = message.ids;
  set.retired_by = message.number;
  set.in_use.assign(set.branches.size(), true);
  set.awaited = set.contributors - (set.member ? 1 : 0);
  return {};
}

/// Links are FIFO, so all votes by the ids have come before the branch says this.
Status Applier::ReceiveUnused(int child, const UpMessage& message) {
  const auto uid = static_cast<uint32_t>(message.index);
  SetState* const set = node_.sets.Find(uid);
  if (set == nullptr ? node_.sets.Ended(uid) : !set->live) return {};
  const int contributor = ContributorOfChild(child);
  const bool is_awaited = set != nullptr && !set->retired.empty() &&
                          set->retired_by == message.number && set->Contributes(contributor) &&
                          set->in_use[static_cast<size_t>(contributor)];
  if (!is_awaited) {
    return Broke("a branch says that ids of decision " + std::to_string(message.number) +
                 " are unused, unasked");
  }
  set->in_use[static_cast<size_t>(contributor)] = false;
  --set->awaited;
  FreeIfUnused(*set);
  return {};
}

/// The decider gives the ids out again once all below it have freed them.
void Applier::FreeIfUnused(SetState& set) {
  if (set.awaited > 0) return;
  for (const uint32_t id : set.retired) node_.keys.FreeId(id, 0);
  set.retired = std::vector<uint32_t>();
  if (set.IsDecidedHere()) return;
  UpMessage unused;
  unused.type = UpType::kUnused;
  unused.number = set.retired_by;
  unused.index = static_cast<int32_t>(set.info.uid);
  node_.SendUp(unused);
}

/// Every node could derive the uid from its own table (next_uid). It travels all the same, so that
/// a node whose table differs reports it here.
Status Applier::CheckSetChange(const DownMessage& message) const {
  const std::string what = "process set " + std::to_string(message.set);
  const bool adds = message.type == DownType::kAddSet;
  const OpKind kind = adds ? OpKind::kAddSet : OpKind::kRemoveSet;
  if (message.key.set != kGlobalSet || message.key.kind != kind) {
    return Broke(what + " is changed by " + Describe(message.key));
  }
  if (!adds) {
    const SetState* set = node_.sets.Find(message.set);
    if (set != nullptr && set->live && message.set != kGlobalSet) return {};
    return Broke(what + " cannot be removed");
  }
  if (message.set != node_.sets.next_uid()) return Broke(what + " is not the next");
  const std::vector<int32_t>& ranks = message.ranks;
  if (ranks.empty() || !AreAscending(ranks) || ranks.front() < 0 ||
      ranks.back() >= node_.options.size) {
    return Broke(what + " of " + DescribeRanks(ranks) + "; expected ascending ranks below " +
                 std::to_string(node_.options.size));
  }
  if (message.planes.size() <= size_t{kDeviceKindCount}) return {};
  return Broke(what + " with " + std::to_string(message.planes.size()) + " data planes");
}

Status Applier::ApplySetChange(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(CheckSetChange(message));
  const bool adds = message.type == DownType::kAddSet;
  const Key& key = node_.keys.At(node_.keys.Intern(message.key));
  const auto uid = static_cast<int32_t>(message.set);
  // What the signature of such a call holds: the ranks of the new set, or the uid of the old one.
  const std::vector<int32_t> ranks = adds ? message.ranks : std::vector<int32_t>{uid};
  if (key.pending && key.OwnSignature().ranks != ranks) {
    return Broke(Describe(key.name) + ": decided for " + DescribeRanks(ranks) +
                 ", but this rank submitted " + DescribeRanks(key.OwnSignature().ranks));
  }
  FARANDOLE_RETURN_IF_ERROR(EndOwn(message, Status()));
  if (adds) {
    node_.sets.Add(message.ranks, message.planes);
    return {};
  }
  SetState* set = node_.sets.Find(message.set);
  const auto own = std::move(ended_);  // the remover's submission ends after those it aborts
  ended_.clear();
  EndSet(*set, Status());
  ended_.insert(ended_.end(), own.begin(), own.end());
  return {};
}

Status Applier::CheckNamedRank(const DownMessage& message) const {
  if (message.rank >= 0 && message.rank < node_.options.size) return {};
  return Broke("a decision about rank " + std::to_string(message.rank) + " of " +
               std::to_string(node_.options.size));
}

Status Applier::ApplyJoinDone(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(CheckNamedRank(message));
  if (!node_.sets.AllBelowJoined()) return Broke("a join is done that a rank has not asked for");
  node_.sets.ClearJoined();
  return {};
}

Status Applier::ApplyLeft(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(CheckNamedRank(message));
  if (message.rank == node_.options.rank && !node_.leaves)
    return Broke("this rank is said to have left");
  const Status why = WhyLeft(message.rank, message.facts);
  // Collected first, because EndSet takes sets out of the table.
  std::vector<SetState*> ending;
  for (const auto& [uid, set] : node_.sets.all()) {
    if (set->live && set->Contains(message.rank)) ending.push_back(set.get());
  }
  for (SetState* set : ending) EndSet(*set, why);
  return {};
}

/// Ends all that is in flight in the set. Of one other than the global set only the reason stays:
/// its keys and ids are free once this decision has been handed on, on every node at the same place
/// of the one sequence of decisions.
void Applier::EndSet(SetState& set, Status why) {
  const std::string number = std::to_string(set.info.user_id);
  set.live = false;
  set.why = why.ok() ? Aborted("process set " + number + " was removed") : why;
  set.last_number = node_.last_number();
  ended_sets_.emplace_back(set.info.uid, std::move(why));
  // Before what follows this decision: their ids may be another set's then.
  tally_.SendVotes(node_.last_number() - 1);
  EndKeys(set);
  if (set.info.uid == kGlobalSet) return;
  // The numbers are freed at the end of Notify: until then the listener looks up its operations by
  // them. End destroys `set`, so it comes last.
  const std::vector<KeyId>& keys = node_.keys.OfSet(set.info.uid);
  released_.insert(released_.end(), keys.begin(), keys.end());
  for (const uint32_t id : set.retired) node_.keys.FreeId(id, node_.last_number());
  node_.keys.EndSet(set.info.uid);
  for (const auto& one : node_.observers) one->OnSetEnded(set);
  node_.sets.End(set);
}

/// Votes for these keys that are still in flight find no live set and are dropped.
void Applier::EndKeys(const SetState& set) {
  for (const KeyId id : node_.keys.OfSet(set.info.uid)) {
    Key& key = node_.keys.At(id);
    if (TakePending(key)) {
      ended_.emplace_back(id, DescribeEnd(node_.sets.ForUser(key.name), set.why));
    }
    tally_.DropRound(key);
  }
}

/// After the last word about them: nothing refers to these keys any more. Last to first, because
/// SignatureCache::Release searches the list of the set's keys from its end: O(1) each.
void Applier::ReleaseKeys() {
  for (; !released_.empty(); released_.pop_back()) ReleaseKey(released_.back());
}

void Applier::ReleaseKey(KeyId id) {
  for (const auto& one : node_.observers) one->OnKeyReleased(id);
  node_.listener.OnKeyReleased(id);
  node_.keys.Release(id, node_.last_number());
}

/// Relies on the order of DownType: from kStallShutdown on decisions concern all ranks. The others
/// go only down branches with members of the set.
void Applier::Forward(const DownMessage& message) {
  const bool to_all = message.type >= DownType::kStallShutdown;
  const SetState* set = to_all ? nullptr : node_.sets.Find(message.set);
  for (size_t c = 0; c < node_.sets.children().size(); ++c) {
    if (set != nullptr && !set->Contributes(ContributorOfChild(static_cast<int>(c)))) continue;
    node_.listener.SendDown(node_.sets.children()[c], message);
  }
}

/// The order is part of the listener's contract: a set is there before the submission that added it
/// ends, and a key is released after the last event about it.
void Applier::Notify(const DownMessage& message) {
  if (message.type == DownType::kWork) {
    const SetState* set = node_.sets.Find(message.set);
    if (set != nullptr && set->member) node_.listener.OnWork(Work(message));
    return;
  }
  if (message.type == DownType::kAddSet)
    node_.listener.OnSetAdded(node_.sets.Find(message.set)->info);
  if (message.type == DownType::kLeft) node_.listener.OnLeft(message.rank);
  for (const auto& [uid, why] : ended_sets_) node_.listener.OnSetEnded(uid, why);
  for (const auto& [key, status] : ended_) node_.listener.OnEnded(key, status);
  ended_sets_.clear();
  ended_.clear();
  ReleaseKeys();
  if (message.type == DownType::kJoinDone) node_.listener.OnJoinDone(message.rank);
  if (message.type == DownType::kStallShutdown)
    node_.listener.OnStallShutdown(FinalErrorOf(message));
  if (message.type == DownType::kShutdown) node_.listener.OnShutdown();
  if (message.type == DownType::kRetire) FreeIfUnused(*node_.sets.Find(message.set));
}

}  // namespace farandole
