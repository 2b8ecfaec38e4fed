#include "coordinator/protocol/decider.h"

#include <algorithm>

#include "coordinator/protocol/error_text.h"
#include "coordinator/protocol/limits.h"

namespace farandole {
namespace {

/// Hashes of signatures decided once that a key remembers.
constexpr size_t kSeen = 16;
/// A key whose signature goes on changing gets no further ids: they would fill the table, and each
/// submission looks through them.
constexpr size_t kIdsOfAKey = 64;
/// What every rank keeps for ids: signatures of this many bytes, as they travel, and rows.
constexpr size_t kIdBytes = size_t{64} << 20;

/// What every rank keeps for an id besides, about.
constexpr size_t kIdTableBytes = 256;

bool ChangesSets(OpKind kind) { return kind == OpKind::kAddSet || kind == OpKind::kRemoveSet; }

/// A queue, and so a window, for each set and device kind: what stands still in one holds up no
/// other.
uint32_t QueueOf(uint32_t set, DeviceKind device) {
  return set * kDeviceKindCount + static_cast<uint32_t>(device);
}

/// What a bound id takes on every rank: the signature, and rows of an allgather. FreeSet takes off
/// what IdFor has added, so it depends on nothing that changes while the set lives.
size_t BytesOfId(const Signature& signature, size_t ranks) {
  const size_t rows = signature.kind == OpKind::kAllgather ? signature.tensors.size() * ranks : 0;
  return TravelBytes(signature) + rows * sizeof(int64_t);
}

}  // namespace

/// Called once per Flush, when all that has arrived is counted, so that tensors that became ready
/// together share a batch. Leaves follow the queues, which decide what the window allows; JoinDone
/// is last, because it waits until nothing is ready and undecided.
void Decider::Decide() {
  TakeComplete();
  DecideOutcomes();
  DecideSetChanges();
  DecideQueues();
  DecideRetirements();
  DecideLeaves();
  DecideJoinDone();
}

void Decider::TakeComplete() {
  for (const VoteTally::Complete& one : tally_.complete()) {
    if (one.known != nullptr) {
      OnReady(one.known);
    } else {
      OnReady(one.key);
    }
  }
  tally_.ClearComplete();
}

/// It was decided at once before, so that one batch has room for it.
void Decider::OnReady(std::shared_ptr<const KnownWork> known) {
  const uint32_t set = known->set;
  const DeviceKind device = known->fusion_key.collective.device;
  Enqueue({0, false, nullptr, nullptr, std::move(known)}, set, device);
}

/// Tensors wait in the queue of their set and device; what moves nothing, and sets, for Decide. A
/// plain round is not validated again: all ranks contribute, with one signature that was validated
/// when it got its id.
void Decider::OnReady(KeyId id) {
  Key& key = node_.keys.At(id);
  Round& round = key.round;
  if (!round.detailed && !ChangesSets(key.name.kind)) {
    const Signature& signature = round.plain->signature;
    if (!signature.tensors.empty())
      return Enqueue({id, false, round.plain, nullptr, nullptr}, key.name.set, signature.device);
    outcomes_.emplace_back(id, Outcome());
    return;
  }
  const KeyVotes& votes = round.Detail(key.name);
  const CachedSignature* const cached = node_.keys.ById(votes.signatures.front().id);
  Outcome outcome = ValidateRound(
      node_.sets.ForUser(key.name), votes, node_.sets.Find(key.name.set)->info.ranks,
      [&](size_t i) -> const Signature& { return node_.keys.SignatureOf(votes.signatures[i]); },
      cached == nullptr ? std::span<const int64_t>() : cached->rows,
      node_.options.join_allreduce_only);
  const Signature& signature = node_.keys.SignatureOf(votes.signatures.front());
  if (outcome.what == Outcome::What::kRun && ChangesSets(key.name.kind)) {
    set_changes_.push_back(id);
  } else if (outcome.what != Outcome::What::kRun || signature.tensors.empty()) {
    outcomes_.emplace_back(id, std::move(outcome));
  } else {
    auto detail = std::make_unique<Detail>();
    // Left out if it is the table of the id's last decision. No other decision of this key can come
    // before this one and change that table.
    if (cached == nullptr || outcome.rows != cached->rows) detail->rows = std::move(outcome.rows);
    detail->fusion_key = FusionKeyOf(signature);
    detail->fusion_key.uniform = detail->fusion_key.uniform && outcome.uniform;
    detail->absent = std::move(outcome.absent);
    detail->skipped = std::move(outcome.skipped);
    Enqueue({id, false, cached, std::move(detail), nullptr}, key.name.set, signature.device);
  }
}

void Decider::Enqueue(Ready ready, uint32_t set, DeviceKind device) {
  const uint32_t index = QueueOf(set, device);
  Queue& queue = queues_[index];
  queue.ready.push_back(std::move(ready));
  ++queue.waiting;
  if (queue.active) return;
  queue.active = true;
  active_.push_back(index);
}

/// Refusals, skips and barriers move nothing, so they wait for nothing.
void Decider::DecideOutcomes() {
  for (const auto& [id, outcome] : outcomes_) {
    const Key& key = node_.keys.At(id);
    if (outcome.what == Outcome::What::kRefuse) {
      Refuse(id, outcome.why);
      continue;
    }
    if (outcome.what == Outcome::What::kSkip) {
      NewDecision(DownType::kSkip, key.name.set).key = key.name;
    } else {
      // Work without a batch: it runs in the order of decisions and fills no window.
      NewDecision(DownType::kWork, key.name.set);
      const Round& round = key.round;
      const CachedSignature* const cached =
          round.detailed ? node_.keys.ById(round.detail->signatures.front().id) : round.plain;
      AddToWork({id, false, cached, cached ? nullptr : std::make_unique<Detail>(), nullptr});
    }
    Broadcast();
  }
  outcomes_.clear();
}

/// Only for a key on which all members have voted or joined: then the refusal ends a submission on
/// every member, and none meets the others' next use of the key.
void Decider::Refuse(KeyId id, const Status& why) {
  const KeyName& name = node_.keys.At(id).name;
  DownMessage& refusal = NewDecision(DownType::kRefuse, name.set);
  refusal.key = name;
  refusal.code = static_cast<int32_t>(why.code());
  refusal.text = why.message();
  refusal.ranks = why.facts().ranks;
  refusal.facts.cause = why.facts().cause;
  refusal.facts.tensor = why.facts().tensor.empty() ? name.name : why.facts().tensor;
  Broadcast();
}

void Decider::DecideSetChanges() {
  for (const KeyId id : set_changes_) {
    if (node_.keys.At(id).name.kind == OpKind::kAddSet) {
      DecideAddSet(id);
    } else {
      DecideRemoveSet(id);
    }
  }
  set_changes_.clear();
}

/// Checked when the call is complete and not where it is made: which sets are live depends on the
/// decisions before this one, and all callers get the same answer.
void Decider::DecideAddSet(KeyId id) {
  const KeyName& name = node_.keys.At(id).name;
  const std::vector<int32_t> ranks =
      node_.keys.SignatureOf(node_.keys.At(id).round.detail->signatures.front()).ranks;
  const auto refuse = [&](const std::string& why) {
    Refuse(id, InvalidArgument(Describe(name) + ": " + why));
  };
  if (ranks.empty()) return refuse("a process set needs a rank");
  if (!AreAscending(ranks)) {
    return refuse(DescribeRanks(ranks) + " are not all different and ascending");
  }
  if (ranks.front() < 0 || ranks.back() >= node_.options.size) {
    return refuse(DescribeRanks(ranks) + " of " + std::to_string(node_.options.size));
  }
  if (const SetState* same = node_.sets.FindRanks(ranks); same != nullptr) {
    return refuse("process set " + std::to_string(same->info.user_id) + " has the same ranks");
  }
  if (node_.sets.Full()) {
    return Refuse(
        id, ResourceExhausted(Describe(name) + ": " + std::to_string(node_.sets.all().size()) +
                              " process sets are live, which is the limit; remove one"));
  }
  DownMessage& add = NewDecision(DownType::kAddSet, node_.sets.next_uid());
  add.key = name;
  add.ranks = ranks;
  add.planes = node_.options.PlanesOf(ranks);
  Broadcast();
}

void Decider::DecideRemoveSet(KeyId id) {
  const KeyName& name = node_.keys.At(id).name;
  const std::vector<int32_t>& ranks =
      node_.keys.SignatureOf(node_.keys.At(id).round.detail->signatures.front()).ranks;
  const auto uid = static_cast<uint32_t>(ranks.empty() ? 0 : ranks.front());
  const SetState* set = node_.sets.Find(uid);
  if (uid == kGlobalSet || set == nullptr || !set->live) {
    return Refuse(id,
                  InvalidArgument(Describe(name) + ": " +
                                  (uid == kGlobalSet ? "the global process set cannot be removed"
                                                     : "there is no such process set")));
  }
  DecideSet(*set);
  FreeSet(*set);
  NewDecision(DownType::kRemoveSet, uid).key = name;
  Broadcast();
}

/// Everything that is ready in a set which is about to end; beyond the window if need be. Nothing
/// in a set that other nodes decide for.
void Decider::DecideSet(const SetState& set) {
  for (int device = 0; device < kDeviceKindCount; ++device) {
    const uint32_t queue = QueueOf(set.info.uid, static_cast<DeviceKind>(device));
    const auto found = queues_.find(queue);
    while (found != queues_.end() && found->second.waiting > 0) DecideWork(queue);
  }
}

/// A queue waits for nothing but its own window, so it does not matter in which order they are
/// visited. One whose window is full stays listed.
void Decider::DecideQueues() {
  for (size_t i = 0; i < active_.size();) {
    const uint32_t index = active_[i];
    Queue& queue = queues_[index];
    while (queue.waiting > 0 && queue.unfinished < node_.options.window) DecideWork(index);
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
void Decider::DecideWork(uint32_t index) {
  Queue& queue = queues_[index];
  while (queue.ready[queue.head].taken) ++queue.head;
  NewDecision(DownType::kWork, index / kDeviceKindCount);
  const size_t head = queue.head;
  TakeFusible(queue, head);
  // Erasing moves fewer entries than it drops, so it costs O(1) per key.
  if (queue.waiting == 0) {
    queue.ready.clear();
    queue.head = 0;
  } else if (queue.head > 64 && queue.head > queue.ready.size() / 2) {
    queue.ready.erase(queue.ready.begin(),
                      queue.ready.begin() + static_cast<std::ptrdiff_t>(queue.head));
    queue.head = 0;
  }
  Broadcast();
  TrackBatches(index);
}

/// Of uniform keys, in which an absent rank is absent from every tensor, so the ranks say it all.
/// Masks of keys with unequally many tensors could not be compared.
bool Decider::SameAbsent(const Ready& a, const Ready& b) {
  if (a.detail == nullptr && b.detail == nullptr) return true;
  static const std::vector<RankMask> kNobody;
  const std::vector<RankMask>& x = a.detail == nullptr ? kNobody : a.detail->absent;
  const std::vector<RankMask>& y = b.detail == nullptr ? kNobody : b.detail->absent;
  return std::ranges::equal(x, y, {}, &RankMask::rank, &RankMask::rank);
}

/// Keys that cannot be reduced with the head are passed over and keep their place. The first
/// compatible key that does not fit ends the search, so compatible keys run in readiness order.
/// What is taken along shares one batch with the head, as FormBatches compares the same things.
/// O(ready keys).
void Decider::TakeFusible(Queue& queue, size_t head) {
  const Ready& first = queue.ready[head];
  const FusionKey& fusion_key = first.fusion_key();
  int64_t bytes = fusion_key.bytes;
  const int64_t threshold = node_.options.FusionThreshold(fusion_key.collective.device);
  TakeReady(queue, head);
  for (size_t at = head + 1; at < queue.ready.size(); ++at) {
    const Ready& next = queue.ready[at];
    if (next.taken || !fusion_key.With(next.fusion_key()) || !SameAbsent(first, next)) continue;
    if (next.fusion_key().bytes > threshold - bytes || item_bytes_ > kMessageBytes) return;
    if (threshold <= 0) return;
    bytes += next.fusion_key().bytes;
    TakeReady(queue, at);
  }
}

void Decider::TakeReady(Queue& queue, size_t at) {
  queue.ready[at].taken = true;
  --queue.waiting;
  AddToWork(queue.ready[at]);
}

/// By id alone if the id says everything. Items count against kMessageBytes, which bounds the
/// frame.
void Decider::AddToWork(const Ready& ready) {
  if (ready.known != nullptr) {
    const std::vector<uint32_t>& ids = ready.known->ids;
    down_.ids.insert(down_.ids.end(), ids.begin(), ids.end());
    return;
  }
  const bool by_id =
      ready.cached != nullptr && (ready.detail == nullptr || ready.detail->IsEmpty());
  if (by_id) {
    down_.ids.push_back(ready.cached->id);
  } else {
    down_.items.push_back(ItemOf(ready));
    item_bytes_ += TravelBytes(down_.items.back());
  }
}

/// Without an id the signature is in the round's detail, which stays here until the decision
/// (VoteTally::CompleteIfAll).
WorkItem Decider::ItemOf(const Ready& ready) {
  Key& key = node_.keys.At(ready.key);
  WorkItem item;
  item.absent = ready.detail->absent;
  item.skipped = ready.detail->skipped;
  item.rows = ready.detail->rows;
  if (ready.cached != nullptr) {
    item.id = ready.cached->id;
  } else {
    item.key = key.name;
    item.signature = key.round.detail->signatures.front().signature;
    item.bind = IdFor(key, item.signature);
  }
  return item;
}

/// The id to bind to a signature that is decided for the second time, or kNoId. A collision of
/// hashes binds one use early, which is as good.
uint32_t Decider::IdFor(Key& key, const Signature& signature) {
  const uint64_t hash = Hash(signature);
  const auto it = std::find(key.seen.begin(), key.seen.end(), hash);
  if (it == key.seen.end()) {
    if (key.seen.size() == kSeen) key.seen.erase(key.seen.begin());
    key.seen.push_back(hash);
    return kNoId;
  }
  if (key.cached.size() >= kIdsOfAKey) return kNoId;
  const size_t bytes = BytesOfId(signature, node_.sets.Find(key.name.set)->info.ranks.size());
  const bool free = next_id_ < node_.options.max_ids || !free_ids_.empty();
  if (free && bytes <= kIdBytes - id_bytes_) {
    key.seen.erase(it);
    id_bytes_ += bytes;
    return TakeId();
  }
  // The hash stays in `seen`: the next use tries again, for a removed set may have freed ids.
  if (!reported_full_) {
    node_.listener.OnReport("the table of ids is full (" +
                            std::to_string(next_id_ - free_ids_.size()) +
                            "): further tensors are negotiated by name, which is slower");
  }
  reported_full_ = true;
  return kNoId;
}

size_t Decider::IdWeight() const { return id_bytes_ + ids() * kIdTableBytes; }

/// When the ids take a quarter more than the last time left, those are retired that nobody has
/// voted for since the time before and that no operation of this rank holds. So a job whose names
/// stay the same sends nothing, and each id is looked at about once for each that is bound. The
/// other ranks need not agree that an id is idle: one that votes by it crosses the decision, which
/// changes only how the vote is written.
void Decider::DecideRetirements() {
  if (!retired_.empty()) TakeBackIds();
  if (IdWeight() <= retire_above_ || !retired_.empty()) return;
  std::map<uint32_t, std::vector<uint32_t>> idle;  // by set
  node_.keys.ForEachId(node_.sets.depth(), [&](const CachedSignature& cached) {
    Key& key = node_.keys.At(cached.key);
    const SetState& set = *node_.sets.Find(key.name.set);
    if (!set.live || !key.IsAtRest() || node_.listener.Holds(cached.key)) return;
    if (!key.is_idle) return;
    id_bytes_ -= BytesOfId(cached.signature, set.info.ranks.size());
    idle[key.name.set].push_back(cached.id);
  });
  node_.keys.ForEachId(node_.sets.depth(), [&](const CachedSignature& cached) {
    node_.keys.At(cached.key).is_idle = true;
  });
  for (auto& [set, ids] : idle) {
    NewDecision(DownType::kRetire, set).ids = ids;
    retired_.push_back({set, std::move(ids)});
    Broadcast();
  }
  size_t retired = 0;
  for (const Retired& one : retired_) retired += one.ids.size();
  const size_t least = node_.options.idle_id_bytes;
  const size_t left = IdWeight() - retired * kIdTableBytes;
  retire_above_ = least == 0 ? 0 : left + std::max(least, left / 4);
  TakeBackIds();
}

/// Of an ended set, FreeSet has taken them back; but those of the global set stay bound, like all
/// its ids, if it ended before all nodes had freed them.
void Decider::TakeBackIds() {
  std::erase_if(retired_, [this](const Retired& one) {
    const SetState& set = *node_.sets.Find(one.set);
    if (set.live && !set.retired.empty()) return false;
    if (set.retired.empty()) {
      free_ids_.insert(free_ids_.end(), one.ids.rbegin(), one.ids.rend());
    }
    return true;
  });
}

/// Those that were freed go first.
uint32_t Decider::TakeId() {
  if (free_ids_.empty()) return MakeId(node_.sets.depth(), next_id_++);
  const uint32_t id = free_ids_.back();
  free_ids_.pop_back();
  return id;
}

/// Called just before the decision that ends the set is handed over, after DecideSet has taken ids
/// for what is ready: from then on its ids are free on every node, and no decision may give them to
/// another key before. Queues with unfinished batches go with the last of them.
void Decider::FreeSet(const SetState& set) {
  // The keys of the global set are never released.
  if (set.info.uid == kGlobalSet || !set.IsDecidedHere()) return;
  const std::vector<KeyId>& keys = node_.keys.OfSet(set.info.uid);
  // Backwards, as TakeId takes from the back: the ids of the first keys are given out first.
  for (auto id = keys.rbegin(); id != keys.rend(); ++id) {
    for (const CachedSignature* cached : node_.keys.At(*id).cached) {
      free_ids_.push_back(cached->id);
      id_bytes_ -= BytesOfId(cached->signature, set.info.ranks.size());
    }
  }
  std::erase_if(retired_, [&](const Retired& one) {
    if (one.set != set.info.uid) return false;
    free_ids_.insert(free_ids_.end(), one.ids.rbegin(), one.ids.rend());
    return true;
  });
  for (int device = 0; device < kDeviceKindCount; ++device) {
    const uint32_t index = QueueOf(set.info.uid, static_cast<DeviceKind>(device));
    const auto queue = queues_.find(index);
    if (queue == queues_.end()) continue;
    // DecideSet has emptied the queue, which may still be listed.
    std::erase(active_, index);
    if (queue->second.unfinished == 0) queues_.erase(queue);
  }
}

void Decider::AnnounceLeave(int rank) { announced_.push_back(rank); }

/// Decided in the next Decide, after the keys that the votes ahead of the Leave have completed.
/// What was announced may have been decided, with all ranks, while the Leave was on its way.
Status Decider::Leave(int rank, const FailureFacts& failure) {
  if (std::ranges::find(left_ranks_, rank) != left_ranks_.end()) {
    if (static_cast<int>(left_ranks_.size()) == node_.options.size) return {};
    return Internal("protocol: rank " + std::to_string(rank) + " left twice");
  }
  std::erase(announced_, rank);
  left_ranks_.push_back(rank);
  leaving_.emplace_back(rank, failure);
  return {};
}

/// With the last rank's announcement all have left: then nobody waits for an exit code.
void Decider::DecideLeaves() {
  if (static_cast<int>(left_ranks_.size() + announced_.size()) == node_.options.size) {
    for (const int rank : std::vector(announced_)) Note(Leave(rank, {}));
  }
  for (const auto& [rank, failure] : leaving_) DecideLeave(rank, failure);
  // Once, in the Decide that handles the last Leave.
  if (!leaving_.empty() && static_cast<int>(left_ranks_.size()) == node_.options.size) {
    NewDecision(DownType::kShutdown, kGlobalSet);
    Broadcast();
  }
  leaving_.clear();
}

/// No id is freed before the last is given: both belong to sets that are still live.
void Decider::EndSetsOf(int rank) {
  std::vector<const SetState*> ending;
  for (const auto& [uid, set] : node_.sets.all()) {
    if (set->live && set->Contains(rank)) ending.push_back(set.get());
  }
  for (const SetState* set : ending) DecideSet(*set);
  for (auto set = ending.rbegin(); set != ending.rend(); ++set) FreeSet(**set);
}

/// What was voted for ahead of the Remove, Leave or Join that has caused the decision has been
/// counted here by now, as they came through this node; so the ranks below find nothing of it
/// undecided. They see the same order of decisions as if rank 0 had made all of them.
void Decider::DecideBefore(const DownMessage& message) {
  const bool is_end = message.type == DownType::kRemoveSet || message.type == DownType::kLeft;
  if (!is_end && message.type != DownType::kJoinDone) return;
  TakeComplete();
  DecideOutcomes();
  if (message.type == DownType::kLeft) return EndSetsOf(message.rank);
  if (message.type == DownType::kJoinDone) {
    for (const auto& [uid, set] : node_.sets.all()) DecideSet(*set);
  } else if (const SetState* set = node_.sets.Find(message.set); set != nullptr) {
    DecideSet(*set);
    FreeSet(*set);
  }
}

void Decider::DecideLeave(int rank, const FailureFacts& failure) {
  EndSetsOf(rank);
  DownMessage& left = NewDecision(DownType::kLeft, kGlobalSet);
  left.rank = rank;
  left.facts = failure;
  Broadcast();
}

/// Nothing that holds votes may be left: a rank that submits again must not meet an old round. A
/// queue is active as long as it holds something undecided. A Left ends the global set, and with it
/// a join in flight, so no JoinDone follows one.
void Decider::DecideJoinDone() {
  if (!node_.IsRoot() || node_.sets.joined_count() != node_.options.size || !left_ranks_.empty())
    return;
  if (!active_.empty()) return;
  NewDecision(DownType::kJoinDone, kGlobalSet).rank = tally_.last_joined();
  Broadcast();
}

/// There is one decision at a time: it is broadcast before the next one is made. Queries take their
/// numbers from the same sequence.
DownMessage& Decider::NewDecision(DownType type, uint32_t set) {
  down_.Clear();
  down_.type = type;
  down_.number = (int64_t{node_.sets.depth()} << kNumberLevelBit) + ++next_number_;
  down_.set = set;
  item_bytes_ = 0;
  return down_;
}

void Decider::Send(DownMessage message) {
  message.number = NewDecision(message.type, message.set).number;
  down_ = std::move(message);
  Broadcast();
}

void Decider::ShutDown(const Status& error) {
  DownMessage& shutdown = NewDecision(DownType::kStallShutdown, kGlobalSet);
  shutdown.text = error.message();
  shutdown.code = static_cast<int32_t>(error.code());
  shutdown.ranks = error.facts().ranks;
  shutdown.facts = error.facts();
  shutdown.facts.cause.resize(std::min(shutdown.facts.cause.size(), kMaxNameBytes));
  Broadcast();
}

void Decider::Broadcast() {
  // The receivers' parser refuses a longer text.
  if (down_.text.size() > kMaxTextBytes) down_.text.resize(kMaxTextBytes);
  Note(applier_.Dispatch(down_));
}

/// The first error is the one that is acted on.
void Decider::Note(const Status& status) {
  if (fault_.ok()) fault_ = status;
}

/// The batches of the Work just sent fill the window of its queue until they are reported. After
/// Broadcast, and yet in time: the listener does not call back, so no batch can be reported in
/// between.
void Decider::TrackBatches(uint32_t queue) {
  const size_t count = applier_.batches();
  if (count == 0) return;
  for (size_t i = 0; i < count; ++i) {
    unfinished_.Add(down_.number, queue, static_cast<int32_t>(i));
  }
  queues_[queue].unfinished += static_cast<int64_t>(count);
}

Status Decider::FreeBatch(int64_t number, int32_t index) {
  uint32_t queue = 0;
  if (!unfinished_.Take(number, index, &queue)) {
    return Internal("protocol: batch " + std::to_string(index) + " of decision " +
                    std::to_string(number) + " is not unfinished");
  }
  // FreeSet keeps a queue with unfinished batches, so it is there; the last batch takes it away.
  const auto found = queues_.find(queue);
  --found->second.unfinished;
  const bool is_last = node_.sets.Ended(queue / kDeviceKindCount) && found->second.unfinished == 0;
  if (is_last) queues_.erase(found);
  return {};
}

}  // namespace farandole
