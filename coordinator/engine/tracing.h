// What the engine writes into the timeline, in Horovod's words.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/engine/operation_registry.h"
#include "core/timeline.h"

namespace farandole {

/// Thread safety: the holder of the engine lock. Lifetime: `timeline` (nullptr: there is none)
/// outlives it.
class Tracing {
 public:
  explicit Tracing(Timeline* timeline) : timeline_(timeline) {}

  /// Whether anybody reads what the functions below write; they need it.
  bool on() const { return timeline_ != nullptr && timeline_->on(); }
  /// The negotiation of this rank's operations in `work` ends.
  void OnDecision(const WorkDecision& work, const OperationRegistry& operations, int64_t now_ns);
  /// All batches of the operation are done, or launched.
  void OnOperationDone(Operation& operation, int64_t now_ns);
  void OnBatchDone(const Batch& batch, int64_t began_ns, int64_t now_ns);
  void OnStalls(const std::vector<StallFacts>& stalls, int64_t now_ns);

 private:
  void AddSpan(Operation& operation, const char* what, int64_t begin_ns, int64_t now_ns);

  Timeline* const timeline_;
};

}  // namespace farandole
