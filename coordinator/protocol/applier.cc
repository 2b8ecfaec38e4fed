// Decisions on their way down: check, apply, then forward, then execute.
// One file: what a decision may say and what it does are read together.

#include <algorithm>

#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/negotiation_impl.h"
#include "coordinator/protocol/stall_report.h"
#include "coordinator/protocol/validate.h"

namespace farandole {
namespace {

const Mask kNoMask;
const std::vector<RankMask> kNobody;

uint64_t Hash(const std::vector<RankMask>& masks) {
  uint64_t hash = masks.size();
  for (const RankMask& one : masks) {
    hash = Mix(hash, static_cast<uint64_t>(one.rank));
    for (const uint64_t word : one.mask) hash = Mix(hash, word);
  }
  return hash;
}

uint64_t Hash(const Mask& mask) {
  uint64_t hash = mask.size();
  for (const uint64_t word : mask) hash = Mix(hash, word);
  return hash;
}

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

/// The lowest member that contributes to the batch: it alone reports it done.
int32_t ReporterOf(const std::vector<int32_t>& ranks, const std::vector<int32_t>& absent) {
  for (const int32_t rank : ranks) {
    if (!std::binary_search(absent.begin(), absent.end(), rank)) return rank;
  }
  return -1;
}

}  // namespace

Status Negotiation::Impl::ReceiveDown(int from, const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(fault_);
  if (from != sets_.parent()) return Broke("rank " + std::to_string(from) + " is not the parent");
  return Dispatch(message);
}

/// A child's next vote may come at once, so what closes its round here comes first.
Status Negotiation::Impl::Dispatch(const DownMessage& message) {
  if (Broken(kForwardBeforeApply)) {
    Forward(message);
    late_.push_back(message);
    return {};
  }
  FARANDOLE_RETURN_IF_ERROR(Apply(message));
  Forward(message);
  Notify(message);
  return {};
}

Status Negotiation::Impl::Apply(const DownMessage& message) {
  if (message.number <= last_number_) {
    return Broke("decision " + std::to_string(message.number) + " after " +
                 std::to_string(last_number_));
  }
  last_number_ = message.number;
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
    case DownType::kQuery:
      return ApplyQuery(message);
    case DownType::kStallShutdown:
      return {};
    case DownType::kShutdown:
      return left_ ? Status() : Broke("a shutdown, though this rank has not left");
  }
  return Broke("unknown decision");
}

Status Negotiation::Impl::CloseRound(Key& key, const SetState& set) {
  Round& round = key.round;
  const bool nobody = round.votes == 0 && set.joined == set.contributors;
  if (!round.sent && !nobody) return Broke(Describe(key.name) + ": decided before it was complete");
  if (round.votes > 0 && IsWaitedFor(key)) --open_rounds_;
  round.voted.Clear();
  round.votes = 0;
  round.sent = round.stalled = round.detailed = false;
  round.plain = nullptr;
  key.closed = last_number_;
  return {};
}

/// @return true if this rank had a submission, which the caller has to end.
bool Negotiation::Impl::TakePending(Key& key) {
  if (!key.pending) return false;
  key.pending = false;
  key.own.reset();
  key.own_cached = nullptr;
  if (IsWaitedFor(key)) --pending_;
  return true;
}

Status Negotiation::Impl::ApplyWork(const DownMessage& message) {
  decided_.clear();
  SetState* set = sets_.Find(message.set);
  if (set == nullptr || !set->live) return Broke("work for no live process set");
  set->digest = Mix(set->digest, static_cast<uint64_t>(message.number));
  for (const uint32_t id : message.ids) {
    const CachedSignature* cached = keys_.ById(id);
    if (cached == nullptr) return Broke("work with unknown id " + std::to_string(id));
    set->digest = Mix(set->digest, id);
    FARANDOLE_RETURN_IF_ERROR(ApplyKey(cached->key, cached->signature, *set, kNobody, kNoMask));
  }
  for (const WorkItem& item : message.items) FARANDOLE_RETURN_IF_ERROR(ApplyItem(item, *set));
  for (const DecidedKey& key : decided_) {
    if (key.signature->device == decided_.front().signature->device) continue;
    return Broke(Describe(*key.name) + ": decided with tensors on another kind of device");
  }
  TrackBatches(message, *set);
  return {};
}

/// An item by name, before it enters the table.
Status Negotiation::Impl::CheckItem(const WorkItem& item, const SetState& set) const {
  if (item.key.set != set.info.uid) return Broke(Describe(item.key) + ": work for another set");
  if (SpaceOf(item.key.kind) == SpaceOf(item.signature.kind)) return {};
  return Broke(Describe(item.key) + ": decided as " + std::string(Name(item.signature.kind)));
}

/// Everything that indexes something is in range, and this rank's part is what it submitted: its
/// memory is read and written by this.
Status Negotiation::Impl::CheckDecided(const Key& key, const Signature& signature,
                                       const SetState& set, const std::vector<RankMask>& absent,
                                       const Mask& skipped) const {
  const auto members = static_cast<int>(signature.members.size());
  const auto broke = [&](const std::string& what) {
    return Broke(Describe(key.name) + ": " + what);
  };
  if (key.closed == last_number_) return broke("decided twice at once");
  if (!FitsMask(skipped, members)) return broke("a tensor beyond the last is skipped");
  int32_t before = -1;
  for (const RankMask& one : absent) {
    if (one.rank <= before || !set.Contains(one.rank)) {
      return broke("absent rank " + std::to_string(one.rank) +
                   " is no member of the process set, or out of order");
    }
    if (!FitsMask(one.mask, members)) return broke("a rank is absent beyond the last tensor");
    before = one.rank;
  }
  return set.member ? CheckOwnPart(key, signature, set, absent, skipped) : Status();
}

Status Negotiation::Impl::CheckOwnPart(const Key& key, const Signature& signature,
                                       const SetState& set, const std::vector<RankMask>& absent,
                                       const Mask& skipped) const {
  const auto broke = [&](const std::string& what) {
    return Broke(Describe(key.name) + ": " + what);
  };
  if (!key.pending && !sets_.Joined(options_.rank)) {
    return broke("decided but not submitted on this rank");
  }
  const Mask* const decided = FindMask(absent, options_.rank);
  const Mask& absent_here = decided == nullptr ? kNoMask : *decided;
  if (!key.pending) {
    FARANDOLE_RETURN_IF_ERROR(Validate(key.name, signature, set.info.ranks));
    const Mask all = FullMask(static_cast<int>(signature.members.size()));
    if (IsDifference(absent_here, all, skipped)) return {};
    return broke("decided with rank " + std::to_string(options_.rank) + ", which has joined");
  }
  const Signature& own = OwnSignature(key);
  if (&own != &signature && own != signature) {
    return broke("decided as " + DescribeSubmitted(signature) + ", but this rank submitted " +
                 DescribeSubmitted(own));
  }
  if (key.own_failure.empty() && IsDifference(absent_here, key.own_absent, skipped)) return {};
  return broke("decided with other contributions of rank " + std::to_string(options_.rank) +
               " than it voted for");
}

Status Negotiation::Impl::ApplyItem(const WorkItem& item, SetState& set) {
  const CachedSignature* cached = item.id == kNoId ? nullptr : keys_.ById(item.id);
  if (item.id != kNoId && cached == nullptr) {
    return Broke("work with unknown id " + std::to_string(item.id));
  }
  if (cached == nullptr) FARANDOLE_RETURN_IF_ERROR(CheckItem(item, set));
  const KeyId id = cached != nullptr ? cached->key : keys_.Intern(item.key);
  const Signature* signature = cached != nullptr ? &cached->signature : &item.signature;
  if (item.bind != kNoId) {
    cached = cached == nullptr && item.bind < options_.max_ids
                 ? keys_.Bind(item.bind, id, *signature)
                 : nullptr;
    if (cached == nullptr) return Broke("id " + std::to_string(item.bind) + " cannot be bound");
    signature = &cached->signature;
  }
  set.digest = Mix(set.digest, Hash(keys_.At(id).name) ^ Hash(*signature));
  set.digest = Mix(set.digest, Hash(item.absent) ^ Mix(item.bind, Hash(item.skipped)));
  return ApplyKey(id, *signature, set, item.absent, item.skipped);
}

Status Negotiation::Impl::ApplyKey(KeyId id, const Signature& signature, SetState& set,
                                   const std::vector<RankMask>& absent, const Mask& skipped) {
  Key& key = keys_.At(id);
  if (key.name.set != set.info.uid) return Broke(Describe(key.name) + ": work for another set");
  key.NameAfter(signature);
  FARANDOLE_RETURN_IF_ERROR(CheckDecided(key, signature, set, absent, skipped));
  FARANDOLE_RETURN_IF_ERROR(CloseRound(key, set));
  const bool mine = TakePending(key);
  decided_.push_back({id, mine, &key.name, &signature, absent, &skipped});
  return {};
}

WorkDecision Negotiation::Impl::Work(const DownMessage& message) const {
  return {message.number, message.set, decided_};
}

/// Rank 0 counts all batches of the decision; a member those it is to report.
void Negotiation::Impl::TrackBatches(const DownMessage& message, const SetState& set) {
  if (decided_.empty()) return;
  const bool plain = message.items.empty();
  const bool may_report = set.member && (!plain || set.info.ranks.front() == options_.rank);
  if (!IsRoot() && !may_report) return;
  size_t count = 0;
  const WorkDecision work = Work(message);
  FormBatches(work, options_.FusionThreshold(work.device()), plans_, &count);
  if (count == 0) return;
  if (IsRoot()) {
    const uint32_t queue = QueueOf(message.set, work.device());
    unfinished_.Open(message.number, queue);
    for (size_t i = 0; i < count; ++i) unfinished_.Add(static_cast<int32_t>(i));
    queues_[queue].unfinished += static_cast<int64_t>(count);
  }
  if (!set.member) return;
  reports_.Open(message.number, 0);
  for (size_t i = 0; i < count; ++i) {
    const int32_t reporter = Broken(kReporterIgnoresAbsent)
                                 ? set.info.ranks.front()
                                 : ReporterOf(set.info.ranks, plans_[i].absent);
    if (reporter == options_.rank) reports_.Add(static_cast<int32_t>(i));
  }
}

/// Ends this rank's submission of the message's key, if it has one.
Status Negotiation::Impl::EndOwn(const DownMessage& message, const Status& status) {
  const KeyId id = keys_.Intern(message.key);
  Key& key = keys_.At(id);
  SetState* set = sets_.Find(message.key.set);
  if (set == nullptr || !set->live) return Broke(Describe(message.key) + ": no live process set");
  FARANDOLE_RETURN_IF_ERROR(CloseRound(key, *set));
  set->digest = Mix(set->digest, static_cast<uint64_t>(message.number) ^ Hash(message.key));
  set->digest = Mix(set->digest, static_cast<uint64_t>(status.code()));
  if (TakePending(key)) ended_.emplace_back(id, status);
  return {};
}

Status Negotiation::Impl::ApplyRefusal(const DownMessage& message) {
  if (message.key.set != message.set) {
    return Broke(Describe(message.key) + ": refused or skipped in another process set");
  }
  if (message.type == DownType::kSkip) return EndOwn(message, Status());
  if (!IsErrorCode(message.code)) {
    return Broke(Describe(message.key) + ": refused with code " + std::to_string(message.code));
  }
  return EndOwn(message, Status(static_cast<Code>(message.code), message.text));
}

Status Negotiation::Impl::CheckSetChange(const DownMessage& message) const {
  const std::string what = "process set " + std::to_string(message.set);
  const bool adds = message.type == DownType::kAddSet;
  const OpKind kind = adds ? OpKind::kAddSet : OpKind::kRemoveSet;
  if (message.key.set != kGlobalSet || message.key.kind != kind) {
    return Broke(what + " is changed by " + Describe(message.key));
  }
  if (!adds) {
    const SetState* set = sets_.Find(message.set);
    if (set != nullptr && set->live && message.set != kGlobalSet) return {};
    return Broke(what + " cannot be removed");
  }
  if (message.set != sets_.next_uid()) return Broke(what + " is not the next");
  const std::vector<int32_t>& ranks = message.ranks;
  const bool ascending = std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>());
  if (ranks.empty() || !ascending || ranks.front() < 0 || ranks.back() >= options_.size) {
    return Broke(what + " of " + DescribeRanks(ranks) + "; expected ascending ranks below " +
                 std::to_string(options_.size));
  }
  if (message.planes.size() <= size_t{kDeviceKindCount}) return {};
  return Broke(what + " with " + std::to_string(message.planes.size()) + " data planes");
}

/// What this rank has pending of `key`.
const Signature& Negotiation::Impl::OwnSignature(const Key& key) const {
  return key.own_cached != nullptr ? key.own_cached->signature : *key.own;
}

Status Negotiation::Impl::ApplySetChange(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(CheckSetChange(message));
  const bool adds = message.type == DownType::kAddSet;
  const Key& key = keys_.At(keys_.Intern(message.key));
  const auto uid = static_cast<int32_t>(message.set);
  const std::vector<int32_t> ranks = adds ? message.ranks : std::vector<int32_t>{uid};
  if (key.pending && OwnSignature(key).ranks != ranks) {
    return Broke(Describe(key.name) + ": decided for " + DescribeRanks(ranks) +
                 ", but this rank submitted " + DescribeRanks(OwnSignature(key).ranks));
  }
  FARANDOLE_RETURN_IF_ERROR(EndOwn(message, Status()));
  if (adds) {
    SetState& added = sets_.Add(message.ranks, message.planes);
    added.digest = Mix(static_cast<uint64_t>(message.number), added.info.uid);
    return {};
  }
  SetState* set = sets_.Find(message.set);
  const auto own = std::move(ended_);  // the remover's submission ends after those it aborts
  ended_.clear();
  EndSet(*set, Status());
  ended_.insert(ended_.end(), own.begin(), own.end());
  return {};
}

Status Negotiation::Impl::CheckNamedRank(const DownMessage& message) const {
  if (message.rank >= 0 && message.rank < options_.size) return {};
  return Broke("a decision about rank " + std::to_string(message.rank) + " of " +
               std::to_string(options_.size));
}

Status Negotiation::Impl::ApplyJoinDone(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(CheckNamedRank(message));
  if (!sets_.AllBelowJoined()) return Broke("a join is done that a rank has not asked for");
  sets_.ClearJoined();
  return {};
}

Status Negotiation::Impl::ApplyLeft(const DownMessage& message) {
  FARANDOLE_RETURN_IF_ERROR(CheckNamedRank(message));
  if (message.rank == options_.rank && !left_) return Broke("this rank is said to have left");
  const std::string reason = message.text.empty() ? "" : " after it failed: " + message.text;
  const Status why = Aborted("rank " + std::to_string(message.rank) + " has left" + reason);
  std::vector<SetState*> ending;
  for (const auto& [uid, set] : sets_.all()) {
    if (set->live && set->Contains(message.rank)) ending.push_back(set.get());
  }
  for (SetState* set : ending) EndSet(*set, why);
  return {};
}

/// Ends all that is in flight in the set. Of one other than the global set only the reason stays:
/// its keys and ids are free once this decision has been told, on every node at the same place of
/// the one sequence of decisions.
void Negotiation::Impl::EndSet(SetState& set, Status why) {
  const std::string number = std::to_string(set.info.user_id);
  set.live = false;
  set.why = why.ok() ? Aborted("process set " + number + " was removed") : why;
  set.digest = Mix(set.digest, static_cast<uint64_t>(last_number_));
  ended_sets_.emplace_back(set.info.uid, std::move(why));
  // Before what follows this decision: their ids may be another set's then.
  SendVotes(last_number_ - 1);
  EndKeys(set);
  if (set.info.uid == kGlobalSet) return;
  if (IsRoot()) EndQueues(set.info.uid);
  const std::vector<KeyId>& keys = keys_.OfSet(set.info.uid);
  released_.insert(released_.end(), keys.begin(), keys.end());
  const auto is_in_set = [&](KeyId key) { return keys_.At(key).name.set == set.info.uid; };
  std::erase_if(queries_, [&](const Query& query) { return is_in_set(query.key); });
  std::erase_if(stalled_, [&](const Stalled& stalled) { return is_in_set(stalled.key); });
  std::erase_if(gathered_, [&](const auto& stall) { return is_in_set(stall.first.key); });
  sets_.End(set);
}

void Negotiation::Impl::EndKeys(const SetState& set) {
  for (const KeyId id : keys_.OfSet(set.info.uid)) {
    Key& key = keys_.At(id);
    if (TakePending(key)) {
      ended_.emplace_back(id,
                          Aborted(Describe(sets_.ForUser(key.name)) + ": " + set.why.message()));
    }
    if (key.round.votes > 0 && IsWaitedFor(key)) --open_rounds_;
    key.round = Round();
    key.closed = last_number_;
  }
}

/// After the last word about them: nothing refers to these keys any more.
void Negotiation::Impl::ReleaseKeys() {
  for (; !released_.empty(); released_.pop_back()) ReleaseKey(released_.back());
}

void Negotiation::Impl::ReleaseKey(KeyId id) {
  const Key& key = keys_.At(id);
  if (id == last_key_ && last_submitted_.empty()) {
    last_submitted_ = DescribeCall(sets_.ForUser(key.name));
  }
  for (const CachedSignature* cached : key.cached) {
    if (!IsRoot()) break;
    free_ids_.push_back(cached->id);
    id_bytes_ -= TravelBytes(cached->signature);
  }
  listener_.OnKeyReleased(id);
  keys_.Release(id, last_number_);
}

void Negotiation::Impl::Forward(const DownMessage& message) {
  const bool to_all = message.type >= DownType::kStallShutdown;
  const SetState* set = to_all ? nullptr : sets_.Find(message.set);
  for (size_t c = 0; c < sets_.children().size(); ++c) {
    if (set != nullptr && !set->Contributes(ContributorOfChild(static_cast<int>(c)))) continue;
    listener_.SendDown(sets_.children()[c], message);
  }
}

void Negotiation::Impl::Notify(const DownMessage& message) {
  if (message.type == DownType::kWork) {
    const SetState* set = sets_.Find(message.set);
    if (set != nullptr && set->member) listener_.OnWork(Work(message));
    return;
  }
  if (message.type == DownType::kAddSet) listener_.OnSetAdded(sets_.Find(message.set)->info);
  if (message.type == DownType::kLeft) listener_.OnLeft(message.rank);
  for (const auto& [uid, why] : ended_sets_) listener_.OnSetEnded(uid, why);
  for (const auto& [key, status] : ended_) listener_.OnEnded(key, status);
  ended_sets_.clear();
  ended_.clear();
  ReleaseKeys();
  if (message.type == DownType::kJoinDone) listener_.OnJoinDone(message.rank);
  if (message.type == DownType::kStallShutdown) listener_.OnStallShutdown(message.text);
  if (message.type == DownType::kShutdown) listener_.OnShutdown();
  if (message.type == DownType::kQuery) CloseQueries(false);
}

}  // namespace farandole
