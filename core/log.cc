#include "core/log.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "core/types.h"

namespace farandole {
namespace {

constexpr size_t kMostKept = size_t{64} << 10;                // bytes
constexpr auto kMostAtExit = std::chrono::milliseconds(500);  // for a reader, at the end

/// write(2) to stderr that does not wait: what was written, or -1 with errno EAGAIN. `size` is at
/// most PIPE_BUF. O_NONBLOCK on stderr itself would be set for every process that shares it, so a
/// pipe or terminal is opened once more for the time of the call.
ssize_t WriteNow(const char* data, size_t size) {
  struct stat file {};
  if (::fstat(STDERR_FILENO, &file) != 0) return -1;
  // A socket cannot be opened once more through /proc; send takes its flags with the call.
  // MSG_NOSIGNAL: a reader that has gone must not end the process.
  if (S_ISSOCK(file.st_mode)) {
    return ::send(STDERR_FILENO, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  if (!S_ISFIFO(file.st_mode) && !S_ISCHR(file.st_mode)) return ::write(STDERR_FILENO, data, size);
  // This gives an open file description of its own, and so its own flags. O_NOCTTY: a terminal must
  // not become the controlling one. With O_NONBLOCK a pipe takes up to PIPE_BUF bytes whole or not
  // at all (POSIX.1, write).
  const int own = ::open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (own >= 0) {
    const ssize_t n = ::write(own, data, size);
    const int error = errno;
    ::close(own);
    errno = error;
    return n;
  }
  // Another user's pipe, or no /proc. One that poll calls writable takes PIPE_BUF bytes, unless
  // another process fills it between the two calls.
  pollfd room{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&room, 1, 0) > 0) return ::write(STDERR_FILENO, data, size);
  errno = EAGAIN;
  return -1;
}

/// Thread safety: any thread; all members under `mutex_`. FlushAtExit, which alone waits for a
/// reader, does so without the mutex, so that one thread that logs never holds up another.
class StderrLines final : public LogSink {
 public:
  void Line(std::string_view line) override {
    std::lock_guard lock(mutex_);
    // Make room first: a line is refused only if the reader is behind. One longer than kMostKept is
    // taken when nothing waits.
    WriteKept();
    if (!kept_.empty() && kept_.size() + line.size() > kMostKept) {
      ++lost_;
      return;
    }
    KeepLost();
    kept_.append(line);
    WriteKept();
  }

  void Flush() override {
    std::lock_guard lock(mutex_);
    WriteKept();
    if (!kept_.empty()) return;
    KeepLost();
    WriteKept();
  }

  /// As Flush, but waits for a reader.
  void FlushAtExit() {
    const auto end = std::chrono::steady_clock::now() + kMostAtExit;
    for (;;) {
      Flush();
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          end - std::chrono::steady_clock::now());
      if (left.count() <= 0 || Idle()) return;
      pollfd room{STDERR_FILENO, POLLOUT, 0};
      (void)::poll(&room, 1, static_cast<int>(left.count()));  // Flush finds out what came of it
    }
  }

  // A child of fork writes its own lines only. The lock is never held for long.
  void BeforeFork() { mutex_.lock(); }
  void AfterForkInParent() { mutex_.unlock(); }
  void AfterForkInChild() {
    kept_.clear();
    lost_ = 0;
    mutex_.unlock();
  }

 private:
  bool Idle() {
    std::lock_guard lock(mutex_);
    return kept_.empty();
  }

  void KeepLost() {
    if (lost_ == 0) return;
    kept_ += "[farandole] warning: " + std::to_string(lost_) + (lost_ == 1 ? " line" : " lines") +
             " lost, as stderr was not read\n";
    lost_ = 0;
  }

  /// Whole lines where they fit into PIPE_BUF, which others' lines cannot tear then.
  void WriteKept() {
    size_t done = 0;
    while (done < kept_.size()) {
      const std::string_view next = std::string_view(kept_).substr(done, PIPE_BUF);
      const size_t line_end = next.rfind('\n');
      const size_t size = line_end == std::string_view::npos ? next.size() : line_end + 1;
      // EAGAIN: the rest waits for the next Line, Flush or exit. Any other error, such as a closed
      // stderr, drops all that is kept, or it would be tried again for ever.
      const ssize_t n = WriteNow(next.data(), size);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) break;
      done =
          n > 0 ? done + static_cast<size_t>(n) : kept_.size();  // no caller can receive the error
    }
    kept_.erase(0, done);
  }

  std::mutex mutex_;
  std::string kept_;  // whole lines; of the first one perhaps only the end that is not written yet
  int64_t lost_ = 0;  // lines refused since the last report of lost ones
};

/// Never destroyed: others may log while the process ends.
StderrLines& Lines() {
  static StderrLines* const lines = [] {
    auto* const made = new StderrLines;
    // exit runs handlers in reverse order. This one is registered when the library is loaded, so it
    // comes after those of the rest of the library and writes what they have logged.
    (void)std::atexit([] { Lines().FlushAtExit(); });
    (void)::pthread_atfork([] { Lines().BeforeFork(); }, [] { Lines().AfterForkInParent(); },
                           [] { Lines().AfterForkInChild(); });
    return made;
  }();
  return *lines;
}

// Made when the library is loaded: a child forked while another thread makes it would wait for that
// thread for ever.
[[maybe_unused]] const LogSink& made_at_load = Lines();

}  // namespace

std::string_view Name(LogLevel level) {
  static constexpr std::string_view kNames[] = {"trace",   "debug", "info",
                                                "warning", "error", "off"};
  return NameAt(kNames, level, "unknown");
}

LogSink& StderrSink() { return Lines(); }

PrefixLog::PrefixLog(LogLevel least, std::string prefix, LogSink& sink)
    : least_(least), prefix_(std::move(prefix)), sink_(sink) {}

bool PrefixLog::Enabled(LogLevel level) const { return level >= least_ && level != LogLevel::kOff; }

void PrefixLog::Write(LogLevel level, std::string_view message) {
  if (!Enabled(level)) return;
  // The sink gets one string, because lines of several threads would mix otherwise.
  std::string line = "[farandole " + prefix_ + "] ";
  line.append(Name(level)).append(": ").append(message).push_back('\n');
  sink_.Line(line);
}

}  // namespace farandole
