// Which optimizers ranks wrap, and in which order.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/engine/engine.h"

namespace farandole {

/// What a mismatch of the wraps ends with.
inline constexpr const char* kWrapAlike =
    ": every rank must wrap the same optimizers, with the same parameters, in the same order";

/// What the names of the gradients of optimizer `number` begin with.
std::string GradientPrefix(int32_t number);
/// Waits for `work`, if there is any, until `deadline_ns`. @return whether it is done.
bool WaitUntil(Engine& engine, const std::shared_ptr<Work>& work, int64_t deadline_ns);
/// The time in `timeout_ns` (< 0: never).
int64_t DeadlineIn(int64_t timeout_ns);

/// Compares which optimizers ranks wrap, in their order of wrapping.
///
/// Gradients are named by the number of their optimizer. Ranks that wrap in another order would
/// wait for gradients of other names until somebody reads the stall report, so each wrap starts one
/// operation without data, whose tensors' names tell what is wrapped. Wrapping waits for nobody;
/// the first round of an optimizer waits for the outcomes up to its own number.
/// Thread safety: any thread. Lifetime: the engine outlives it.
class WrapComparison {
 public:
  explicit WrapComparison(Engine& engine) : engine_(engine) {}

  /// The next optimizer of the set is wrapped. @param labels  What must be equal on all ranks.
  /// @return its number, from 0.
  int32_t Add(uint32_t set, const std::vector<std::string>& labels);
  int32_t count(uint32_t set) const;
  /// Waits until all ranks have wrapped the optimizers 0 to `number`, and compares them.
  /// @return false while it goes on after `timeout_ns` (< 0: no limit); else sets `*outcome`:
  /// Mismatch if ranks differ, now and at every later call; the engine's error.
  bool Wait(uint32_t set, int32_t number, int64_t timeout_ns, Status* outcome);

 private:
  struct Wrap {
    std::shared_ptr<Work> work;  // nullptr: `outcome` is final, an error
    Status outcome;
  };

  struct Wraps {
    int32_t alike = 0;  // so many, from the first, are on all ranks
    std::deque<Wrap> others;
    int32_t count() const { return alike + static_cast<int32_t>(others.size()); }
  };

  Engine& engine_;
  mutable std::mutex mutex_;
  std::map<uint32_t, Wraps> wraps_;  // by set
};

}  // namespace farandole
