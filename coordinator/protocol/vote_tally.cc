#include "coordinator/protocol/vote_tally.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

/// What a refused key says of those who caused it, in a message: as many texts as a refusal spells
/// out, and signatures up to these numbers.
constexpr size_t kTexts = 8;
constexpr size_t kSignatures = 32;
constexpr size_t kSignatureBytes = size_t{32} << 20;

Status Broke(const Key& key, int contributor, const char* what) {
  return Internal("protocol: " + Describe(key.name) + ": " + what + " (contributor " +
                  std::to_string(contributor) + ")");
}

/// Normalise has replaced each signature that has an id by the id, so one with an id never equals
/// one without.
bool Same(const SignatureVotes& a, const SignatureVotes& b) {
  if (a.id != kNoId || b.id != kNoId) return a.id == b.id;
  return a.signature == b.signature;
}
bool Same(const StepVotes& a, const StepVotes& b) { return a.count == b.count; }

/// Whether an id alone says the same in a Votes message. One step count is no exception: it travels
/// beside the ids.
bool IsPlain(const KeyVotes& votes) {
  return votes.signatures.size() == 1 && votes.signatures.front().id != kNoId &&
         votes.absent.empty() && votes.clean.empty() && votes.failed.empty() &&
         votes.rows.empty() && votes.steps.size() <= 1;
}

/// Adds an id to a Votes message, with the step count that belongs to it. Equal counts of ids in a
/// row share one run.
void AddId(uint32_t id, const StepCount& step, UpMessage& message) {
  message.ids.push_back(id);
  if (message.steps.empty() && step.step == 0) return;
  // Runs are counted from the first id on, so the ids before the first count need one as well.
  if (message.steps.empty() && message.ids.size() > 1) {
    message.steps.push_back({static_cast<uint32_t>(message.ids.size() - 1), {}});
  }
  if (message.steps.empty() || message.steps.back().count != step) {
    message.steps.push_back({0, step});
  }
  ++message.steps.back().length;
}

template <class Entry>
void Append(std::vector<Entry>& to, std::vector<Entry>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

template <class Entry>
void SortByRank(std::vector<Entry>& list) {
  std::sort(list.begin(), list.end(),
            [](const Entry& a, const Entry& b) { return a.rank < b.rank; });
}

template <class Entry>
bool AscendsByRank(const std::vector<Entry>& list) {
  return std::adjacent_find(list.begin(), list.end(), [](const Entry& a, const Entry& b) {
           return a.rank >= b.rank;
         }) == list.end();
}

/// A key that will be refused whatever else is voted travels without what its refusal does not say,
/// so that its record is bounded however many ranks disagree. The lists ascend. Every node keeps
/// the texts of its lowest ranks, so those of the lowest kTexts of all ranks reach the top. At
/// least two signatures stay: a single one would look like agreement to the nodes above.
void ShortenRefused(KeyVotes& votes) {
  if (votes.failed.empty() && votes.signatures.size() == 1) return;
  votes.absent.clear();
  votes.clean.clear();
  votes.rows.clear();
  for (size_t i = kTexts; i < votes.failed.size(); ++i) votes.failed[i].text.clear();
  size_t kept = 0;
  size_t bytes = 0;
  for (; kept < votes.signatures.size() && kept < kSignatures; ++kept) {
    const SignatureVotes& one = votes.signatures[kept];
    if (one.id == kNoId) bytes += TravelBytes(one.signature);
    if (kept >= 2 && bytes > kSignatureBytes) break;
  }
  votes.signatures.resize(kept);
}

}  // namespace

/// Negotiation::Submit has checked that the set is live, that this rank is a member and that the
/// key is not pending.
Status VoteTally::CountOwn(KeyId id, const CachedSignature& cached, const StepCount& step) {
  return CountPlain(id, *node_.sets.Find(node_.keys.At(id).name.set), kSelf, &cached, step);
}

Status VoteTally::CountOwn(KeyId id, KeyVotes votes) {
  const Key& key = node_.keys.At(id);
  SetState& set = *node_.sets.Find(key.name.set);
  // The masks of a frontend may be shorter than those that nodes compare.
  FARANDOLE_RETURN_IF_ERROR(Normalise(key, set, kSelf, votes));
  return CountRecord(id, set, kSelf, std::move(votes));
}

/// Step counts cover the ids from the first on; ids beyond the last run have none. Ids are counted
/// before records, in whatever order the keys became ready below: only the order in which the
/// decider counts them decides the order of execution.
Status VoteTally::ReceiveVotes(int child, const UpMessage& message) {
  const int contributor = ContributorOfChild(child);
  std::span<const uint32_t> ids = message.ids;
  for (const StepRun& run : message.steps) {
    const size_t length = std::min<size_t>(run.length, ids.size());
    FARANDOLE_RETURN_IF_ERROR(CountIds(contributor, ids.first(length), run.count, message.number));
    ids = ids.subspan(length);
  }
  FARANDOLE_RETURN_IF_ERROR(CountIds(contributor, ids, StepCount(), message.number));
  for (const KeyVotes& votes : message.keys) {
    FARANDOLE_RETURN_IF_ERROR(ReceiveRecord(contributor, votes, message.number));
  }
  return {};
}

/// @param number  The last decision that the sender had applied.
Status VoteTally::CountIds(int contributor, std::span<const uint32_t> ids, const StepCount& step,
                           int64_t number) {
  while (!ids.empty()) {
    KnownWork* const known = step.step == 0 ? node_.keys.FindKnown(ids, number) : nullptr;
    if (known != nullptr && CountKnown(*known, contributor)) {
      ids = ids.subspan(known->ids.size());
      continue;
    }
    FARANDOLE_RETURN_IF_ERROR(CountId(contributor, ids.front(), step, number));
    ids = ids.subspan(1);
  }
  return {};
}

void VoteTally::CountOwn(KnownWork& work) {
  if (++work.own == 1) partial_.push_back(&work);
  if (!work.IsAllOwn() || !CountKnown(work, kSelf)) return;
  std::erase(partial_, &work);
}

/// Also what CountKnown has refused. What is known is dissolved with the look at its first key,
/// which then has been submitted, like all before `own`, but has no vote. No round refuses it, as
/// known work had none of this rank.
void VoteTally::CountPartial() {
  while (!partial_.empty()) {
    const KnownWork* const work = partial_.back();
    partial_.pop_back();
    std::vector<std::pair<KeyId, const CachedSignature*>> submitted;
    for (size_t i = 0; i < work->own; ++i)
      submitted.emplace_back(work->keys[i].key, node_.keys.ById(work->ids[i]));
    for (const auto& [id, cached] : submitted) (void)CountOwn(id, *cached, StepCount());
  }
}

/// As for each of its keys. @return false, and nothing has changed, for a vote that is counted, or
/// refused, key by key.
bool VoteTally::CountKnown(KnownWork& work, int contributor) {
  const SetState& set = *node_.sets.Find(work.set);
  const bool is_expected = set.live && set.joined == 0 && set.Contributes(contributor) &&
                           set.decided_at != SetState::DecidedAt::kBelow;
  if (!is_expected || work.sent || work.voted.Test(contributor)) return false;
  work.voted.Set(contributor);
  work.used = true;
  if (work.votes++ == 0) open_rounds_ += static_cast<int64_t>(work.keys.size());
  if (work.votes < set.contributors) return true;
  work.sent = true;
  if (set.IsDecidedHere()) {
    complete_.push_back({0, work.shared_from_this()});
  } else {
    for (const uint32_t id : work.ids) AddId(id, StepCount(), up_);
  }
  return true;
}

Status VoteTally::CountId(int contributor, uint32_t id, const StepCount& step, int64_t number) {
  if (node_.keys.IsLate(id, number)) return {};
  const CachedSignature* cached = node_.keys.ById(id);
  if (cached == nullptr) return Internal("protocol: a vote with unknown id " + std::to_string(id));
  // A set's ids are freed by the decision that ends it, so the set of a bound id is in the table.
  // Only the global set stays there after its end.
  SetState& set = *node_.sets.Find(node_.keys.At(cached->key).name.set);
  if (!set.live) return {};
  if (!cached->retired) return CountPlain(cached->key, set, contributor, cached, step);
  return ReceiveRecord(contributor, InFull(contributor, *cached, step), number);
}

/// What a vote by an id says that its sender still votes by, and this node no more. All it says is
/// then in the record: neither the nodes above nor the decision name the id again.
KeyVotes VoteTally::InFull(int contributor, const CachedSignature& cached,
                           const StepCount& step) const {
  KeyVotes votes;
  votes.key = node_.keys.At(cached.key).name;
  votes.signatures.emplace_back();
  votes.signatures.back().signature = cached.signature;
  if (step.step > 0) votes.steps.push_back({step, {}});
  AddKnownRows(contributor, cached, votes);
  return votes;
}

/// Of an allgather, a vote by an id without rows stands for those of the id's last decision. A
/// rank that is absent needs none, and those given for it are not read (CollectRows).
void VoteTally::AddKnownRows(int contributor, const CachedSignature& cached,
                             KeyVotes& votes) const {
  if (cached.rows.empty()) return;
  const SetState& set = *node_.sets.Find(node_.keys.At(cached.key).name.set);
  const size_t size = set.info.ranks.size();
  const size_t given = votes.rows.size();
  for (const int32_t rank : set.branches[static_cast<size_t>(contributor)].ranks) {
    const auto end = votes.rows.begin() + static_cast<std::ptrdiff_t>(given);
    if (std::find_if(votes.rows.begin(), end, [&](auto& one) { return one.rank == rank; }) != end)
      continue;
    RankRows rows{rank, {}};
    for (size_t t = 0; t < cached.signature.tensors.size(); ++t)
      rows.rows.push_back(OfTensor(cached.rows, t, size)[PositionOf(rank, set.info.ranks)]);
    votes.rows.push_back(std::move(rows));
  }
  SortByRank(votes.rows);
}

/// What was sent up was sent ahead of this, and needs nothing more here.
void VoteTally::SpellOut(const CachedSignature& cached) {
  Key& key = node_.keys.At(cached.key);
  Round& round = key.round;
  if (round.sent) round.plain = nullptr;
  if (round.sent || round.votes == 0) return;
  if (round.plain == &cached) (void)round.Detail(key.name);
  if (!round.detailed) return;
  std::vector<SignatureVotes>& signatures = round.detail->signatures;
  const auto one = std::ranges::find(signatures, cached.id, &SignatureVotes::id);
  if (one == signatures.end()) return;
  one->id = kNoId;
  one->signature = cached.signature;
  if (signatures.size() > 1) return;  // nobody reads rows of ranks that disagree
  const auto branches = static_cast<int>(node_.sets.children().size()) + 1;
  for (int c = 0; c < branches; ++c)
    if (round.voted.Test(c)) AddKnownRows(c, cached, *round.detail);
}

/// A record by name is late if its set has ended, as uids are never used again. A record with ids
/// is late if one of them is: all belong to one key (Normalise).
/// @param number  The last decision that the sender had applied.
Status VoteTally::ReceiveRecord(int contributor, const KeyVotes& votes, int64_t number) {
  const CachedSignature* cached = nullptr;
  for (const SignatureVotes& one : votes.signatures) {
    if (one.id == kNoId) continue;
    if (node_.keys.IsLate(one.id, number)) return {};
    cached = node_.keys.ById(one.id);
    if (cached == nullptr) {
      return Internal("protocol: a vote with unknown id " + std::to_string(one.id));
    }
  }
  const uint32_t uid = cached != nullptr ? node_.keys.At(cached->key).name.set : votes.key.set;
  SetState* set = node_.sets.Find(uid);
  if (set == nullptr && node_.sets.Ended(uid)) return {};
  // Cannot be in flight: this node had added the set before it forwarded the decision.
  if (set == nullptr)
    return Internal("protocol: a vote for unknown process set " + std::to_string(uid));
  if (!set->live) return {};
  const KeyId id = cached != nullptr ? cached->key : node_.keys.Intern(votes.key);
  KeyVotes copy = votes;
  for (SignatureVotes& one : copy.signatures) {
    const CachedSignature* known = one.id == kNoId ? nullptr : node_.keys.ById(one.id);
    if (known == nullptr || !known->retired) continue;
    one.id = kNoId;
    one.signature = known->signature;
    if (copy.signatures.size() == 1) AddKnownRows(contributor, *known, copy);
  }
  FARANDOLE_RETURN_IF_ERROR(Normalise(node_.keys.At(id), *set, contributor, copy));
  // Such a record comes, for example, where of two ranks below only one reported a step count.
  if (IsPlain(copy)) {
    return CountPlain(id, *set, contributor, node_.keys.ById(copy.signatures.front().id),
                      copy.steps.empty() ? StepCount() : copy.steps.front().count);
  }
  return CountRecord(id, *set, contributor, std::move(copy));
}

/// Signatures with an id become that id; masks get their canonical length; everything is checked.
/// Every rank that is named must be in the contributor's branch: nobody speaks for the ranks of
/// another one. The round is untouched when this fails.
Status VoteTally::Normalise(const Key& key, const SetState& set, int contributor,
                            KeyVotes& votes) const {
  if (votes.signatures.empty()) return Broke(key, contributor, "a vote without a signature");
  votes.key = key.name;
  const auto in_branch = [&](int32_t rank) {
    return set.Contains(rank) && node_.sets.ContributorOf(rank) == contributor;
  };
  if (!AscendsByRank(votes.absent) || !AscendsByRank(votes.clean) || !AscendsByRank(votes.failed) ||
      !AscendsByRank(votes.rows)) {
    return Broke(key, contributor, "a list of ranks that does not ascend");
  }
  for (SignatureVotes& one : votes.signatures) {
    const CachedSignature* cached =
        one.id == kNoId ? node_.keys.Match(key, one.signature) : node_.keys.ById(one.id);
    if (cached != nullptr && &node_.keys.At(cached->key) != &key) {
      return Broke(key, contributor, "an id of another key");
    }
    if (cached == nullptr && SpaceOf(one.signature.kind) != SpaceOf(key.name.kind)) {
      return Broke(key, contributor, "a signature of another kind of key");
    }
    if (votes.signatures.size() > 1 && one.ranks.empty()) {
      return Broke(key, contributor, "a mixed vote that does not say who sent what");
    }
    if (!std::all_of(one.ranks.begin(), one.ranks.end(), in_branch)) {
      return Broke(key, contributor, "a signature of a rank not in the branch");
    }
    if (cached == nullptr) continue;
    one.id = cached->id;
    one.signature = Signature();
  }
  const size_t tensors = node_.keys.SignatureOf(votes.signatures.front()).tensors.size();
  for (std::vector<RankMask>* list : {&votes.absent, &votes.clean}) {
    for (RankMask& one : *list) {
      if (!in_branch(one.rank))
        return Broke(key, contributor, "a mask of a rank not in the branch");
      if (votes.signatures.size() > 1) continue;  // it will be refused whatever the masks say
      if (!FitsMask(one.mask, static_cast<int>(tensors))) {
        return Broke(key, contributor, "a mask beyond the last tensor");
      }
      // The length of FullMask, with which Submitters and ValidateRound compare it.
      one.mask.resize((tensors + 63) / 64, 0);
    }
  }
  for (const RankText& one : votes.failed) {
    if (!in_branch(one.rank))
      return Broke(key, contributor, "a failure of a rank not in the branch");
  }
  for (const RankRows& one : votes.rows) {
    if (!in_branch(one.rank)) return Broke(key, contributor, "rows of a rank not in the branch");
    const bool known = std::ranges::all_of(one.rows, [](int64_t rows) { return rows >= 0; });
    if (known && (one.rows.size() == tensors || votes.signatures.size() > 1)) continue;
    return Broke(key, contributor, "rows that do not fit the tensors");
  }
  for (const StepVotes& one : votes.steps) {
    if (votes.steps.size() > 1 && one.ranks.empty())
      return Broke(key, contributor, "step counts that do not say who reported them");
    if (!std::all_of(one.ranks.begin(), one.ranks.end(), in_branch))
      return Broke(key, contributor, "a step count of a rank not in the branch");
  }
  return {};
}

/// The first vote opens the round. A vote for the next use cannot come before the round is closed:
/// its sender has applied the decision on the last use, which this node applied before it forwarded
/// it. So a second vote is a protocol error.
Status VoteTally::EnterVote(Key& key, const SetState& set, int contributor,
                            const Signature& signature) {
  Round& round = key.round;
  if (round.sent) return Broke(key, contributor, "a vote after the key was sent");
  if (round.voted.Test(contributor)) return Broke(key, contributor, "a second vote");
  if (!set.Contributes(contributor)) return Broke(key, contributor, "a vote without a member");
  if (set.decided_at == SetState::DecidedAt::kBelow)
    return Broke(key, contributor, "a vote that is counted below");
  round.voted.Set(contributor);
  key.is_idle = false;
  if (round.votes++ > 0) return {};
  // Names of data collectives may change their kind from use to use.
  key.NameAfter(signature);
  if (IsWaitedFor(key)) ++open_rounds_;
  return {};
}

/// The steady state, without allocation: the first vote keeps a pointer, and each equal one sets a
/// bit. The first vote that differs turns the round into a record.
Status VoteTally::CountPlain(KeyId id, SetState& set, int contributor,
                             const CachedSignature* cached, const StepCount& step) {
  Key& key = node_.keys.At(id);
  FARANDOLE_RETURN_IF_ERROR(EnterVote(key, set, contributor, cached->signature));
  Round& round = key.round;
  if (round.votes == 1) {
    round.plain = cached;
    round.step = step;
  } else if (round.detailed || round.plain != cached || round.step != step) {
    KeyVotes& detail = round.Detail(key.name);
    SignatureVotes votes;
    votes.id = cached->id;
    AddVariant(detail.signatures, key, set, contributor, std::move(votes));
    if (step.step > 0) AddVariant(detail.steps, key, set, contributor, {step, {}});
  }
  CompleteIfAll(id, set);
  return {};
}

/// Lists of different contributors concern different ranks (Normalise), so they are appended here
/// and sorted once, when the round is complete. Absent ranks are entered before signatures, and
/// signatures before step counts, because AddVariant asks Submitters, which reads both.
Status VoteTally::CountRecord(KeyId id, SetState& set, int contributor, KeyVotes votes) {
  Key& key = node_.keys.At(id);
  FARANDOLE_RETURN_IF_ERROR(
      EnterVote(key, set, contributor, node_.keys.SignatureOf(votes.signatures.front())));
  KeyVotes& detail = key.round.Detail(key.name);
  Append(detail.absent, votes.absent);
  Append(detail.clean, votes.clean);
  Append(detail.failed, votes.failed);
  Append(detail.rows, votes.rows);
  for (SignatureVotes& one : votes.signatures) {
    AddVariant(detail.signatures, key, set, contributor, std::move(one));
  }
  for (StepVotes& one : votes.steps) {
    AddVariant(detail.steps, key, set, contributor, std::move(one));
  }
  CompleteIfAll(id, set);
  return {};
}

/// Who below `contributor` sent its one signature: its members without those that joined. A joined
/// rank is recognised by being absent from every tensor; a rank that voted so is left out too.
/// Where no rank remains all are named. O(ranks x absent ranks), in mixed rounds only.
std::vector<int32_t> VoteTally::Submitters(const Key& key, const SetState& set,
                                           int contributor) const {
  const KeyVotes& detail = *key.round.detail;
  const auto tensors =
      static_cast<int>(node_.keys.SignatureOf(detail.signatures.front()).tensors.size());
  const Mask full = FullMask(tensors);
  const auto& ranks = set.branches[static_cast<size_t>(contributor)].ranks;
  std::vector<int32_t> submitters;
  for (const int32_t rank : ranks) {
    const bool absent =
        std::any_of(detail.absent.begin(), detail.absent.end(),
                    [&](const RankMask& one) { return one.rank == rank && one.mask == full; });
    if (!absent) submitters.push_back(rank);
  }
  return submitters.empty() ? ranks : submitters;
}

/// Adds what `contributor` sent, a signature or a step count, to the different ones of the round.
/// While there is only one variant its `ranks` stay empty, so ranks that agree cost no list. The
/// second variant makes the round mixed: from then on each one lists its ranks.
template <class Variant>
void VoteTally::AddVariant(std::vector<Variant>& list, const Key& key, const SetState& set,
                           int contributor, Variant votes) {
  const auto same =
      std::find_if(list.begin(), list.end(), [&](const Variant& one) { return Same(one, votes); });
  const bool single = list.size() == 1 && list.front().ranks.empty();
  if (list.empty() || (single && same != list.end() && votes.ranks.empty())) {
    if (list.empty()) list.push_back(std::move(votes));
    return;
  }
  if (single) {  // the key turns mixed: say who sent the first one
    for (int c = 0; c < static_cast<int>(set.branches.size()); ++c) {
      // EnterVote has marked the contributor whose variant is being added.
      if (c == contributor || !key.round.voted.Test(c)) continue;
      for (const int32_t rank : Submitters(key, set, c)) list.front().ranks.push_back(rank);
    }
  }
  if (votes.ranks.empty()) votes.ranks = Submitters(key, set, contributor);
  if (same != list.end()) {
    Append(same->ranks, votes.ranks);
  } else {
    list.push_back(std::move(votes));
  }
}

/// O(1) while no branch has joined entirely, else O(branches). A recorded vote wins over a later
/// join: such a contributor is counted once, by its vote.
bool VoteTally::IsComplete(const Round& round, const SetState& set) const {
  if (round.votes == set.contributors) return true;
  if (set.joined == 0) return false;
  int32_t voted = round.votes;
  for (size_t c = 0; c < set.branches.size(); ++c) {
    const SetState::Branch& branch = set.branches[c];
    if (branch.ranks.empty() || round.voted.Test(static_cast<int>(c))) continue;
    if (!branch.AllJoined()) return false;
    ++voted;
  }
  return voted == set.contributors;
}

/// Members of joined branches that did not vote are absent from every tensor of the key. The absent
/// set is fixed here, when the round is complete, and travels with the vote. Rank 0 does not derive
/// it from who has joined when it decides, because ranks may have joined since.
void VoteTally::AddJoined(Key& key, const SetState& set) {
  if (set.joined == 0) return;
  Round& round = key.round;
  const size_t tensors =
      round.detailed ? node_.keys.SignatureOf(round.detail->signatures.front()).tensors.size()
                     : round.plain->signature.tensors.size();
  if (tensors == 0) return;
  for (size_t c = 0; c < set.branches.size(); ++c) {
    if (round.voted.Test(static_cast<int>(c))) continue;
    for (const int32_t rank : set.branches[c].ranks) {
      // Only now: where everybody who has joined had voted before, the id alone still says
      // everything.
      round.Detail(key.name).absent.push_back({rank, FullMask(static_cast<int>(tensors))});
    }
  }
}

/// A complete round takes no further vote until a decision closes it. Where it is decided its
/// detail stays for the Decider; elsewhere the next Votes message takes it away.
void VoteTally::CompleteIfAll(KeyId id, SetState& set) {
  Key& key = node_.keys.At(id);
  Round& round = key.round;
  if (!IsComplete(round, set)) return;
  AddJoined(key, set);
  round.sent = true;
  if (round.detailed) {
    // FindMask and CollectRows search by rank; ShortenRefused keeps the lowest ranks.
    SortByRank(round.detail->absent);
    SortByRank(round.detail->clean);
    SortByRank(round.detail->failed);
    SortByRank(round.detail->rows);
  }
  if (set.IsDecidedHere()) return complete_.push_back({id, nullptr});
  if (!round.detailed) {
    AddId(round.plain->id, round.step, up_);
    return;
  }
  ShortenRefused(*round.detail);
  up_bytes_ += TravelBytes(*round.detail);
  up_.keys.push_back(std::move(*round.detail));
  // A frame is bounded: this message gets no further record.
  if (up_bytes_ > kMessageBytes) SendVotes();
}

/// O(keys) for each Join. Keys that nobody below has submitted are left alone: above, a branch
/// whose members have all joined counts as having voted.
void VoteTally::CompleteAll() {
  for (KeyId id = 0; id < node_.keys.size(); ++id) {
    const Round& round = node_.keys.At(id).round;
    if (round.votes == 0 || round.sent) continue;
    CompleteIfAll(id, *node_.sets.Find(node_.keys.At(id).name.set));
  }
}

/// The votes that the join completes, and those complete before, go up ahead of it: above, a branch
/// that has joined is taken to have said everything.
Status VoteTally::Join(int rank) {
  if (node_.sets.Joined(rank)) {
    return Internal("protocol: rank " + std::to_string(rank) + " joined twice");
  }
  node_.sets.MarkJoined(rank);
  last_joined_ = rank;
  CompleteAll();
  if (node_.IsRoot()) return {};
  SendVotes();
  SendRank(UpType::kJoin, rank);
  return {};
}

/// Left will end the undecided keys of the rank's sets, so the votes that are complete here have to
/// be counted above before the Leave.
void VoteTally::SendLeave(const UpMessage& message) {
  SendVotes();
  node_.SendUp(message);
}

/// Where all members below have joined there may be no round at all, although others submitted the
/// key: the nodes above have counted the Joins. Any round with votes must have been sent.
Status VoteTally::CloseRound(Key& key, const SetState& set) {
  Round& round = key.round;
  const bool nobody = round.votes == 0 && set.joined == set.contributors;
  if (!round.sent && !nobody) {
    return Internal("protocol: " + Describe(key.name) + ": decided before it was complete");
  }
  if (round.votes > 0 && IsWaitedFor(key)) --open_rounds_;
  round.voted.Clear();
  round.votes = 0;
  round.sent = round.stalled = round.asked = round.detailed = false;
  round.plain = nullptr;
  round.detail = nullptr;  // a key that is not used again keeps no signature
  // Stalls of this round that are still on their way up are recognised by it.
  key.closed = set.last_number;
  return {};
}

/// All its keys are waited for: steps have no tensors.
bool VoteTally::CloseRound(KnownWork& work, const SetState& set) {
  if (!work.sent) return false;
  open_rounds_ -= static_cast<int64_t>(work.keys.size());
  work.voted.Clear();
  work.votes = 0;
  work.sent = false;
  work.own = 0;
  work.closed = set.last_number;
  return true;
}

/// Frees the memory too: the key is released next, or belongs to the global set, which has ended.
/// Votes that are in flight find no live set and are dropped.
void VoteTally::DropRound(Key& key) {
  if (key.round.votes > 0 && IsWaitedFor(key)) --open_rounds_;
  key.round = Round();
  key.closed = node_.last_number();
}

void VoteTally::SendVotes(int64_t number) {
  if (up_.ids.empty() && up_.keys.empty()) return;
  up_.type = UpType::kVotes;
  up_.number = number;
  node_.SendUp(up_);
  up_.ids.clear();
  up_.steps.clear();
  up_.keys.clear();
  up_bytes_ = 0;
}

void VoteTally::SendRank(UpType type, int rank) {
  UpMessage message;
  message.type = type;
  message.rank = rank;
  node_.SendUp(message);
}

}  // namespace farandole
