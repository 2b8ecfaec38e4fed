#include "core/log.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace farandole {
namespace {

class StderrLines final : public LogSink {
 public:
  void Line(std::string_view line) override {
    while (!line.empty()) {
      const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return;  // nobody is left to be told that stderr is gone
      line.remove_prefix(static_cast<size_t>(n));
    }
  }
};

}  // namespace

std::string_view Name(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return "trace";
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
    case LogLevel::kOff:
      return "off";
  }
  return "unknown";
}

LogSink& StderrSink() {
  static StderrLines sink;
  return sink;
}

PrefixLog::PrefixLog(LogLevel least, std::string prefix, LogSink& sink)
    : least_(least), prefix_(std::move(prefix)), sink_(sink) {}

bool PrefixLog::Enabled(LogLevel level) const { return level >= least_ && level != LogLevel::kOff; }

void PrefixLog::Write(LogLevel level, std::string_view message) {
  if (!Enabled(level)) return;
  std::string line = "[farandole " + prefix_ + "] ";
  line.append(Name(level)).append(": ").append(message).push_back('\n');
  sink_.Line(line);
}

}  // namespace farandole
