#include "coordinator/protocol/negotiation.h"

#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/negotiation_impl.h"

namespace farandole {
namespace {

NegotiationOptions WithoutTree(NegotiationOptions options) {
  options.parent.clear();
  options.parent.shrink_to_fit();
  return options;
}

bool IsPlain(const Vote& vote) {
  return !AnyBit(vote.absent) && !AnyBit(vote.clean) && vote.failed.empty();
}

}  // namespace

Negotiation::Impl::Impl(NegotiationOptions options, NegotiationListener& listener)
    : options_(WithoutTree(options)),
      listener_(listener),
      sets_(options.rank, options.parent, options.planes, options.max_live_sets) {}

Status Negotiation::Impl::CheckSubmit(const Key& key, const SetState* set) const {
  const auto refuse = [&](const char* why) {
    return InvalidArgument(Describe(sets_.ForUser(key.name)) + why);
  };
  const bool ended = set == nullptr ? sets_.Ended(key.name.set) : !set->live;
  if (set == nullptr && !ended) return refuse(": there is no such process set");
  if (left_) return refuse(": this rank has left");
  if (ended) return {};
  if (!set->member) return refuse(": this rank is no member of the process set");
  if (sets_.Joined(options_.rank)) return refuse(": this rank has joined");
  if (key.pending) return refuse(": already pending on this rank");
  return {};
}

Status Negotiation::Impl::CheckRecord(const Key& key, const SetState& set,
                                      const Signature& signature, const Vote& vote) const {
  FARANDOLE_RETURN_IF_ERROR(CheckLimits(key.name, signature));
  FARANDOLE_RETURN_IF_ERROR(
      CheckGroupFits(sets_.ForUser(key.name), signature, set.info.ranks.size()));
  const auto members = static_cast<int>(signature.members.size());
  if (FitsMask(vote.absent, members) && FitsMask(vote.clean, members)) return {};
  return InvalidArgument(Describe(sets_.ForUser(key.name)) +
                         ": the vote marks a member beyond the last");
}

KeyVotes Negotiation::Impl::OwnVotes(const Key& key, const CachedSignature* cached,
                                     const Signature& signature, const Vote& vote) const {
  KeyVotes votes;
  votes.key = key.name;
  votes.signatures.emplace_back();
  if (cached != nullptr) votes.signatures.back().id = cached->id;
  if (cached == nullptr) votes.signatures.back().signature = signature;
  if (AnyBit(vote.absent)) votes.absent.push_back({options_.rank, vote.absent});
  if (AnyBit(vote.clean)) votes.clean.push_back({options_.rank, vote.clean});
  if (!vote.failed.empty()) {
    votes.failed.push_back({options_.rank, vote.failed.substr(0, kMaxNameBytes)});
  }
  if (vote.step.step > 0) votes.steps.push_back({vote.step, {}});
  return votes;
}

void Negotiation::Impl::Remember(Key& key, const CachedSignature* cached,
                                 const Signature& signature, const Vote& vote) {
  key.pending = true;
  key.stalled = false;
  key.since_ns = now_ns_;
  key.own_cached = cached;
  if (cached == nullptr) key.own = std::make_unique<Signature>(signature);
  key.own_absent = vote.absent;
  key.own_failure = vote.failed.substr(0, kMaxNameBytes);
  if (IsWaitedFor(key)) ++pending_;
  if (options_.stall_ns > 0 && next_scan_ns_ == kNever) {
    next_scan_ns_ = now_ns_ + options_.stall_ns;
  }
}

/// A submission in a set that has ended.
void Negotiation::Impl::EndAtOnce(KeyId id, const Status& why) {
  const KeyName& name = keys_.At(id).name;
  const uint32_t set = name.set;
  listener_.OnEnded(id, Aborted(Describe(sets_.ForUser(name)) + ": " + why.message()));
  if (set != kGlobalSet) ReleaseKey(id);
}

Status Negotiation::Impl::Submit(KeyId id, const Signature& signature, const Vote& vote) {
  FARANDOLE_RETURN_IF_ERROR(fault_);
  Key& key = keys_.At(id);
  SetState* set = sets_.Find(key.name.set);
  FARANDOLE_RETURN_IF_ERROR(CheckSubmit(key, set));
  if (SpaceOf(signature.kind) != SpaceOf(key.name.kind)) {
    return InvalidArgument(Describe(sets_.ForUser(key.name)) + ": the signature is that of " +
                           std::string(Name(signature.kind)));
  }
  key.NameAfter(signature);
  if (set == nullptr || !set->live) {
    EndAtOnce(id, set == nullptr ? sets_.WhyEnded(key.name.set) : set->why);
    return {};
  }
  const CachedSignature* cached = keys_.Match(key, signature);
  const bool plain = cached != nullptr && IsPlain(vote);
  if (!plain) FARANDOLE_RETURN_IF_ERROR(CheckRecord(key, *set, signature, vote));
  if (signature.kind != OpKind::kStep) {  // which no user calls
    last_key_ = id;
    last_submit_ns_ = now_ns_;
    last_submitted_.clear();
  }
  Remember(key, cached, signature, vote);
  if (plain) return CountPlain(id, *set, kSelf, cached, vote.step);
  KeyVotes votes = OwnVotes(key, cached, signature, vote);
  FARANDOLE_RETURN_IF_ERROR(Normalise(key, *set, kSelf, votes));
  return CountRecord(id, *set, kSelf, std::move(votes));
}

Status Negotiation::Impl::Join() {
  if (left_) return InvalidArgument("join: this rank has left");
  if (sets_.Joined(options_.rank)) return InvalidArgument("join: this rank has joined already");
  const SetState& global = *sets_.Find(kGlobalSet);
  if (!global.live) return global.why;
  held_join_ = Broken(kJoinWhenIdle) && pending_ > 0;
  if (!held_join_) MarkJoin(options_.rank);
  return {};
}

Status Negotiation::Impl::Leave() {
  if (left_) return InvalidArgument("leave: this rank has left already");
  left_ = true;
  return ReceiveLeave(options_.rank, UnreportedFailure());
}

/// The others hear of a failed submission when they have voted too. A rank that leaves before that
/// takes the reason along.
std::string Negotiation::Impl::UnreportedFailure() const {
  for (KeyId id = 0; id < keys_.size(); ++id) {
    const Key& key = keys_.At(id);
    if (key.pending && !key.own_failure.empty()) return key.own_failure;
  }
  return {};
}

void Negotiation::Impl::BatchDone(int64_t number, int32_t index) {
  uint32_t tag = 0;
  if (!reports_.Take(number, index, &tag)) return;
  if (IsRoot()) {
    const Status freed = FreeBatch(number, index);
    if (fault_.ok()) fault_ = freed;
    return;
  }
  note_.type = UpType::kDone;
  note_.number = number;
  note_.index = index;
  listener_.SendUp(sets_.parent(), note_);
}

void Negotiation::Impl::Flush() {
  if (held_join_ && pending_ == 0) {
    held_join_ = false;
    MarkJoin(options_.rank);
  }
  while (!late_.empty()) {
    const Status applied = Apply(late_.front());
    if (fault_.ok()) fault_ = applied;
    Notify(late_.front());
    late_.pop_front();
  }
  if (IsRoot()) {
    Decide();
  } else {
    SendVotes();
  }
}

Negotiation::TableSizes Negotiation::Impl::Sizes() const {
  return {sets_.all().size(), keys_.live(), keys_.size(), next_id_ - free_ids_.size(),
          queues_.size()};
}

bool Negotiation::Impl::Busy() const {
  return pending_ > 0 || open_rounds_ > 0 || !queries_.empty() || !stalled_.empty();
}

Negotiation::Negotiation(NegotiationOptions options, NegotiationListener& listener)
    : impl_(std::make_unique<Impl>(std::move(options), listener)) {}
Negotiation::~Negotiation() = default;

KeyId Negotiation::Intern(const KeyName& name) { return impl_->keys().Intern(name); }
const KeyName& Negotiation::NameOf(KeyId key) const { return impl_->keys().At(key).name; }
Status Negotiation::Submit(KeyId key, const Signature& signature, const Vote& vote) {
  return impl_->Submit(key, signature, vote);
}
Status Negotiation::Join() { return impl_->Join(); }
Status Negotiation::Leave() { return impl_->Leave(); }
void Negotiation::BatchDone(int64_t number, int32_t index) { impl_->BatchDone(number, index); }
Status Negotiation::ReceiveUp(int from, const UpMessage& message) {
  return impl_->ReceiveUp(from, message);
}
Status Negotiation::ReceiveDown(int from, const DownMessage& message) {
  return impl_->ReceiveDown(from, message);
}
void Negotiation::Flush() { impl_->Flush(); }
void Negotiation::SetTime(int64_t now_ns) { impl_->SetTime(now_ns); }
int64_t Negotiation::Tick(int64_t now_ns) { return impl_->Tick(now_ns); }
bool Negotiation::Busy() const { return impl_->Busy(); }
int64_t Negotiation::Pending() const { return impl_->pending(); }
uint64_t Negotiation::Digest(uint32_t set) const {
  const SetState* state = impl_->sets().Find(set);
  return state == nullptr ? 0 : state->digest;
}
Negotiation::TableSizes Negotiation::Sizes() const { return impl_->Sizes(); }
int64_t Negotiation::last_number() const { return impl_->last_number(); }
Status Negotiation::fault() const { return impl_->fault(); }

}  // namespace farandole
