// What the engine writes into the timeline, in Horovod's words, and into the flight recorder.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/engine/operation_registry.h"
#include "core/flight_recorder.h"
#include "core/timeline.h"

namespace farandole {

/// Thread safety: the holder of the engine lock. Lifetime: `timeline` and `recorder` (nullptr:
/// there is none) outlive it.
class Tracing {
 public:
  Tracing(Timeline* timeline, FlightRecorder* recorder)
      : timeline_(timeline), recorder_(recorder) {}

  void OnSubmitted(Operation& operation, int64_t now_ns);
  /// The negotiation of this rank's operations in `work` ends.
  void OnDecision(const WorkDecision& work, const OperationRegistry& operations, int64_t now_ns);
  /// All batches of the operation are done, or launched.
  void OnOperationDone(Operation& operation, int64_t now_ns);
  /// Its request has ended, with `status`.
  void OnFinished(const Operation& operation, const Status& status, int64_t now_ns);
  /// The engine's final error is known; nothing has ended by it yet.
  void OnFailed(const Status& error, int64_t now_ns);
  void OnBatchDone(const Batch& batch, int64_t began_ns, int64_t now_ns);
  /// @param is_news  They are reported now, and not only seen again.
  void OnStalls(const std::vector<StallFacts>& stalls, bool is_news, int64_t now_ns);
  /// Each rank that reads of a stall writes its file, so that all of them together explain it.
  void OnStallReported();

 private:
  bool on() const { return timeline_ != nullptr && timeline_->on(); }
  void AddSpan(Operation& operation, const char* what, int64_t begin_ns, int64_t now_ns);

  Timeline* const timeline_;
  FlightRecorder* const recorder_;
};

}  // namespace farandole
