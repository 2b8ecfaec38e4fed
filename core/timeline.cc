#include "core/timeline.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace farandole {
namespace {

constexpr std::string_view kRankPlaceholder = "{rank}";

std::string PathOf(std::string path, int rank) {
  const size_t at = path.find(kRankPlaceholder);
  if (at != std::string::npos) path.replace(at, kRankPlaceholder.size(), std::to_string(rank));
  return path;
}

/// A JSON string (RFC 8259, section 7). Bytes above 0x7f are UTF-8 as they are.
std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') quoted += '\\';
    if (byte >= 0x20) {
      quoted += c;
    } else {
      char escape[8];
      (void)std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      quoted += escape;
    }
  }
  return quoted + '"';
}

/// The unit of the format's times; the decimals keep the nanoseconds.
/// With three decimals after a point, whatever the locale has: JSON knows no comma there.
std::string Microseconds(int64_t ns) {
  const std::string digits = std::to_string(1000 + ns % kNsPerUs).substr(1);
  return std::to_string(ns / kNsPerUs) + "." + digits;
}

/// Spans count from the start of their file. The time of day of that start allows a reader to lay
/// the files of several ranks over one another.
int64_t EpochMicroseconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

}  // namespace

Timeline::Timeline(const Clock& clock, int rank) : clock_(clock), rank_(rank), tracks_{"engine"} {}

Timeline::~Timeline() { (void)Stop(); }  // no caller can receive the error

Status Timeline::Start(const std::string& path, bool marks_decisions) {
  if (path.empty()) return InvalidArgument("timeline: the path is empty");
  if (rank_ != 0 && path.find(kRankPlaceholder) == std::string::npos) return {};
  std::lock_guard lock(mutex_);
  if (file_ != nullptr && path_ == path) return {};
  if (file_ != nullptr) {
    return InvalidArgument("timeline: \"" + path_ + "\" is being written; stop it before \"" +
                           path + "\"");
  }
  file_.reset(std::fopen(PathOf(path, rank_).c_str(), "w"));
  if (file_ == nullptr) {
    return Unavailable("timeline: \"" + PathOf(path, rank_) +
                       "\" cannot be opened: " + std::strerror(errno));
  }
  // tracks_ stays, as callers keep the numbers that NameTrack gave them. A second file names all of
  // them anew.
  path_ = path;
  tracks_written_ = 0;
  dropped_ = 0;
  failed_ = false;
  spans_.reserve(1024);
  start_ns_ = clock_.NowNs();
  const std::string rank = std::to_string(rank_);
  // A complete JSON array from the first line on: each Write replaces its closing bracket.
  failed_ = std::fputs(
                ("[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" + rank +
                 ",\"args\":{\"name\":\"rank " + rank + "\",\"start_time_since_epoch_in_micros\":" +
                 std::to_string(EpochMicroseconds()) + "}}\n]\n")
                    .c_str(),
                file_.get()) < 0;
  marks_decisions_.store(marks_decisions);
  on_.store(true);
  return {};
}

Status Timeline::Stop() {
  // Spans are refused before the last ones are written. The watchdog's thread may be in Write
  // without `mutex_`; `writing_` keeps the file open until it has finished.
  on_.store(false);
  std::lock_guard writing(writing_);
  std::unique_lock lock(mutex_);
  if (file_ == nullptr) return {};
  Write(lock);
  const bool closed = std::fclose(file_.release()) == 0;
  const std::string path = std::exchange(path_, {});
  if (!closed || failed_) return Unavailable("timeline: \"" + path + "\" could not be written");
  return {};
}

uint32_t Timeline::NameTrack(std::string_view name) {
  std::lock_guard lock(mutex_);
  const auto [at, is_new] = numbers_.emplace(name, static_cast<uint32_t>(tracks_.size()));
  if (is_new) tracks_.emplace_back(name);
  return at->second;
}

void Timeline::Add(const TimelineSpan& span) {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  if (spans_.size() < kMost) {
    spans_.push_back(span);
    spans_.back().begin_ns = std::max(span.begin_ns, start_ns_);  // it may have begun before Start
  } else {
    ++dropped_;
  }
}

void Timeline::AddInstant(const char* what, int64_t at_ns) {
  Add({0, what, at_ns, at_ns, -1, -1, true});
}

void Timeline::Flush() {
  if (!on()) return;
  std::lock_guard writing(writing_);
  std::unique_lock lock(mutex_);
  if (file_ != nullptr) Write(lock);
}

// Under writing_ and `lock`, which it gives up while it formats and writes, so that the engine's
// thread can add spans and never waits for the disk. Meanwhile writing_ keeps the file open, and
// start_ns_ stays as it is, because Start refuses while there is a file.
void Timeline::Write(std::unique_lock<std::mutex>& lock) {
  std::vector<TimelineSpan> spans = std::exchange(spans_, {});
  std::string text;
  AppendNames(text);
  const int64_t dropped = std::exchange(dropped_, 0);
  lock.unlock();
  for (const TimelineSpan& span : spans) Append(text, span);
  if (dropped > 0) {
    Append(text, {0, "SPANS_DROPPED", clock_.NowNs(), clock_.NowNs(), dropped, -1, true});
  }
  bool written = true;
  if (!text.empty()) {
    // Over the closing "\n]\n" of what stands there.
    written = std::fseek(file_.get(), -3, SEEK_CUR) == 0 &&
              std::fputs((text + "\n]\n").c_str(), file_.get()) >= 0 &&
              std::fflush(file_.get()) == 0;
  }
  lock.lock();
  failed_ = failed_ || !written;
}

/// Under mutex_, as NameTrack may add a track at any time. Each track is named once per file.
void Timeline::AppendNames(std::string& text) {
  for (; tracks_written_ < tracks_.size(); ++tracks_written_) {
    text += ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" + std::to_string(rank_) +
            ",\"tid\":" + std::to_string(tracks_written_) +
            ",\"args\":{\"name\":" + Quoted(tracks_[tracks_written_]) + "}}";
  }
}

void Timeline::Append(std::string& text, const TimelineSpan& span) const {
  text += ",\n{\"name\":" + Quoted(span.what) + ",\"ph\":" + (span.instant ? "\"i\"" : "\"X\"") +
          ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(span.track) +
          ",\"ts\":" + Microseconds(span.begin_ns - start_ns_);
  // Scope of a mark: "g" draws it across all tracks, as the engine's concern all of them; "t"
  // across its own track alone.
  text += span.instant ? (span.track == 0 ? ",\"s\":\"g\"" : ",\"s\":\"t\"")
                       : ",\"dur\":" + Microseconds(span.end_ns - span.begin_ns);
  std::string args;
  if (span.number >= 0) args += "\"number\":" + std::to_string(span.number);
  if (span.bytes >= 0)
    args += (args.empty() ? "\"bytes\":" : ",\"bytes\":") + std::to_string(span.bytes);
  if (!span.note.empty()) args += (args.empty() ? "\"note\":" : ",\"note\":") + Quoted(span.note);
  text += args.empty() ? "}" : ",\"args\":{" + args + "}}";
}

}  // namespace farandole
