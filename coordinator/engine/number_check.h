// Looks for nan and infinity in what this rank contributes, before a sum hides where they are from.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "coordinator/engine/operation.h"
#include "core/config.h"
#include "core/log.h"

namespace farandole {

/// Checks allreduces and reducescatters of tensors on the CPU on the thread that starts them: only
/// before a rank votes can a key still be refused for all ranks.
///
/// Thread safety: any thread. Lifetime: the log outlives it.
class NumberCheck {
 public:
  NumberCheck(NanCheck mode, int rank, Log& log) : mode_(mode), rank_(rank), log_(log) {}

  bool is_on() const { return mode_ != NanCheck::kOff; }
  /// By the thread that has taken `operation`. `in` has an address for each tensor that is present.
  /// @return why the operation is to be refused; empty: it is not. With kWarn it logs instead: the
  /// first such tensor of the operation, at its 1st, 2nd, 4th, 8th, ... time.
  std::string Check(const Operation& operation, std::span<const void* const> in, const Vote& vote);

 private:
  void Warn(const std::string& name, const std::string& text);
  void WarnOfGpu();

  const NanCheck mode_;
  const int rank_;
  Log& log_;
  std::mutex mutex_;
  std::map<std::string, uint64_t> times_;  // by operation and tensor
  bool has_warned_of_gpu_ = false;
};

}  // namespace farandole
