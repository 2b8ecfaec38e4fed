// Where the time of this rank's steps goes, as the thread measures it that trains.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "coordinator/protocol/messages.h"
#include "core/net/send_meter.h"

namespace farandole {

/// What the engine cannot see; frontends note it. Input is the calling thread's, collections are
/// the process's. Thread safety: any thread.
enum class TimeOf : uint8_t { kInput, kGarbageCollection };
void NoteTime(TimeOf what, int64_t ns);

/// Counts the steps of one engine. Thread safety: any thread.
class StepClock {
 public:
  /// The calling thread was blocked for so long in a wait for an operation of this engine. The data
  /// that it moved is part of it: that takes equally long on all ranks of a step. What is not of
  /// all ranks, or of another engine, keeps the thread from them.
  void NoteWait(bool is_of_all_ranks, int64_t ns);
  /// The calling thread has ended a step, at the same point of each. `link`: LinkUse, ever.
  /// @return what it took since this thread ended the one before; nullopt: it has ended none.
  std::optional<StepTimes> End(int32_t rank, int joins, const LinkUse& link, int64_t now_ns);

 private:
  std::mutex mutex_;
  int64_t steps_ = 0;
  int joins_ = 0;                       // before the last one
  std::atomic<uint64_t> thread_ = 0;    // that ended the last one
  std::atomic<int64_t> waited_ns_ = 0;  // by it, for operations of all ranks
  StepTimes total_;  // then: the time, and what that thread and process had spent
};

}  // namespace farandole
