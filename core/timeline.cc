#include "core/timeline.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace farandole {
namespace {

constexpr std::string_view kRankPlaceholder = "{rank}";

std::string PathOf(std::string path, int rank) {
  const size_t at = path.find(kRankPlaceholder);
  if (at != std::string::npos) path.replace(at, kRankPlaceholder.size(), std::to_string(rank));
  return path;
}

/// The unit of the format's times; the decimals keep the nanoseconds.
/// With three decimals after a point, whatever the locale has: JSON knows no comma there.
std::string Microseconds(int64_t ns) {
  const std::string digits = std::to_string(1000 + ns % kNsPerUs).substr(1);
  return std::to_string(ns / kNsPerUs) + "." + digits;
}

/// Spans count from the start of their file. Its time on the clock that the ranks of a host share,
/// and the time of day then, allow a reader to lay the files of several ranks over one another.
int64_t EpochMicroseconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

}  // namespace

std::string QuotedForJson(std::string_view text, bool in_ascii) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') quoted += '\\';
    if (byte >= 0x20 && (byte < 0x7f || !in_ascii)) {
      quoted += c;
    } else {
      char escape[8];
      (void)std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      quoted += escape;
    }
  }
  return quoted + '"';
}

/// What the Timeline and the thread of its file both use, by whichever lives longer.
struct Timeline::Shared {
  enum class State : uint8_t { kClosed, kOpening, kOpen, kClosing };

  /// @return whether another state has come in time.
  bool Leave(State present, int64_t timeout_ns, std::unique_lock<std::mutex>& lock) {
    return changed.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                            [&] { return state != present; });
  }

  std::mutex mutex;  // of all members
  std::condition_variable changed;
  State state = State::kClosed;
  std::string path;   // as given to Start
  std::string error;  // of the file; empty: none
  int64_t start_ns = 0;
  // Tracks outlive their file, as callers keep the numbers that NameTrack gave them.
  std::vector<std::string> tracks{"engine"};
  std::map<std::string, uint32_t, std::less<>> numbers;  // track by name
  std::vector<TimelineSpan> spans;
  int64_t dropped = 0;
  int64_t dropped_ns = 0;  // the last one's beginning
};

/// The thread of one file. It alone touches the file, without the mutex.
class Timeline::Writer {
 public:
  Writer(std::shared_ptr<Shared> shared, std::string path, TimelineOwner owner, int64_t start_ns,
         int64_t start_epoch_us, int64_t period_ns)
      : shared_(std::move(shared)),
        path_(std::move(path)),
        owner_(std::move(owner)),
        start_ns_(start_ns),
        start_epoch_us_(start_epoch_us),
        period_ns_(period_ns) {}

  void Run() {
    const bool is_open = Open();
    std::unique_lock lock(shared_->mutex);
    if (is_open && shared_->state == State::kOpening) Enter(State::kOpen);
    for (bool last = !is_open; !last;) {
      last = shared_->Leave(State::kOpen, period_ns_, lock);
      Write(lock);
    }
    lock.unlock();
    Close();
    lock.lock();
    shared_->error = error_;
    Enter(State::kClosed);
  }

 private:
  using State = Shared::State;

  // Under the mutex.
  void Enter(State state) {
    shared_->state = state;
    shared_->changed.notify_all();
  }

  void Check(bool written) {
    if (!written) error_ = path_ + "\" could not be written";
  }

  bool Open();
  void Write(std::unique_lock<std::mutex>& lock);
  void Close();
  void AppendNames(std::string& text);
  void Append(std::string& text, const TimelineSpan& span) const;

  const std::shared_ptr<Shared> shared_;
  const std::string path_;
  const TimelineOwner owner_;
  const int64_t start_ns_;
  const int64_t start_epoch_us_;
  const int64_t period_ns_;
  std::FILE* file_ = nullptr;
  size_t tracks_written_ = 0;
  std::string error_;  // empty: none
};

// A complete JSON array from the first line on: each Write replaces its closing bracket.
bool Timeline::Writer::Open() {
  file_ = std::fopen(path_.c_str(), "w");
  if (file_ == nullptr) {
    error_ = path_ + "\" cannot be opened: " + std::strerror(errno);
    return false;
  }
  const std::string rank = std::to_string(owner_.rank);
  const std::string text =
      "[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":" + rank + ",\"args\":{\"name\":\"rank " +
      rank + "\",\"start_time_since_epoch_in_micros\":" + std::to_string(start_epoch_us_) +
      ",\"size\":" + std::to_string(owner_.size) + ",\"job\":" + QuotedForJson(owner_.job) +
      ",\"generation\":" + std::to_string(owner_.generation) +
      ",\"start_ns\":" + std::to_string(start_ns_) + ",\"host\":" + QuotedForJson(HostName()) +
      ",\"process\":" + std::to_string(getpid()) + "}}\n]\n";
  Check(std::fputs(text.c_str(), file_) >= 0);
  return true;
}

void Timeline::Writer::Close() {
  if (file_ != nullptr) Check(std::fclose(std::exchange(file_, nullptr)) == 0);
}

// Under `lock`, which it gives up while it formats and writes, so that the engine's thread can add
// spans and never waits for the disk.
void Timeline::Writer::Write(std::unique_lock<std::mutex>& lock) {
  std::vector<TimelineSpan> spans = std::exchange(shared_->spans, {});
  const int64_t dropped = std::exchange(shared_->dropped, 0);
  if (dropped > 0) {
    spans.push_back(
        {0, "SPANS_DROPPED", shared_->dropped_ns, shared_->dropped_ns, dropped, -1, true});
  }
  std::string text;
  AppendNames(text);
  lock.unlock();
  for (const TimelineSpan& span : spans) Append(text, span);
  if (!text.empty()) {
    // Over the closing "\n]\n" of what stands there.
    Check(std::fseek(file_, -3, SEEK_CUR) == 0 &&
          std::fputs((text + "\n]\n").c_str(), file_) >= 0 && std::fflush(file_) == 0);
  }
  lock.lock();
}

// Under the mutex, as NameTrack may add a track at any time. Each track is named once per file.
void Timeline::Writer::AppendNames(std::string& text) {
  for (; tracks_written_ < shared_->tracks.size(); ++tracks_written_) {
    text += ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":" + std::to_string(owner_.rank) +
            ",\"tid\":" + std::to_string(tracks_written_) +
            ",\"args\":{\"name\":" + QuotedForJson(shared_->tracks[tracks_written_]) + "}}";
  }
}

void Timeline::Writer::Append(std::string& text, const TimelineSpan& span) const {
  text += ",\n{\"name\":" + QuotedForJson(span.what) +
          ",\"ph\":" + (span.instant ? "\"i\"" : "\"X\"") +
          ",\"pid\":" + std::to_string(owner_.rank) + ",\"tid\":" + std::to_string(span.track) +
          ",\"ts\":" + Microseconds(span.begin_ns - start_ns_);
  // Scope of a mark: "g" draws it across all tracks, as the engine's concern all of them; "t"
  // across its own track alone.
  text += span.instant ? (span.track == 0 ? ",\"s\":\"g\"" : ",\"s\":\"t\"")
                       : ",\"dur\":" + Microseconds(span.end_ns - span.begin_ns);
  std::string args;
  if (span.number >= 0) args += "\"number\":" + std::to_string(span.number);
  if (span.bytes >= 0)
    args += (args.empty() ? "\"bytes\":" : ",\"bytes\":") + std::to_string(span.bytes);
  if (!span.note.empty())
    args += (args.empty() ? "\"note\":" : ",\"note\":") + QuotedForJson(span.note);
  if (span.set > 0) args += (args.empty() ? "\"set\":" : ",\"set\":") + std::to_string(span.set);
  if (!span.dtype.empty())
    args += (args.empty() ? "\"dtype\":" : ",\"dtype\":") + QuotedForJson(span.dtype);
  text += args.empty() ? "}" : ",\"args\":{" + args + "}}";
}

Timeline::Timeline(const Clock& clock, TimelineOwner owner, int64_t file_timeout_ns,
                   int64_t period_ns)
    : clock_(clock),
      owner_(std::move(owner)),
      file_timeout_ns_(file_timeout_ns),
      period_ns_(period_ns),
      shared_(std::make_shared<Shared>()) {}

Timeline::~Timeline() { (void)Stop(); }  // no caller can receive the error

Status Timeline::Start(const std::string& path, bool marks_decisions) {
  if (path.empty()) return InvalidArgument("timeline: the path is empty");
  if (owner_.rank != 0 && path.find(kRankPlaceholder) == std::string::npos) return {};
  using State = Shared::State;
  std::unique_lock lock(shared_->mutex);
  if (shared_->state == State::kOpen && shared_->path == path) return {};
  if (shared_->state != State::kClosed) {
    return InvalidArgument("timeline: \"" + shared_->path +
                           "\" is being written; stop it before \"" + path + "\"");
  }
  const int64_t start_ns = clock_.NowNs();
  std::thread thread(
      [writer = Writer(shared_, PathOf(path, owner_.rank), owner_, start_ns, EpochMicroseconds(),
                       period_ns_)]() mutable { writer.Run(); });
  (void)pthread_setname_np(thread.native_handle(), "farandole-trace");  // for top and gdb
  thread.detach();
  shared_->state = State::kOpening;
  shared_->path = path;
  shared_->error.clear();
  shared_->start_ns = start_ns;
  shared_->spans.clear();
  if (!shared_->Leave(State::kOpening, file_timeout_ns_, lock)) {
    shared_->state = State::kClosing;  // the thread closes what it gets
    return Unavailable("timeline: \"" + path + "\" could not be opened within " +
                       std::to_string(file_timeout_ns_ / kNsPerMs) + " ms");
  }
  if (shared_->state == State::kClosed) return Unavailable("timeline: \"" + shared_->error);
  marks_decisions_.store(marks_decisions);
  on_.store(true);
  return {};
}

Status Timeline::Stop() {
  using State = Shared::State;
  on_.store(false);
  std::unique_lock lock(shared_->mutex);
  if (shared_->state != State::kOpen) return {};
  shared_->state = State::kClosing;
  shared_->changed.notify_all();
  if (!shared_->Leave(State::kClosing, file_timeout_ns_, lock)) {
    return Unavailable("timeline: \"" + shared_->path + "\" could not be closed within " +
                       std::to_string(file_timeout_ns_ / kNsPerMs) + " ms");
  }
  return shared_->error.empty() ? Status() : Unavailable("timeline: \"" + shared_->error);
}

uint32_t Timeline::NameTrack(std::string_view name) {
  std::lock_guard lock(shared_->mutex);
  std::vector<std::string>& tracks = shared_->tracks;
  const auto [at, is_new] = shared_->numbers.emplace(name, static_cast<uint32_t>(tracks.size()));
  if (is_new) tracks.emplace_back(name);
  return at->second;
}

void Timeline::Add(const TimelineSpan& span) {
  if (!on()) return;
  std::lock_guard lock(shared_->mutex);
  if (shared_->state != Shared::State::kOpen) return;
  const int64_t begin_ns = std::max(span.begin_ns, shared_->start_ns);  // perhaps before Start
  if (shared_->spans.size() < kMost) {
    shared_->spans.push_back(span);
    shared_->spans.back().begin_ns = begin_ns;
  } else {
    ++shared_->dropped;
    shared_->dropped_ns = begin_ns;
  }
}

void Timeline::AddInstant(const char* what, int64_t at_ns) {
  Add({0, what, at_ns, at_ns, -1, -1, true});
}

}  // namespace farandole
