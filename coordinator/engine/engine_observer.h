// What looks on at an engine: it is told what becomes of this rank's operations.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "coordinator/engine/engine_options.h"
#include "coordinator/engine/operation_registry.h"
#include "core/status.h"
#include "ops/data_plane.h"

namespace farandole {

struct StallFacts;

/// Overrides what it wants to know. Times are on the engine's clock, that of the present iteration.
///
/// Thread safety: called by the holder of the engine lock, except where another thread is named.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  /// Enters itself into the lists of what it overrides.
  virtual void Observe(EngineObservers& lists) = 0;
  /// By the thread that starts `operation` and has claimed it; concurrently for several. `in` has
  /// an address for each tensor that is present.
  /// @return why it is to be refused, on all ranks; empty: it is not.
  virtual std::string Refuse(const Operation&, std::span<const void* const> /*in*/, const Vote&) {
    return {};
  }
  virtual void OnSubmitted(Operation&, int64_t /*now_ns*/) {}
  /// The negotiation of this rank's operations in `work` ends.
  virtual void OnDecided(const WorkDecision&, const OperationRegistry&, int64_t /*now_ns*/) {}
  virtual void OnBatchDone(const Batch&, int64_t /*began_ns*/, int64_t /*now_ns*/) {}
  /// All batches of the operation are done, or launched.
  virtual void OnDone(Operation&, int64_t /*now_ns*/) {}
  /// Its request has ended, in whichever way.
  virtual void OnFinished(const Operation&, const Status&, int64_t /*now_ns*/) {}
  /// The engine's final error is known; nothing has ended by it yet.
  virtual void OnFailed(const Status&, int64_t /*now_ns*/) {}
  /// The same, by the watchdog's thread: the holder of the engine lock is stuck in a library.
  virtual void OnStuck(const Status&) {}
  /// What has stalled, where it was noticed. `is_news`: it is reported now, and not only seen
  /// again.
  virtual void OnStalls(const std::vector<StallFacts>&, bool /*is_news*/, int64_t /*now_ns*/) {}
  /// By the thread that has ended a step.
  virtual void OnStep(const StepTimes&) {}
  /// Each rank that reads of a stall; or the one that has missed a report.
  virtual void OnStallReported() {}
};

}  // namespace farandole
