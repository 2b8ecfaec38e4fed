#include "core/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace farandole {
namespace {

class KeptLines final : public LogSink {
 public:
  void Line(std::string_view line) override { lines.emplace_back(line); }
  std::vector<std::string> lines;
};

TEST(PrefixLog, PutsPrefixAndLevelInFrontOfWhatIsNotBelowItsLevel) {
  KeptLines sink;
  PrefixLog first(LogLevel::kInfo, "0/2", sink), second(LogLevel::kWarning, "1/2", sink);
  PrefixLog off(LogLevel::kOff, "0/1", sink);
  for (PrefixLog* log : {&first, &second, &off}) {
    log->Write(LogLevel::kInfo, "a");
    log->Write(LogLevel::kWarning, "b");
  }
  off.Write(LogLevel::kError, "x");
  off.Write(LogLevel::kOff, "x");
  EXPECT_EQ(sink.lines,
            (std::vector<std::string>{"[farandole 0/2] info: a\n", "[farandole 0/2] warning: b\n",
                                      "[farandole 1/2] warning: b\n"}));
  EXPECT_FALSE(second.Enabled(LogLevel::kInfo));
  EXPECT_TRUE(second.Enabled(LogLevel::kError));
}

TEST(StderrSink, WritesTheLineToStderr) {
  testing::internal::CaptureStderr();
  StderrSink().Line("hello\n");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "hello\n");
}

}  // namespace
}  // namespace farandole
