// The negotiation's inside: one node of the tree (votes up, decisions down) and, on rank 0, the
// decider on top. Each group of functions has its own source file.
//
// Thread safety: none; one holder of the engine lock at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "coordinator/protocol/batching.h"
#include "coordinator/protocol/in_flight_batches.h"
#include "coordinator/protocol/negotiation.h"
#include "coordinator/protocol/process_sets.h"
#include "coordinator/protocol/signature_cache.h"
#include "coordinator/protocol/state.h"
#include "coordinator/protocol/validate.h"
#include "core/clock.h"

namespace farandole {

class Negotiation::Impl {
 public:
  Impl(NegotiationOptions options, NegotiationListener& listener);

  // negotiation.cc: what this rank does itself.
  Status Submit(KeyId id, const Signature& signature, const Vote& vote);
  Status Join();
  Status Leave();
  void BatchDone(int64_t number, int32_t index);
  void Flush();
  bool Busy() const;

  // vote_tally.cc: votes going up.
  Status ReceiveUp(int from, const UpMessage& message);

  // applier.cc: decisions going down.
  Status ReceiveDown(int from, const DownMessage& message);

  // stall_monitor.cc
  void SetTime(int64_t now_ns) { now_ns_ = now_ns; }
  int64_t Tick(int64_t now_ns);

  SignatureCache& keys() { return keys_; }
  const ProcessSets& sets() const { return sets_; }
  int64_t pending() const { return pending_; }
  int64_t last_number() const { return last_number_; }
  const Status& fault() const { return fault_; }
  TableSizes Sizes() const;

 private:
  bool Broken(BrokenRule rule) const { return (options_.broken_rules & rule) != 0; }
  bool IsRoot() const { return options_.rank == 0; }

  // negotiation.cc
  Status CheckSubmit(const Key& key, const SetState* set) const;
  void EndAtOnce(KeyId id, const Status& why);
  Status CheckRecord(const Key& key, const SetState& set, const Signature& signature,
                     const Vote& vote) const;
  KeyVotes OwnVotes(const Key& key, const CachedSignature* cached, const Signature& signature,
                    const Vote& vote) const;
  void Remember(Key& key, const CachedSignature* cached, const Signature& signature,
                const Vote& vote);
  std::string UnreportedFailure() const;

  // vote_tally.cc
  bool IsLate(uint32_t id, int64_t number) const;
  Status ReceiveVotes(int child, const UpMessage& message);
  Status CountIds(int contributor, std::span<const uint32_t> ids, const StepCount& step,
                  int64_t number);
  Status ReceiveRecord(int contributor, const KeyVotes& votes, int64_t number);
  Status Resolve(const KeyVotes& votes, KeyId* key) const;
  Status Normalise(const Key& key, const SetState& set, int contributor, KeyVotes& votes) const;
  Status CountPlain(KeyId id, SetState& set, int contributor, const CachedSignature* cached,
                    const StepCount& step);
  Status CountRecord(KeyId id, SetState& set, int contributor, KeyVotes votes);
  Status EnterVote(Key& key, const SetState& set, int contributor, const Signature& signature);
  KeyVotes& Detail(Round& round, const Key& key);
  template <class Variant>
  void AddVariant(std::vector<Variant>& list, const Key& key, const SetState& set, int contributor,
                  Variant votes);
  std::vector<int32_t> Submitters(const Key& key, const SetState& set, int contributor) const;
  void AddJoined(Key& key, const SetState& set);
  bool IsComplete(const Round& round, const SetState& set) const;
  void CompleteIfAll(KeyId id, SetState& set);
  void CompleteAll();
  Status ReceiveJoin(int rank);
  void MarkJoin(int rank);
  void SendVotes() { SendVotes(last_number_); }
  void SendVotes(int64_t number);
  Status ReceiveLeave(int rank, const std::string& failure);
  void SendRank(UpType type, int rank, const std::string& text = {});
  const Signature& SignatureOf(const SignatureVotes& votes) const;

  // applier.cc
  Status Dispatch(const DownMessage& message);
  Status Apply(const DownMessage& message);
  Status ApplyWork(const DownMessage& message);
  Status ApplyItem(const WorkItem& item, SetState& set);
  Status ApplyKey(KeyId id, const Signature& signature, SetState& set,
                  const std::vector<RankMask>& absent, const Mask& skipped);
  Status CheckItem(const WorkItem& item, const SetState& set) const;
  Status CheckDecided(const Key& key, const Signature& signature, const SetState& set,
                      const std::vector<RankMask>& absent, const Mask& skipped) const;
  Status CheckOwnPart(const Key& key, const Signature& signature, const SetState& set,
                      const std::vector<RankMask>& absent, const Mask& skipped) const;
  Status CheckSetChange(const DownMessage& message) const;
  const Signature& OwnSignature(const Key& key) const;
  Status CheckNamedRank(const DownMessage& message) const;
  Status ApplyJoinDone(const DownMessage& message);
  Status ApplyRefusal(const DownMessage& message);
  Status ApplySetChange(const DownMessage& message);
  Status ApplyLeft(const DownMessage& message);
  Status CloseRound(Key& key, const SetState& set);
  Status EndOwn(const DownMessage& message, const Status& status);
  void EndSet(SetState& set, Status why);
  void EndKeys(const SetState& set);
  void ReleaseKeys();
  void ReleaseKey(KeyId id);
  bool TakePending(Key& key);
  void TrackBatches(const DownMessage& message, const SetState& set);
  void Forward(const DownMessage& message);
  void Notify(const DownMessage& message);
  WorkDecision Work(const DownMessage& message) const;

  // decider.cc: rank 0 only.
  struct Ready {
    KeyId key = 0;
    const CachedSignature* cached = nullptr;  // nullptr: the signature is in the round's detail
    FusionKey fusion_key;
    std::vector<RankMask> absent;
    Mask skipped;
    bool taken = false;
  };
  struct Queue {
    std::vector<Ready> ready;  // those before `head`, and the taken ones, are decided
    size_t head = 0;
    size_t waiting = 0;
    int64_t unfinished = 0;  // batches
    bool active = false;     // listed in active_
  };
  void OnReady(KeyId id, const SetState& set);
  void Enqueue(Ready ready, uint32_t set, DeviceKind device);
  void EndQueues(uint32_t set);
  void Decide();
  void DecideOutcomes();
  void DecideSetChanges();
  void DecideAddSet(KeyId id);
  void DecideRemoveSet(KeyId id);
  void DecideQueues();
  void DecideSet(const SetState& set);
  void DecideWork(uint32_t queue);
  void TakeReady(Queue& queue, size_t at);
  void TakeFusible(Queue& queue, size_t head);
  void AddToWork(const Ready& ready);
  WorkItem ItemOf(const Ready& ready);
  uint32_t IdFor(Key& key, const Signature& signature);
  uint32_t TakeId();
  void SplitForTest();
  void DecideLeaves();
  void DecideJoinDone();
  void Refuse(KeyId id, const Status& why);
  DownMessage& NewDecision(DownType type, uint32_t set);
  void BroadcastDecision();
  Status FreeBatch(int64_t number, int32_t index);
  uint32_t QueueOf(uint32_t set, DeviceKind device) const;

  // stall_monitor.cc
  struct Query {
    int64_t number = 0;
    KeyId key = 0;
    int64_t deadline_ns = kNever;
    int32_t awaited = 0;         // branches that have not answered
    std::vector<bool> answered;  // by contributor
    std::vector<Answer> answers;
  };
  /// Rank 0: a key for which some rank waits.
  struct Stalled {
    KeyId key = 0;
    int64_t closed = 0;    // Key::closed at that time; another number ends the stall
    int64_t since_ns = 0;  // about when the first rank submitted it
    int64_t next_ns = 0;   // of the next query; kNever while one runs
  };
  void ReportOwnStalls();
  bool IsOpen(const Stalled& stalled);
  void AskStalled();
  int64_t NextReport() const;
  void ReportStalls();
  void ShutDownFor(const std::vector<StallFacts>& stalls);
  StallFacts FactsOf(const Query& query) const;
  Status ReceiveStall(const UpMessage& message);
  void Stall(KeyId id);
  Status ApplyQuery(const DownMessage& message);
  Status ReceiveAnswers(int child, const UpMessage& message);
  Answer OwnAnswer(const Key& key) const;
  void CloseQuery(Query query);
  void CloseQueries(bool expired_only);
  void Publish(const Query& query);

  NegotiationOptions options_;  // without the tree, which sets_ has digested
  NegotiationListener& listener_;
  SignatureCache keys_;
  ProcessSets sets_;
  int64_t last_number_ = 0;
  bool left_ = false;    // Leave was called here
  int64_t pending_ = 0;  // own submissions
  int64_t open_rounds_ = 0;
  UpMessage up_;         // votes that have added up
  size_t up_bytes_ = 0;  // of its records, about
  UpMessage note_;       // every other message up
  Status fault_;         // an own decision that could not be applied

  // Of the decision being applied; they keep their capacity.
  std::vector<DecidedKey> decided_;
  std::vector<std::pair<KeyId, Status>> ended_;
  std::vector<std::pair<uint32_t, Status>> ended_sets_;
  std::vector<KeyId> released_;  // of the sets that it ended
  std::vector<BatchPlan> plans_;
  InFlightBatches reports_;       // batches this rank reports
  std::deque<DownMessage> late_;  // kForwardBeforeApply only
  bool held_join_ = false;        // kJoinWhenIdle only

  // Rank 0.
  DownMessage down_;
  size_t item_bytes_ = 0;  // of its items, about
  int64_t next_number_ = 0;
  uint32_t next_id_ = 0;
  std::vector<uint32_t> free_ids_;  // below next_id_: those of ended sets
  size_t id_bytes_ = 0;             // of the signatures that have one, about
  bool reported_full_ = false;
  std::vector<std::pair<KeyId, Outcome>> outcomes_;
  std::vector<KeyId> set_changes_;
  std::unordered_map<uint32_t, Queue> queues_;  // by set and device kind: QueueOf
  std::vector<uint32_t> active_;                // queues with something ready
  InFlightBatches unfinished_;
  std::vector<RankText> leaving_;
  std::vector<int32_t> left_ranks_;
  int last_joined_ = -1;

  // Stalls.
  int64_t now_ns_ = 0;
  int64_t next_scan_ns_ = kNever;
  KeyId last_key_ = 0;          // of this rank's last submission
  std::string last_submitted_;  // as text, if that key is released
  int64_t last_submit_ns_ = -1;
  std::deque<Query> queries_;
  std::vector<Stalled> stalled_;                          // rank 0
  std::vector<std::pair<Stalled, StallFacts>> gathered_;  // of the next report
  int64_t report_ns_ = kNever;                            // its time
};

}  // namespace farandole
