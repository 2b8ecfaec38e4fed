// What one engine did when, as a file that chrome://tracing and ui.perfetto.dev show.
//
// Chrome's JSON array format (the "Trace Event Format"), with Horovod's names: one track per
// tensor, such as allreduce.weight, with a span NEGOTIATE_ALLREDUCE from its submission to the
// decision and a span ALLREDUCE from there to its end.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.h"
#include "core/status.h"

namespace farandole {

/// One line of the picture, from `begin_ns` to `end_ns` on the engine's clock.
struct TimelineSpan {
  uint32_t track = 0;     ///< Of NameTrack.
  const char* what = "";  ///< Static text.
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  int64_t number = -1;    ///< Of the decision; -1: none.
  int64_t bytes = -1;     ///< -1: unknown.
  bool instant = false;   ///< A mark at begin_ns.
  std::string note = {};  ///< Free text; empty: none.
};

/// Off until Start; then spans gather in memory and Flush writes them. The file is valid JSON after
/// every Flush.
///
/// Thread safety: any thread; `on()` costs one relaxed load. Beyond kMost spans between two flushes
/// further ones are counted, not kept. Lifetime: the clock outlives it.
class Timeline {
 public:
  static constexpr size_t kMost = size_t{1} << 17;

  Timeline(const Clock& clock, int rank);
  /// Stops.
  ~Timeline();

  /// Opens a new file. `{rank}` in the path becomes the rank; without it rank 0 alone writes and
  /// other ranks do nothing. Starting the same file twice does nothing.
  /// @param marks_decisions  Marks every decision of rank 0 with an instant CYCLE_START.
  /// @return InvalidArgument if another file is being written; Unavailable with the system's text
  /// if the file cannot be opened.
  Status Start(const std::string& path, bool marks_decisions);
  /// Writes what is left and closes. @return Unavailable if something could not be written.
  Status Stop();

  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool marks_decisions() const { return marks_decisions_.load(std::memory_order_relaxed); }
  /// A number for spans of this name; the same for the same name. Track 0 is the engine's own.
  uint32_t NameTrack(std::string_view name);
  void Add(const TimelineSpan& span);
  void AddInstant(const char* what, int64_t at_ns);
  /// Writes what has gathered. Blocks for the disk: not for the engine thread.
  void Flush();

 private:
  struct Close {
    void operator()(std::FILE* file) const { (void)std::fclose(file); }
  };

  void Write(std::unique_lock<std::mutex>& lock);
  void Append(std::string& text, const TimelineSpan& span) const;
  void AppendNames(std::string& text);

  const Clock& clock_;
  const int rank_;
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_decisions_{false};

  std::mutex writing_;  // one Flush at a time; before mutex_
  std::mutex mutex_;
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  std::vector<std::string> tracks_;
  std::map<std::string, uint32_t, std::less<>> numbers_;  // track by name
  size_t tracks_written_ = 0;
  std::vector<TimelineSpan> spans_;
  int64_t dropped_ = 0;
  int64_t start_ns_ = 0;
  bool failed_ = false;
};

}  // namespace farandole
