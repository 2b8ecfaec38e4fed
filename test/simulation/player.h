// One rank of a run: submits its part of the script, executes what it is handed, tells the oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/control/frame_coalescer.h"
#include "coordinator/diagnosis/detectors.h"
#include "coordinator/liveness/table.h"
#include "coordinator/protocol/batching.h"
#include "coordinator/protocol/negotiation.h"
#include "core/counters.h"
#include "core/transport.h"
#include "test/simulation/oracle.h"
#include "test/simulation/world.h"

namespace farandole::simulation {

/// The links of one rank; what arrives is set by the player.
class WorldTransport final : public Transport {
 public:
  WorldTransport(World& world, int rank) : world_(world), rank_(rank) {}
  void Put(const Incoming& incoming) { incoming_ = incoming; }

  int rank() const override { return rank_; }
  int size() const override { return world_.scenario().size; }
  const char* name() const override { return "world"; }
  Status Send(int to, std::span<const std::byte> data) override {
    world_.Send(rank_, to, {data.begin(), data.end()});
    return {};
  }
  Result<std::optional<Incoming>> Poll() override { return std::exchange(incoming_, {}); }
  int64_t PollAfterNs(bool, int64_t) const override { return kByDoorbell; }
  Result<std::vector<std::string>> Allgather(const std::string&, int64_t) override {
    return Unimplemented("allgather");
  }
  bool Drained() const override { return true; }

 private:
  World& world_;
  const int rank_;
  std::optional<Incoming> incoming_;
};

class Player final : public NegotiationListener, private DetectorListener {
 public:
  Player(World& world, int rank);

  /// Does the next thing the script wants, if anything can be done now.
  void Act();
  void Receive(int from, std::span<const std::byte> bytes);
  /// The transport reports that a peer has crashed.
  void Lose(int rank);
  void FinishBatch(int64_t number, int32_t index);
  bool shut_down() const { return shut_down_; }
  bool failed() const { return failed_; }
  std::string Describe() const;

  // NegotiationListener
  void SendUp(int parent, const UpMessage& message) override;
  void SendDown(int child, const DownMessage& message) override;
  void OnWork(const WorkDecision& work) override;
  void OnEnded(KeyId key, const Status& status) override;
  void OnSetAdded(const ProcessSetInfo& set) override;
  void OnSetEnded(uint32_t set, const Status& why) override;
  bool Holds(KeyId key) const override;
  bool IsBlocked() const override;
  void OnJoinDone(int last_rank) override;
  void OnLeft(int rank) override;
  void OnShutdown() override;
  void OnReport(const std::string& text) override;
  std::vector<std::string> OnStalls(const std::vector<StallFacts>& stalls, int64_t) override;
  void OnStallShutdown(const Status& error) override;

 private:
  enum class Progress : uint8_t { kWaiting, kSubmitted, kPassed };  // of one operation
  struct Waiting {                                                  // a batch that is queued here
    uint32_t set = kGlobalSet;
    int64_t number = 0;
    int32_t index = 0;
    std::vector<int> participants;
    std::vector<Submission*> owners;  // own submissions in it; nullptr: not this rank's
    int32_t reporter = -1;
    bool announced = false;
  };
  using QueueKey = std::pair<uint32_t, DeviceKind>;
  /// The operation that this rank waits for the others to agree on. What comes meanwhile waits.
  struct Agreeing {
    KeyId key = 0;
    Submission* submission = nullptr;
    Negotiation::Known known;
    std::vector<std::function<void()>> held;
  };

  const Op& OpAt(int op) const { return world_.scenario().ops[static_cast<size_t>(op)]; }
  bool Over(int op) const;
  bool Passes(int op);
  std::optional<uint32_t> UidOf(int logical_set) const;
  bool CanSubmit(int op);
  int Limit() const;
  void SkipPassed();
  void ActOnce();
  bool SubmitOne();
  void Submit(int op);
  void CastVote(KeyId key, const Submission& submission);
  bool Agrees(KeyId key, Submission& submission);
  void AnnounceStep();
  void Note(Agreement::State state);
  bool IsHeld(std::function<void()> what);
  void EndPhase();
  void LeaveNow();

  void AfterCall();
  void FailEverywhere(const Status& error);
  void Flush();
  void Tick();
  void ScheduleAct();
  void Check(const Status& status, const char* what);
  void CheckPlans(const WorkDecision& work, std::span<const BatchPlan> formed);
  void CheckRows(const WorkDecision& work, const DecidedKey& key, const Vote& vote);
  bool AllOver(int end) const;
  void QueueBatch(const WorkDecision& work, const BatchPlan& plan, int32_t index);
  void AnnounceHead(const QueueKey& queue);
  int DecidesFor(const std::vector<int>& ranks) const;
  std::vector<int> Participants(const WorkDecision& work, const BatchPlan& plan,
                                const std::vector<Submission*>& owners) const;
  void CountRecords(int to, const KeyName& key, const Signature& signature);

  World& world_;
  const int rank_;
  Negotiation negotiation_;
  std::vector<std::byte> bytes_;
  WorldTransport transport_;
  Counters counters_;
  LivenessTable liveness_;
  FrameCoalescer coalescer_;

  std::vector<Progress> progress_;  // by operation
  int head_ = 0;                    // all operations before it are submitted or passed
  int phase_ = 0;
  bool joined_ = false;     // waits for JoinDone
  bool absent_ = false;     // as the negotiation should see it; outlasts a join that is void
  bool join_void_ = false;  // the global set has ended
  bool left_ = false;
  bool shut_down_ = false;
  bool failed_ = false;  // with a final error
  Status agreed_error_;  // rank 0 has decided that all fail
  bool act_scheduled_ = false;
  bool acting_ = false;
  bool flush_scheduled_ = false;
  int64_t tick_at_ = INT64_MAX;
  std::map<uint32_t, int> logical_;         // uid -> logical set
  std::map<KeyId, Submission*> pending_;    // as the negotiation should see it
  std::map<int, Submission*> submissions_;  // by operation
  std::optional<int32_t> reporter_;         // while BatchDone is in flight: who has to report
  bool reported_ = false;
  std::map<QueueKey, std::deque<Waiting>> queues_;
  std::vector<BatchPlan> plans_;
  std::map<uint32_t, Agreement> agreements_;  // by set
  std::map<uint32_t, int64_t> agreed_;        // works
  std::optional<Agreeing> agreeing_;
  bool has_announced_ = false;  // a step, for which nobody waits
};

}  // namespace farandole::simulation
