// What one engine did when, as a file that chrome://tracing and ui.perfetto.dev show.
//
// Chrome's JSON array format (the "Trace Event Format"), with Horovod's names: one track per
// tensor, such as allreduce.weight, with a span NEGOTIATE_ALLREDUCE from its submission to the
// decision and a span ALLREDUCE from there to its end.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/clock.h"
#include "core/status.h"

namespace farandole {

/// A JSON string (RFC 8259, section 7). Bytes above 0x7f are UTF-8 as they are.
/// @param in_ascii  They, and 0x7f, are read as Latin-1 and escaped instead: for text that may have
/// been cut inside a character.
std::string QuotedForJson(std::string_view text, bool in_ascii = false);

/// One line of the picture, from `begin_ns` to `end_ns` on the engine's clock.
struct TimelineSpan {
  uint32_t track = 0;     ///< Of NameTrack.
  const char* what = "";  ///< Static text.
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t number = -1;          ///< Of the decision; 0: agreed without one; -1: none.
  int64_t bytes = -1;           ///< -1: unknown.
  bool instant = false;         ///< A mark at begin_ns.
  std::string note = {};        ///< Free text; empty: none.
  uint32_t set = 0;             ///< Its uid; 0: all ranks.
  std::string_view dtype = {};  ///< Static text; empty: unknown.
};

/// Whose timeline it is. Its file says so, for a reader to tell which files belong together.
struct TimelineOwner {
  int rank = 0;
  int size = 1;
  std::string job = {};     ///< The launcher's name of it; empty: it has none.
  uint64_t generation = 1;  ///< Of an elastic job.
};

/// Off until Start; then spans gather in memory, and a thread writes them to the file, which is
/// valid JSON after each write. Nothing waits for that thread but Start and Stop, and those not for
/// long: a file system that does not answer keeps the thread and nobody else.
///
/// Thread safety: any thread; `on()` costs one relaxed load. Beyond kMost spans between two writes
/// further ones are counted, not kept.
class Timeline {
 public:
  static constexpr size_t kMost = size_t{1} << 17;

  /// @param clock  Of the spans.
  /// @param file_timeout_ns  How long Start and Stop wait for the file system.
  /// @param period_ns  From a span to its line in the file.
  Timeline(const Clock& clock, TimelineOwner owner, int64_t file_timeout_ns = 5 * kNsPerSecond,
           int64_t period_ns = 50 * kNsPerMs);
  /// Stops.
  ~Timeline();

  /// Opens a new file. `{rank}` in the path becomes the rank; without it rank 0 alone writes and
  /// other ranks do nothing. Starting the same file twice does nothing.
  /// @param marks_decisions  Marks every decision of rank 0 with an instant CYCLE_START.
  /// @return InvalidArgument if another file is being written; Unavailable with the system's text
  /// if the file cannot be opened, or not in time.
  Status Start(const std::string& path, bool marks_decisions);
  /// Writes what is left and closes. @return Unavailable if something could not be written, or not
  /// in time: what is left then follows when the file system answers.
  Status Stop();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool marks_decisions() const { return marks_decisions_.load(std::memory_order_relaxed); }
  /// A number for spans of this name; the same for the same name. Track 0 is the engine's own.
  uint32_t NameTrack(std::string_view name);
  void Add(const TimelineSpan& span);
  void AddInstant(const char* what, int64_t at_ns);

 private:
  struct Shared;
  class Writer;

  const Clock& clock_;
  const TimelineOwner owner_;
  const int64_t file_timeout_ns_;
  const int64_t period_ns_;
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_decisions_{false};
  const std::shared_ptr<Shared> shared_;  // with the thread that writes
};

}  // namespace farandole
