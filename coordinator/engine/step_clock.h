// Where the time of this rank's steps goes, as the thread measures it that trains.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "coordinator/protocol/messages.h"

namespace farandole {

/// What the engine cannot see; frontends note it. Input is the calling thread's, collections are
/// the process's. Thread safety: any thread.
enum class TimeOf : uint8_t { kInput, kGarbageCollection };
void NoteTime(TimeOf what, int64_t ns);

/// How long the calling thread has been blocked in waits for operations, of any engine, ever. The
/// data that they move is part of it: that takes equally long on all ranks of a step.
int64_t& BlockedNs();

/// Counts the steps of one engine. Thread safety: any thread.
class StepClock {
 public:
  /// The calling thread has ended a step, at the same point of each.
  /// @return what it took since this thread ended the one before; nullopt: it has ended none.
  std::optional<StepTimes> End(int32_t rank, int joins, int64_t now_ns);

 private:
  std::mutex mutex_;
  int64_t steps_ = 0;
  int joins_ = 0;        // before the last one
  uint64_t thread_ = 0;  // that ended the last one
  StepTimes total_;      // then: the time, and what that thread and process had spent
};

}  // namespace farandole
