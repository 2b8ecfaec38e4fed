// The decider on rank 0: judges complete keys, fuses ready ones, numbers and sends decisions.

#include <algorithm>

#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/negotiation_impl.h"

namespace farandole {
namespace {

/// Hashes of signatures decided once that a key remembers.
constexpr size_t kSeen = 16;
/// A key whose signature goes on changing (rows of an allgather) gets no further ids: they would
/// fill the table, and each submission looks through them.
constexpr size_t kIdsOfAKey = 64;
/// What every rank keeps for ids: signatures of this many bytes, as they travel.
constexpr size_t kIdBytes = size_t{64} << 20;

bool SameAbsent(const std::vector<RankMask>& a, const std::vector<RankMask>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const RankMask& x, const RankMask& y) { return x.rank == y.rank; });
}

bool ChangesSets(OpKind kind) { return kind == OpKind::kAddSet || kind == OpKind::kRemoveSet; }

}  // namespace

uint32_t Negotiation::Impl::QueueOf(uint32_t set, DeviceKind device) const {
  return set * kDeviceKindCount + static_cast<uint32_t>(device);
}

/// The round of `id` is complete on rank 0.
void Negotiation::Impl::OnReady(KeyId id, const SetState& set) {
  const Key& key = keys_.At(id);
  const Round& round = key.round;
  if (!round.detailed && !round.plain->signature.members.empty()) {
    Ready ready;
    ready.key = id;
    ready.cached = round.plain;
    ready.fusion_key = round.plain->fusion_key;
    return Enqueue(std::move(ready), key.name.set, round.plain->signature.device);
  }
  const KeyVotes& votes = Detail(keys_.At(id).round, key);
  Outcome outcome =
      ValidateRound(sets_.ForUser(key.name), votes, set.info.ranks,
                    [&](size_t i) -> const Signature& { return SignatureOf(votes.signatures[i]); });
  const Signature& signature = SignatureOf(votes.signatures.front());
  if (outcome.what == Outcome::What::kRun && ChangesSets(key.name.kind)) {
    set_changes_.push_back(id);
  } else if (outcome.what != Outcome::What::kRun || signature.members.empty()) {
    outcomes_.emplace_back(id, std::move(outcome));
  } else {
    Ready ready;
    ready.key = id;
    ready.cached = keys_.ById(votes.signatures.front().id);
    ready.fusion_key = FusionKeyOf(signature);
    ready.fusion_key.uniform = ready.fusion_key.uniform && outcome.uniform;
    ready.absent = std::move(outcome.absent);
    ready.skipped = std::move(outcome.skipped);
    Enqueue(std::move(ready), key.name.set, signature.device);
  }
}

void Negotiation::Impl::Enqueue(Ready ready, uint32_t set, DeviceKind device) {
  const uint32_t index = QueueOf(set, device);
  Queue& queue = queues_[index];
  queue.ready.push_back(std::move(ready));
  ++queue.waiting;
  if (queue.active) return;
  queue.active = true;
  active_.push_back(index);
}

/// Those of a set that has ended, in which nothing is left to decide; one with unfinished batches
/// goes with the last of them.
void Negotiation::Impl::EndQueues(uint32_t set) {
  for (int device = 0; device < kDeviceKindCount; ++device) {
    const uint32_t index = QueueOf(set, static_cast<DeviceKind>(device));
    const auto queue = queues_.find(index);
    if (queue == queues_.end()) continue;
    std::erase(active_, index);
    if (queue->second.unfinished == 0) queues_.erase(queue);
  }
}

void Negotiation::Impl::Decide() {
  DecideOutcomes();
  DecideSetChanges();
  DecideQueues();
  DecideLeaves();
  DecideJoinDone();
}

/// Refusals, skips and barriers move nothing, so they wait for nothing.
void Negotiation::Impl::DecideOutcomes() {
  for (const auto& [id, outcome] : outcomes_) {
    const Key& key = keys_.At(id);
    if (outcome.what == Outcome::What::kRefuse) {
      Refuse(id, outcome.why);
      continue;
    }
    if (outcome.what == Outcome::What::kSkip) {
      NewDecision(DownType::kSkip, key.name.set).key = key.name;
    } else {
      NewDecision(DownType::kWork, key.name.set);
      Ready barrier;
      barrier.key = id;
      barrier.cached = keys_.ById(key.round.detail->signatures.front().id);
      AddToWork(barrier);
    }
    BroadcastDecision();
  }
  outcomes_.clear();
}

void Negotiation::Impl::Refuse(KeyId id, const Status& why) {
  const KeyName& name = keys_.At(id).name;
  DownMessage& refusal = NewDecision(DownType::kRefuse, name.set);
  refusal.key = name;
  refusal.code = static_cast<int32_t>(why.code());
  refusal.text = why.message();
  BroadcastDecision();
}

void Negotiation::Impl::DecideSetChanges() {
  for (const KeyId id : set_changes_) {
    if (keys_.At(id).name.kind == OpKind::kAddSet) {
      DecideAddSet(id);
    } else {
      DecideRemoveSet(id);
    }
  }
  set_changes_.clear();
}

void Negotiation::Impl::DecideAddSet(KeyId id) {
  const KeyName& name = keys_.At(id).name;
  const std::vector<int32_t> ranks =
      SignatureOf(keys_.At(id).round.detail->signatures.front()).ranks;
  const auto refuse = [&](const std::string& why) {
    Refuse(id, InvalidArgument(Describe(name) + ": " + why));
  };
  if (ranks.empty()) return refuse("a process set needs a rank");
  const bool ascending = std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>());
  if (!ascending) return refuse(DescribeRanks(ranks) + " are not all different and ascending");
  if (ranks.front() < 0 || ranks.back() >= options_.size) {
    return refuse(DescribeRanks(ranks) + " of " + std::to_string(options_.size));
  }
  if (const SetState* same = sets_.FindRanks(ranks); same != nullptr) {
    return refuse("process set " + std::to_string(same->info.user_id) + " has the same ranks");
  }
  if (sets_.Full()) {
    return Refuse(id, ResourceExhausted(Describe(name) + ": " + std::to_string(sets_.all().size()) +
                                        " process sets are live, which is the limit; remove one"));
  }
  DownMessage& add = NewDecision(DownType::kAddSet, sets_.next_uid());
  add.key = name;
  add.ranks = ranks;
  add.planes = options_.planes;
  BroadcastDecision();
}

void Negotiation::Impl::DecideRemoveSet(KeyId id) {
  const KeyName& name = keys_.At(id).name;
  const std::vector<int32_t>& ranks =
      SignatureOf(keys_.At(id).round.detail->signatures.front()).ranks;
  const auto uid = static_cast<uint32_t>(ranks.empty() ? 0 : ranks.front());
  const SetState* set = sets_.Find(uid);
  if (uid == kGlobalSet || set == nullptr || !set->live) {
    return Refuse(id,
                  InvalidArgument(Describe(name) + ": " +
                                  (uid == kGlobalSet ? "the global process set cannot be removed"
                                                     : "there is no such process set")));
  }
  DecideSet(*set);
  NewDecision(DownType::kRemoveSet, uid).key = name;
  BroadcastDecision();
}

/// Everything that is ready in a set which is about to end; beyond the window if need be.
void Negotiation::Impl::DecideSet(const SetState& set) {
  for (int device = 0; device < kDeviceKindCount; ++device) {
    const uint32_t queue = QueueOf(set.info.uid, static_cast<DeviceKind>(device));
    const auto found = queues_.find(queue);
    while (found != queues_.end() && found->second.waiting > 0) DecideWork(queue);
  }
}

void Negotiation::Impl::DecideQueues() {
  for (size_t i = 0; i < active_.size();) {
    const uint32_t index = active_[i];
    Queue& queue = queues_[index];
    while (queue.waiting > 0 && queue.unfinished < options_.window) DecideWork(index);
    if (queue.waiting > 0) {
      ++i;
      continue;
    }
    queue.active = false;
    active_[i] = active_.back();
    active_.pop_back();
  }
}

/// One Work: the oldest ready key of the queue and what can be reduced together with it.
void Negotiation::Impl::DecideWork(uint32_t index) {
  Queue& queue = queues_[index];
  while (queue.ready[queue.head].taken) ++queue.head;
  NewDecision(DownType::kWork, index / kDeviceKindCount);
  const size_t head = queue.head;
  TakeFusible(queue, head);
  if (queue.waiting == 0) {
    queue.ready.clear();
    queue.head = 0;
  } else if (queue.head > 64 && queue.head > queue.ready.size() / 2) {
    queue.ready.erase(queue.ready.begin(),
                      queue.ready.begin() + static_cast<std::ptrdiff_t>(queue.head));
    queue.head = 0;
  }
  if (Broken(kSplitGroup)) SplitForTest();
  BroadcastDecision();
}

void Negotiation::Impl::TakeFusible(Queue& queue, size_t head) {
  int64_t bytes = queue.ready[head].fusion_key.bytes;
  const int64_t threshold = options_.FusionThreshold(queue.ready[head].fusion_key.collective.device);
  TakeReady(queue, head);
  for (size_t at = head + 1; at < queue.ready.size(); ++at) {
    const Ready& first = queue.ready[head];
    const Ready& next = queue.ready[at];
    if (next.taken || !first.fusion_key.With(next.fusion_key) ||
        !SameAbsent(first.absent, next.absent)) {
      continue;
    }
    if (next.fusion_key.bytes > threshold - bytes || item_bytes_ > kMessageBytes) return;
    if (threshold <= 0) return;
    bytes += next.fusion_key.bytes;
    TakeReady(queue, at);
  }
}

void Negotiation::Impl::TakeReady(Queue& queue, size_t at) {
  queue.ready[at].taken = true;
  --queue.waiting;
  AddToWork(queue.ready[at]);
}

void Negotiation::Impl::AddToWork(const Ready& ready) {
  const bool by_id = ready.cached != nullptr && ready.absent.empty() && ready.skipped.empty();
  if (by_id && !Broken(kDeriveAbsentFromJoined)) {
    down_.ids.push_back(ready.cached->id);
  } else {
    down_.items.push_back(ItemOf(ready));
    item_bytes_ += TravelBytes(down_.items.back());
  }
}

WorkItem Negotiation::Impl::ItemOf(const Ready& ready) {
  Key& key = keys_.At(ready.key);
  WorkItem item;
  item.absent = ready.absent;
  item.skipped = ready.skipped;
  if (ready.cached != nullptr) {
    item.id = ready.cached->id;
  } else {
    item.key = key.name;
    item.signature = key.round.detail->signatures.front().signature;
    item.bind = IdFor(key, item.signature);
  }
  if (Broken(kDeriveAbsentFromJoined)) {
    const Signature& signature = ready.cached ? ready.cached->signature : item.signature;
    const Mask full = FullMask(static_cast<int>(signature.members.size()));
    item.absent.clear();
    for (const int32_t rank : sets_.Find(key.name.set)->info.ranks) {
      if (sets_.Joined(rank)) item.absent.push_back({rank, full});
    }
  }
  return item;
}

/// The id to bind to a signature that is decided for the second time, or kNoId. A collision of
/// hashes binds one use early, which is as good.
uint32_t Negotiation::Impl::IdFor(Key& key, const Signature& signature) {
  const uint64_t hash = Hash(signature);
  const auto it = std::find(key.seen.begin(), key.seen.end(), hash);
  if (it == key.seen.end()) {
    if (key.seen.size() == kSeen) key.seen.erase(key.seen.begin());
    key.seen.push_back(hash);
    return kNoId;
  }
  if (key.cached.size() >= kIdsOfAKey) return kNoId;
  const size_t bytes = TravelBytes(signature);
  const bool free = next_id_ < options_.max_ids || !free_ids_.empty();
  if (free && bytes <= kIdBytes - id_bytes_) {
    key.seen.erase(it);
    id_bytes_ += bytes;
    return TakeId();
  }
  if (!reported_full_) {
    listener_.OnReport("the table of ids is full (" + std::to_string(next_id_ - free_ids_.size()) +
                       "): further tensors are negotiated by name, which is slower");
  }
  reported_full_ = true;
  return kNoId;
}

/// Those of sets that have ended go first.
uint32_t Negotiation::Impl::TakeId() {
  if (free_ids_.empty()) return next_id_++;
  const uint32_t id = free_ids_.back();
  free_ids_.pop_back();
  return id;
}

/// Test only: decides half of a group's members and leaves the others to a second decision.
void Negotiation::Impl::SplitForTest() {
  if (down_.items.size() != 1 || !down_.ids.empty()) return;
  const WorkItem item = down_.items.front();
  const Signature& signature = item.id == kNoId ? item.signature : keys_.ById(item.id)->signature;
  const auto members = static_cast<int>(signature.members.size());
  if (members < 2) return;
  WorkItem& first = down_.items.front();
  const uint32_t set = down_.set;
  WorkItem second = item;
  second.bind = kNoId;
  for (int m = 0; m < members; ++m)
    SetBit(m < members / 2 ? second.skipped : first.skipped, m, members);
  BroadcastDecision();
  NewDecision(DownType::kWork, set).items.push_back(std::move(second));
}

void Negotiation::Impl::DecideLeaves() {
  for (const RankText& leaving : leaving_) {
    for (const auto& [uid, set] : sets_.all()) {
      if (set->live && set->Contains(leaving.rank)) DecideSet(*set);
    }
    DownMessage& left = NewDecision(DownType::kLeft, kGlobalSet);
    left.rank = leaving.rank;
    left.text = leaving.text;
    BroadcastDecision();
  }
  if (!leaving_.empty() && static_cast<int>(left_ranks_.size()) == options_.size) {
    NewDecision(DownType::kShutdown, kGlobalSet);
    BroadcastDecision();
  }
  leaving_.clear();
}

/// Nothing that holds votes may be left: a rank that submits again must not meet an old round.
void Negotiation::Impl::DecideJoinDone() {
  if (sets_.joined_count() != options_.size || !left_ranks_.empty()) return;
  if (!active_.empty() && !Broken(kJoinDoneEarly)) return;
  NewDecision(DownType::kJoinDone, kGlobalSet).rank = last_joined_;
  BroadcastDecision();
}

DownMessage& Negotiation::Impl::NewDecision(DownType type, uint32_t set) {
  down_.type = type;
  down_.number = ++next_number_;
  down_.set = set;
  down_.ids.clear();
  down_.items.clear();
  down_.key.set = kGlobalSet;
  down_.key.name.clear();
  down_.text.clear();
  down_.code = 0;
  down_.rank = 0;
  down_.ranks.clear();
  down_.planes.clear();
  item_bytes_ = 0;
  return down_;
}

void Negotiation::Impl::BroadcastDecision() {
  if (down_.text.size() > kMaxTextBytes) down_.text.resize(kMaxTextBytes);
  const Status delivered = Dispatch(down_);
  if (fault_.ok()) fault_ = delivered;
}

Status Negotiation::Impl::FreeBatch(int64_t number, int32_t index) {
  uint32_t queue = 0;
  if (!unfinished_.Take(number, index, &queue)) {
    return Internal("protocol: batch " + std::to_string(index) + " of decision " +
                    std::to_string(number) + " is not unfinished");
  }
  const auto found = queues_.find(queue);
  --found->second.unfinished;
  const bool over = sets_.Ended(queue / kDeviceKindCount) && found->second.unfinished == 0;
  if (over) queues_.erase(found);
  return {};
}

}  // namespace farandole
