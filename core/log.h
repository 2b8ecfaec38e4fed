// What the library says to a human: leveled lines with the rank in front. Each engine has its own
// Log, so that N ranks in one process can be distinguished.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace farandole {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarning, kError, kOff };

/// "trace", "debug", "info", "warning", "error", "off".
std::string_view Name(LogLevel level);

/// Thread safety: any thread. Pure, so that a plug-in can use it without a symbol of ours.
class Log {
 public:
  virtual ~Log() = default;
  /// Ask before building an expensive message.
  virtual bool Enabled(LogLevel level) const = 0;
  /// One message, without a newline at its end. Dropped when the level is not enabled.
  virtual void Write(LogLevel level, std::string_view message) = 0;
};

/// Where finished lines go. Thread safety: Line from any thread; a line is never torn.
class LogSink {
 public:
  virtual ~LogSink() = default;
  /// `line` ends with a newline.
  virtual void Line(std::string_view line) = 0;
  /// Writes what Line could not write at once, as far as there is room now. Never blocks.
  virtual void Flush() {}
};

/// Stderr, which other processes share: its flags stay as they are, and yet nothing here waits for
/// a reader. What a full pipe does not take is kept, up to 64 KiB; lines beyond are counted, and
/// the count is reported when there is room again. The process's end waits for a reader up to 0.5
/// s.
LogSink& StderrSink();

/// Puts "[farandole <prefix>] warning: " before each message. Lifetime: `sink` outlives it.
class PrefixLog final : public Log {
 public:
  /// @param prefix Usually "3/8": rank and size.
  PrefixLog(LogLevel least, std::string prefix, LogSink& sink = StderrSink());
  bool Enabled(LogLevel level) const override;
  void Write(LogLevel level, std::string_view message) override;

 private:
  const LogLevel least_;
  const std::string prefix_;
  LogSink& sink_;
};

}  // namespace farandole
