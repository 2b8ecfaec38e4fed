#include "core/timeline.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "core/status.h"
#include "test/support/fake_clock.h"

namespace farandole {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr auto kNap = std::chrono::milliseconds(1);

class TimelineTest : public ::testing::Test {
 protected:
  TimelineTest() : path_(::testing::TempDir() + "timeline_test_" + std::to_string(getpid())) {}
  ~TimelineTest() override { (void)std::remove(path_.c_str()); }

  std::string Text() const {
    std::ostringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }

  const std::string path_;
  FakeClock clock_;
  Timeline timeline_{clock_, {}};
};

TEST_F(TimelineTest, KeepsNothingBeforeItsStart) {
  timeline_.Add({0, "EARLY", 1, 2});
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  ASSERT_TRUE(timeline_.Stop().ok());
  EXPECT_THAT(Text(), Not(HasSubstr("EARLY")));
}

TEST_F(TimelineTest, IsWholeAfterEveryWrite) {
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  const uint32_t track = timeline_.NameTrack("layer \"1\"\n");
  for (int i = 0; i < 3; ++i) {
    const int64_t now = clock_.NowNs();
    timeline_.Add({track, "ALLREDUCE", now + 1000 * i, now + 1000 * i + 500, 7, 64});
    const std::string begin = "\"ts\":" + std::to_string(i) + ".000";
    while (Text().find(begin) == std::string::npos) std::this_thread::sleep_for(kNap);
    EXPECT_THAT(Text(), StartsWith("[\n{"));
    EXPECT_THAT(Text(), EndsWith("}\n]\n"));
  }
  EXPECT_THAT(Text(), HasSubstr(R"("args":{"name":"layer \"1\"\u000a"})"));
  EXPECT_THAT(Text(), HasSubstr(R"("ph":"X","pid":0,"tid":1,"ts":2.000,"dur":0.500,)"));
  EXPECT_THAT(Text(), HasSubstr(R"("args":{"number":7,"bytes":64})"));
  EXPECT_THAT(Text(), HasSubstr("start_time_since_epoch_in_micros"));
}

TEST_F(TimelineTest, SaysWhoseClockItIsAndWhichSetAndDtypeASpanHas) {
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  const int64_t start = clock_.NowNs();
  timeline_.Add({.what = "SUM", .begin_ns = start, .end_ns = start, .set = 3, .dtype = "float32"});
  ASSERT_TRUE(timeline_.Stop().ok());
  const std::string whose = "\"start_ns\":" + std::to_string(start) + ",\"host\":\"" + HostName() +
                            "\",\"process\":" + std::to_string(getpid()) + "}";
  EXPECT_THAT(Text(), HasSubstr(whose));
  EXPECT_THAT(Text(), HasSubstr(R"("args":{"set":3,"dtype":"float32"})"));
}

TEST_F(TimelineTest, SaysWhichJobAndGenerationItIsOf) {
  Timeline second(clock_, {1, 4, "slurm 7.\"0\"", 2});
  ASSERT_TRUE(second.Start(path_ + "{rank}", false).ok());
  ASSERT_TRUE(second.Stop().ok());
  std::ostringstream text;
  text << std::ifstream(path_ + "1").rdbuf();
  (void)std::remove((path_ + "1").c_str());
  EXPECT_THAT(text.str(), HasSubstr(R"("size":4,"job":"slurm 7.\"0\"","generation":2,)"));
}

TEST_F(TimelineTest, CutsASpanThatBeganBeforeItsStart) {
  const int64_t before = clock_.NowNs();
  clock_.Advance(5000);
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  timeline_.Add({0, "LONG", before, clock_.NowNs() + 1000});
  ASSERT_TRUE(timeline_.Stop().ok());
  EXPECT_THAT(Text(), HasSubstr(R"("ts":0.000,"dur":1.000)"));
}

TEST_F(TimelineTest, CountsWhatItCannotKeep) {
  Timeline idle(clock_, {}, 60 * kNsPerSecond, 3600 * kNsPerSecond);  // writes at the end alone
  ASSERT_TRUE(idle.Start(path_, false).ok());
  for (size_t i = 0; i < Timeline::kMost + 3; ++i) idle.AddInstant("MARK", clock_.NowNs());
  ASSERT_TRUE(idle.Stop().ok());
  EXPECT_THAT(Text(), HasSubstr(R"("SPANS_DROPPED")"));
  EXPECT_THAT(Text(), HasSubstr(R"("args":{"number":3})"));
}

TEST_F(TimelineTest, WritesARanksOwnFileWhereThePathAsksForIt) {
  Timeline third(clock_, {3});
  ASSERT_TRUE(third.Start("/nowhere/one_file", false).ok());
  EXPECT_FALSE(third.on());
  const Status refused = third.Start("/nowhere/{rank}.json", false);
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_THAT(refused.message(), HasSubstr("/nowhere/3.json"));
}

TEST_F(TimelineTest, RefusesASecondFileAndNamesTheFirst) {
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  EXPECT_TRUE(timeline_.Start(path_, false).ok());
  const Status refused = timeline_.Start(path_ + ".other", false);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr(path_));
}

TEST_F(TimelineTest, StartsAgainWithAllNames) {
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  const uint32_t track = timeline_.NameTrack("t");
  EXPECT_EQ(timeline_.NameTrack("t"), track);
  ASSERT_TRUE(timeline_.Stop().ok());
  ASSERT_TRUE(timeline_.Start(path_, false).ok());
  timeline_.Add({track, "AGAIN", clock_.NowNs(), clock_.NowNs() + 1});
  ASSERT_TRUE(timeline_.Stop().ok());
  EXPECT_THAT(Text(), HasSubstr(R"("tid":1,"args":{"name":"t"})"));
  EXPECT_THAT(Text(), HasSubstr("AGAIN"));
}

// A pipe stands for a file system that does not answer: it cannot be opened without a reader, and a
// full one takes nothing.
class TimelineOnAPipe : public TimelineTest {
 protected:
  TimelineOnAPipe() { EXPECT_EQ(mkfifo(path_.c_str(), 0600), 0); }

  int OpenPipe() const { return open(path_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC); }
  /// Reads until the timeline's thread has let go of the pipe.
  Status StartOther(int pipe) {
    for (std::string text(1 << 16, ' ');;) {
      (void)!read(pipe, text.data(), text.size());
      Status started = patient_.Start("/nowhere/t.json", false);
      if (started.code() != Code::kInvalidArgument) return started;
      std::this_thread::sleep_for(kNap);
    }
  }

  Timeline patient_{clock_, {}, 500 * kNsPerMs};
};

TEST_F(TimelineOnAPipe, GivesUpAnOpenThatDoesNotReturn) {
  const Status refused = patient_.Start(path_, false);
  EXPECT_EQ(refused.code(), Code::kUnavailable);
  EXPECT_THAT(refused.message(), HasSubstr(path_ + "\" could not be opened within 500 ms"));
  EXPECT_FALSE(patient_.on());
  EXPECT_EQ(patient_.Start(path_ + ".other", false).code(), Code::kInvalidArgument);
  const int pipe = OpenPipe();  // the open returns
  EXPECT_THAT(StartOther(pipe).message(), HasSubstr("No such file"));
  close(pipe);
}

TEST_F(TimelineOnAPipe, KeepsNobodyWaitingForAWrite) {
  const int pipe = OpenPipe();
  const std::string full(4096, 'x');
  while (write(pipe, full.data(), full.size()) > 0) continue;
  ASSERT_TRUE(patient_.Start(path_, false).ok());
  patient_.AddInstant("MARK", clock_.NowNs());
  const Status stopped = patient_.Stop();
  EXPECT_EQ(stopped.code(), Code::kUnavailable);
  EXPECT_THAT(stopped.message(), HasSubstr(path_ + "\" could not be closed within 500 ms"));
  EXPECT_THAT(StartOther(pipe).message(), HasSubstr("No such file"));
  close(pipe);
}

}  // namespace
}  // namespace farandole
