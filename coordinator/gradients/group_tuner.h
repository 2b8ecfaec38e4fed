// How large groups of gradients are best for a model on these ranks: tried while it trains.
//
// Pure: no clock, no thread, no messages. GradientRound measures the steps, and agrees on the
// groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace farandole {

/// First each size of a grid is tried kSweeps times, in turn, so that what changes in the job
/// meanwhile concerns all of them; then the best and the default kPairs times, in turn. The best
/// is kept if it wins all of these pairs but one, and its steps take at least kLeastGain less;
/// else the default is. Each trial is of kRounds steps and counts as their median, without the
/// first kSettling: the protocol has known the groups for so long when they cost least.
/// Thread safety: none.
class GroupTuner {
 public:
  static constexpr size_t kSweeps = 3, kPairs = 7, kRounds = 10, kSettling = 3;
  static constexpr size_t kLeastSteps = 2 * kSettling;  ///< Of a trial in which rounds failed.
  static constexpr double kLeastGain = 0.02;

  /// @param default_bytes  One of the sizes, and the one to be compared with.
  explicit GroupTuner(int64_t default_bytes);

  /// The sizes, ascending.
  static std::vector<int64_t> Sizes(int64_t default_bytes);
  /// A step with the size in use has taken so long.
  void AddStep(int64_t ns) { steps_ns_.push_back(ns); }
  /// @return the size for the next kRounds steps, or for all if is_done(). If there were fewer than
  /// kLeastSteps since the last call it is the same one once more.
  int64_t Next();
  bool is_done() const { return is_done_; }
  /// What was found and what it brings, once it is done, in a line.
  std::string Describe() const;
  /// All that was measured, and the setting that was found, as a file that a shell can read.
  std::string Report() const;

 private:
  struct Trials {
    int64_t bytes = 0;
    std::vector<int64_t> ns;  // medians, in the order of the trials
  };

  Trials& InUse();
  void Finish();
  bool IsClearlyBetter() const;

  std::vector<Trials> sizes_;
  size_t default_ = 0;  // of sizes_
  size_t best_ = 0;     // of sizes_: once all sweeps are over
  size_t trials_ = 0;   // that are over
  std::vector<int64_t> steps_ns_;
  bool is_done_ = false;
};

}  // namespace farandole
