// Reports to the other ranks in which step of its optimizer this rank is, without waiting for them.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "coordinator/engine/lifecycle.h"
#include "coordinator/engine/operation_registry.h"
#include "coordinator/engine/submission_queue.h"

namespace farandole {

/// One announcement of a (set, prefix) is in flight at a time; those that follow wait in order, so
/// that all ranks make equally many. Thread safety: any thread.
class StepAnnouncer {
 public:
  StepAnnouncer(Lifecycle& lifecycle, OperationRegistry& operations, SubmissionQueue& submissions)
      : lifecycle_(lifecycle), operations_(operations), submissions_(submissions) {}

  /// See Engine::AnnounceStep.
  /// @param notify  Wakes the engine; false: it goes with what this rank submits next. Before a
  /// thread waits everything is sent, so ranks whose steps differ find out all the same.
  Status Announce(uint32_t set, const std::string& prefix, const StepCount& step, bool notify);
  /// After the end of an announcement: starts the one that waits for it, if any.
  void StartLater(Operation& operation);

 private:
  Status Start(Operation& operation, const StepCount& step, uint32_t version, bool notify);

  Lifecycle& lifecycle_;
  OperationRegistry& operations_;
  SubmissionQueue& submissions_;
  std::mutex mutex_;  // of Operation::later_steps
};

}  // namespace farandole
