// Divergence: ranks that wait for different operations, so that none of them can ever go on.
// Nothing agreed changes.
//
// Thread safety: none; one holder of the engine lock at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/decider.h"
#include "coordinator/protocol/node_state.h"
#include "core/clock.h"

namespace farandole {

/// Of ranks that wait, those that can never go on: the greatest set D of ranks that may not go on
/// in which, for each key of each rank of D, a rank of D is missing. A rank of D submits nothing
/// before one of its keys is decided, and each of those waits for a submission of D; so none is
/// ever decided. Who is not in `waiting` may still submit.
/// @param waiting     Each rank once.
/// @param is_awaited  Whether a key needs this rank's submission: it is a member, and has not
/// joined.
/// @return the positions in `waiting` of what remains.
/// Source: the AND-OR model of E. Knapp, "Deadlock detection in distributed databases", ACM
/// Computing Surveys 19(4):303-328, 1987; stable, so that answers of different times will do.
std::vector<size_t> CannotGoOn(
    std::span<const WaitingRanks> waiting,
    const std::function<bool(const KeyName& key, int32_t rank)>& is_awaited);

/// Of ranks that submit in the same order, those that did not: each of two has a key pending that
/// the other one has not submitted, which either should have submitted first.
/// @return as CannotGoOn.
std::vector<size_t> OutOfOrder(std::span<const WaitingRanks> waiting);

/// ranks wait for different operations, and none can go on: rank 0 waits for allreduce "a"; ...
/// If more than half of the ranks wait for the same, the others are called the odd ones out.
/// @param diverged  At least one, which one of the above gave, with keys as the user knows them.
/// @param were_run  All these operations have been run before.
/// @param others    Ranks that these operations need, too, but that are not stuck yet.
std::string DescribeDivergence(const std::vector<WaitingRanks>& diverged, bool were_run,
                               const std::vector<int32_t>& others = {});

/// A rank whose threads all wait says so (Blocked); rank 0 then asks all ranks what they wait for.
/// The question travels with the decisions and the answers with the votes, so that answers are
/// given after what was decided before, and votes counted before the answer that follows them.
/// When ranks have diverged, it asks once more, for their places in their programs as well; an
/// answer then says what was pending when the question came, and waits for the place. Where threads
/// that have made no call may yet submit something, it asks once more after a second.
///
/// Invariant: one question at a time. Whoever blocks last asks for one that finds all others
/// blocked.
class Divergence final : public NegotiationObserver {
 public:
  Divergence(NodeState& node, Decider& decider, DetectorListener& listener)
      : node_(node), decider_(decider), listener_(listener) {}
  Divergence(const Divergence&) = delete;
  Divergence& operator=(const Divergence&) = delete;

  void OnSubmitted(KeyId id) override;
  Status ReceiveUp(int child, const UpMessage& message) override;
  Status ReceiveDown(const DownMessage& message) override;
  /// Says that this rank is blocked, and asks the ranks, when it is time.
  int64_t Tick() override;
  int64_t due_ns() const override;

 private:
  void ReceiveBlocked();
  Status ReceiveWaits(int child, const UpMessage& message);
  void CloseAnswered();
  void LookWhetherBlocked();
  void AskIfDue();
  std::optional<WaitingRanks> Own() const;
  void FindWhere();
  void Add(const WaitingRanks& waiting);
  void Judge();
  bool Persists(const std::vector<WaitingRanks>& diverged);
  int64_t LastDecision(const std::vector<WaitingRanks>& waiting);

  NodeState& node_;
  Decider& decider_;
  DetectorListener& listener_;

  int64_t check_ns_ = kNever;  // when this rank looks whether it is blocked
  int64_t interval_ns_ = 0;    // to the check after that
  int64_t submit_ns_ = 0;      // of the last submission

  bool was_asked_for_ = false;  // since the last question
  int64_t next_ask_ns_ = 0;     // rank 0; not before
  bool has_found_ = false;      // rank 0; by the last answers: the next question asks for places
  std::vector<WaitingRanks> found_;  // then, if all of them wait
  int64_t found_decision_ = 0;       // number of the last one about their keys

  int64_t number_ = 0;               // of the question that is open here; 0: none
  size_t awaited_ = 0;               // children that have not answered
  std::vector<bool> answered_;       // by child
  std::optional<WaitingRanks> own_;  // its place is being looked for
  int64_t place_due_ns_ = kNever;    // not longer than that
  std::vector<WaitingRanks> waiting_;
};

}  // namespace farandole
