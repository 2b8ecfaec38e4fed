// Ranks that make the others wait, step after step, and why. Nothing agreed changes.
//
// Thread safety: none; one holder of the engine lock at a time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/diagnosis/detectors.h"
#include "coordinator/protocol/node_state.h"
#include "core/clock.h"

namespace farandole {

/// What takes longer on a rank than on the others; kNetwork: on all ranks of two hosts.
enum class LateBy : uint8_t {
  kComputing,
  kInput,
  kProcessor,
  kCollecting,
  kOtherGroups,
  kLink,
  kNetwork
};

struct LateRank {
  int32_t rank = 0;  ///< kNetwork: 0.
  LateBy cause = LateBy::kComputing;
  int64_t late_ns = 0;    ///< That the others wait for it, in a step.
  int64_t step_ns = 0;    ///< All of that step.
  int64_t longer_ns = 0;  ///< What the cause takes more than on the others.
  /// kLink, kNetwork: bytes a second that a connection of the rank carries, and one of the others.
  double rate = 0;
  double others_rate = 0;
};

/// 8 ms of 61 in each step: its input takes 9 ms longer than the others'
std::string Describe(const LateRank& late);

/// Compares steps of the same number. Who comes last waits least: all ranks begin a step together,
/// with the end of the one before, and all get the same data when the last one has come. So a rank
/// is late by as much as its thread is blocked for less time than the others' are, whichever of its
/// operations that delays, and no clocks are compared. It is called late when over kSteps steps
/// that is more than a twentieth of their time and far beyond chance: many times its own standard
/// error, for which the least and the greatest of them are left out and the steps before them
/// count, too.
///
/// For a slow link all ranks wait, each for as long as the others. It is told by its rate, less
/// than half of the others', and named if what it carries takes that part of a step, in which its
/// rank waits, longer than on theirs. Two hosts have but one link, or two ends of it: it is named
/// if nobody is late, and in most steps all ranks wait for it for more than half of the time.
class LateSteps {
 public:
  static constexpr size_t kSteps = 10;

  explicit LateSteps(int ranks, bool has_two_hosts = false);
  /// Of any rank; those of one rank in order. @return who is late, once for each cause; of several
  /// that are found the latest one that was not named before.
  std::optional<LateRank> Add(const StepTimes& times);

 private:
  using Field = int64_t StepTimes::*;
  struct Row {
    int64_t step = 0;
    size_t known = 0;
    std::vector<StepTimes> times;  // by rank
    StepTimes medians = {};        // once all are known
    bool is_last = false;          // it is one of last_
  };

  Row& Find(int64_t step);
  void FindMedians(Row& row);
  void AddToSpread(const Row& before, const Row& row);
  int64_t LongerNs(const Row& row, size_t rank, Field field) const;
  int64_t MeanNs(size_t rank, Field field) const;
  std::optional<LateRank> JudgeRank(size_t rank) const;
  double FindRates();
  std::optional<LateRank> JudgeLink(size_t rank, double others_rate) const;
  std::optional<LateRank> JudgeNetwork() const;
  bool WaitsForAnother(const LateRank& found) const;
  std::optional<LateRank> Judge();
  int64_t StepNs() const;

  const size_t ranks_;
  const bool has_two_hosts_;
  std::vector<Row> rows_;        // used again and again, so that a step allocates nothing
  std::vector<Row*> last_;       // kSteps, of which all ranks are known; oldest first
  std::vector<int64_t> sorted_;  // for a median
  std::vector<double> spread_;   // of how late a rank is: its standard deviation, of the last steps
  int64_t spread_steps_ = 0;
  std::vector<double> rates_;         // of links, by rank, over last_: bytes a second; 0: unused
  std::vector<double> sorted_rates_;  // for a median
  std::vector<LateRank> found_;       // over last_
  std::set<std::pair<int32_t, LateBy>> named_;
};

/// Each rank's step times go up with what it submits next; rank 0 compares them.
class LateRanks final : public NegotiationObserver {
 public:
  LateRanks(NodeState& node, DetectorListener& listener, size_t hosts);

  void OnSubmitted(KeyId) override;
  Status ReceiveUp(int child, const UpMessage& message) override;
  Status ReceiveDown(const DownMessage&) override { return {}; }
  int64_t Tick() override { return kNever; }
  int64_t due_ns() const override { return kNever; }

 private:
  void Take(const StepTimes& times);

  NodeState& node_;
  DetectorListener& listener_;
  LateSteps steps_;  // rank 0
  UpMessage next_;   // below it: what children have sent, and this rank's own
};

}  // namespace farandole
