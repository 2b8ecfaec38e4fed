// Stalls: who waits for whom, asked of every member and reported by the node that decides for the
// set. Nothing agreed changes.
//
// Thread safety: none; one holder of the engine lock at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/decider.h"
#include "coordinator/protocol/node_state.h"
#include "core/clock.h"

namespace farandole {

/// A key that waits too long goes up as a Stall, to where its set is decided for; there `decider`
/// sends a query about it down; the answers come up, added together on the way; what stalls at
/// about the same time is gathered into one report, and the job ends over what has waited longer
/// than stall_shutdown_ns. A rank whose own Stall nobody above asks about says so by itself, and
/// ends the job when it has waited so long.
///
/// Invariant: a query is closed once, when all branches asked have answered or at its deadline.
class StallMonitor final : public NegotiationObserver {
 public:
  StallMonitor(NodeState& node, Decider& decider, DetectorListener& listener)
      : node_(node), decider_(decider), listener_(listener) {}
  StallMonitor(const StallMonitor&) = delete;
  StallMonitor& operator=(const StallMonitor&) = delete;

  void OnSubmitted(KeyId id) override;
  void OnSetEnded(const SetState& set) override;
  void OnKeyReleased(KeyId id) override;
  Status ReceiveUp(int child, const UpMessage& message) override;
  Status ReceiveDown(const DownMessage& message) override;
  int64_t Tick() override;
  int64_t due_ns() const override { return kNever; }
  bool Knows(KeyId id) const override;
  bool Busy() const override { return !queries_.empty() || !stalled_.empty(); }

 private:
  struct Query {
    int64_t number = 0;
    KeyId key = 0;
    int64_t deadline_ns = kNever;
    int64_t own_due_ns = kNever;  // this rank answers by then; kNever: it has answered
    int32_t awaited = 0;          // branches that have not answered
    std::vector<bool> answered;   // by contributor
    std::vector<Answer> answers;
  };
  /// Of sets decided here: a key for which some rank waits.
  struct Stalled {
    KeyId key = 0;
    int64_t closed = 0;    // Key::closed at that time; another number ends the stall
    int64_t since_ns = 0;  // about when the first rank submitted it
    int64_t next_ns = 0;   // of the next query; kNever while one runs
  };

  Status ReceiveStall(const UpMessage& message);
  Status ReceiveAnswers(int child, const UpMessage& message);
  Status ReceiveQuery(const DownMessage& message);
  void AskAbout(KeyId id);
  void Report(const std::vector<std::string>& lines, const std::set<int32_t>& ranks);
  void Read(const DownMessage& report);
  void ReportOwnStalls();
  void ForgetHeard();
  void ReportUnheard();
  bool IsOpen(const Stalled& stalled) const;
  void AskStalled();
  int64_t NextReport() const;
  void ReportStalls();
  void ShutDownFor(const std::vector<StallFacts>& stalls);
  Status ShutdownError(const std::string& stalls, FailureFacts facts = {}) const;
  StallFacts FactsOf(const Query& query) const;
  void Stall(KeyId id);
  Answer OwnAnswer(const Key& key) const;
  bool AsksActivity(const Key& key);
  void AnswerOwn();
  void CloseQuery(Query query);
  void CloseQueries(bool expired_only);
  void Publish(const Query& query);

  NodeState& node_;
  Decider& decider_;
  DetectorListener& listener_;
  int64_t next_scan_ns_ = kNever;
  KeyId last_key_ = 0;          // of this rank's last submission
  std::string last_submitted_;  // as text, if that key is released
  int64_t last_submit_ns_ = -1;
  std::deque<Query> queries_;

  /// This rank's stalls that have gone up, with Key::closed at that time, and nobody has asked
  /// about yet; oldest first.
  std::vector<std::pair<KeyId, int64_t>> unheard_;
  int64_t unheard_ns_ = kNever;  // when that is said next; kNever if there are none

  std::vector<Stalled> stalled_;
  std::vector<std::pair<Stalled, StallFacts>> gathered_;  // of the next report
  int64_t report_ns_ = kNever;                            // its time
};

}  // namespace farandole
