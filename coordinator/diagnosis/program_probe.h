// What this rank's program does while another rank waits for it, as its language's runtime tells.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "core/clock.h"

namespace farandole {

/// As farandole_describe (bindings/c/farandole.h).
using DescribeProgram = void (*)(const uint64_t* threads, size_t count, char* text,
                                 size_t capacity);

/// How every engine of this process learns it; nullptr: from nobody. Returns when no call of the
/// former one is in flight any more. Any thread.
void SetDescribeProgram(DescribeProgram describe);

/// Asks on a thread of its own, which is there for one call, so that an interpreter whose lock
/// somebody keeps holds up nobody; it costs nothing before the first call.
///
/// Thread safety: none. Invariant: at most one call of an engine is in flight. Lifetime: the thread
/// may outlive the probe.
class ProgramProbe {
 public:
  /// Begins to find out what these threads do (numbers as pthread_self gives them), unless that has
  /// begun just now. @return false if nobody can tell.
  bool Ask(std::vector<uint64_t> threads, int64_t now_ns);
  /// Of the last Ask; nullopt: not known yet. A call that has been seen running and does not come
  /// back within 300 ms cannot get the interpreter's lock: kBlockedInC.
  std::optional<Activity> Find(int64_t now_ns);

 private:
  struct Call {
    std::atomic<bool> has_begun{false};
    std::atomic<bool> is_done{false};
    std::array<char, 2048> text{};  // once it is done
  };
  static void Run(Call& call, const std::vector<uint64_t>& threads);

  std::shared_ptr<Call> call_;
  int64_t asked_ns_ = 0;
  int64_t begun_ns_ = kNever;  // its call has been seen running
};

}  // namespace farandole
