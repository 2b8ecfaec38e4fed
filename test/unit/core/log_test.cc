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

TEST(PrefixLog, PutsThePrefixAndTheLevelInFront) {
  KeptLines sink;
  PrefixLog log(LogLevel::kInfo, "3/8", sink);
  log.Write(LogLevel::kWarning, "slow link");
  ASSERT_EQ(sink.lines.size(), 1u);
  EXPECT_EQ(sink.lines[0], "[farandole 3/8] warning: slow link\n");
}

TEST(PrefixLog, DropsWhatIsBelowItsLevel) {
  KeptLines sink;
  PrefixLog log(LogLevel::kWarning, "0/1", sink);
  log.Write(LogLevel::kInfo, "chatter");
  EXPECT_TRUE(sink.lines.empty());
  EXPECT_FALSE(log.Enabled(LogLevel::kInfo));
  EXPECT_TRUE(log.Enabled(LogLevel::kError));
}

TEST(PrefixLog, SaysNothingWhenOff) {
  KeptLines sink;
  PrefixLog log(LogLevel::kOff, "0/1", sink);
  log.Write(LogLevel::kError, "x");
  log.Write(LogLevel::kOff, "x");
  EXPECT_TRUE(sink.lines.empty());
}

TEST(PrefixLog, KeepsTheLinesOfTwoEnginesApart) {
  KeptLines sink;
  PrefixLog first(LogLevel::kInfo, "0/2", sink);
  PrefixLog second(LogLevel::kInfo, "1/2", sink);
  first.Write(LogLevel::kInfo, "a");
  second.Write(LogLevel::kInfo, "b");
  EXPECT_EQ(sink.lines,
            (std::vector<std::string>{"[farandole 0/2] info: a\n", "[farandole 1/2] info: b\n"}));
}

TEST(StderrSink, WritesTheLineToStderr) {
  testing::internal::CaptureStderr();
  StderrSink().Line("hello\n");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "hello\n");
}

}  // namespace
}  // namespace farandole
