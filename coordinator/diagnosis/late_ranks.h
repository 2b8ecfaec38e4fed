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

/// What takes longer on a rank than on the others.
enum class LateBy : uint8_t { kComputing, kInput, kProcessor, kCollecting };

struct LateRank {
  int32_t rank = 0;
  LateBy cause = LateBy::kComputing;
  int64_t late_ns = 0;    ///< That the others wait for it, in a step.
  int64_t step_ns = 0;    ///< All of that step.
  int64_t longer_ns = 0;  ///< What the cause takes more than on the others.
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
class LateSteps {
 public:
  static constexpr size_t kSteps = 10;

  explicit LateSteps(int ranks);
  /// Of any rank; those of one rank in order. @return who is late, once for each cause.
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
  std::optional<LateRank> Judge(size_t rank) const;

  const size_t ranks_;
  std::vector<Row> rows_;        // used again and again, so that a step allocates nothing
  std::vector<Row*> last_;       // kSteps, of which all ranks are known; oldest first
  std::vector<int64_t> sorted_;  // for a median
  std::vector<double> spread_;   // of how late a rank is: its standard deviation, of the last steps
  int64_t spread_steps_ = 0;
  std::set<std::pair<int32_t, LateBy>> named_;
};

/// Each rank's step times go up with what it submits next; rank 0 compares them.
class LateRanks final : public NegotiationObserver {
 public:
  LateRanks(NodeState& node, DetectorListener& listener)
      : node_(node), listener_(listener), steps_(node.IsRoot() ? node.options.size : 0) {}

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
