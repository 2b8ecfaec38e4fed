// The log's stderr as a real pipe: full, shared with children, at the end of a process.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "core/log.h"

namespace farandole {
namespace {

/// Stderr is a pipe that nobody reads, until it goes out of scope.
class PipeAsStderr {
 public:
  PipeAsStderr() : stderr_(::dup(STDERR_FILENO)) {
    EXPECT_EQ(::pipe(ends_), 0);
    EXPECT_EQ(::dup2(ends_[1], STDERR_FILENO), STDERR_FILENO);
  }
  ~PipeAsStderr() {
    do {
      (void)Read();
      StderrSink().Flush();
    } while (Read() != "");
    (void)::dup2(stderr_, STDERR_FILENO);
    for (const int fd : {stderr_, ends_[0], ends_[1]}) ::close(fd);
  }

  /// Until not one byte more has room.
  void Fill() const {
    const int flags = ::fcntl(ends_[1], F_GETFL);
    ::fcntl(ends_[1], F_SETFL, flags | O_NONBLOCK);
    for (const size_t n : {size_t{4096}, size_t{1}}) {
      const std::string dots(n, '.');
      while (::write(ends_[1], dots.data(), n) > 0) {
      }
    }
    ::fcntl(ends_[1], F_SETFL, flags);
  }

  /// What there is to read now, without the filling.
  std::string Read() const {
    std::string text;
    std::vector<char> bytes(1 << 16);
    for (pollfd in{ends_[0], POLLIN, 0}; ::poll(&in, 1, 0) > 0;) {
      const ssize_t n = ::read(ends_[0], bytes.data(), bytes.size());
      if (n <= 0) break;
      text.append(bytes.data(), static_cast<size_t>(n));
    }
    return text.substr(std::min(text.size(), text.find_first_not_of('.')));
  }

 private:
  int stderr_;
  int ends_[2] = {};
};

/// Runs `body` on a thread of its own. @return whether it ended while stderr was full.
template <class Body>
bool EndsWhileFull(const PipeAsStderr& pipe, const Body& body) {
  std::future<void> ended = std::async(std::launch::async, body);
  const bool in_time = ended.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
  while (ended.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready) {
    (void)pipe.Read();  // so that the test fails instead of hanging
  }
  return in_time;
}

TEST(StderrSink, WritesLaterWhatAFullPipeDoesNotTakeNow) {
  PipeAsStderr pipe;
  pipe.Fill();
  ASSERT_TRUE(EndsWhileFull(pipe, [] {
    for (int i = 0; i < 3; ++i) StderrSink().Line("line " + std::to_string(i) + "\n");
  })) << "a line waited for room in the pipe";
  EXPECT_EQ(pipe.Read(), "");
  StderrSink().Flush();
  EXPECT_EQ(pipe.Read(), "line 0\nline 1\nline 2\n");
}

TEST(StderrSink, CountsTheLinesForWhichItHasNoRoomEither) {
  PipeAsStderr pipe;
  pipe.Fill();
  const std::string line = std::string(999, 'x') + "\n";
  ASSERT_TRUE(EndsWhileFull(pipe, [&] {
    for (int i = 0; i < 100; ++i) StderrSink().Line(line);
  }));
  (void)pipe.Read();
  StderrSink().Line("after\n");
  std::string text;
  for (int i = 0; i < 100 && !text.ends_with("after\n"); ++i) {
    StderrSink().Flush();
    text += pipe.Read();
  }
  const auto kept = static_cast<int>(text.find('[') / line.size());
  EXPECT_GT(kept, 10);
  EXPECT_LT(kept, 100);
  EXPECT_THAT(text, testing::EndsWith("x\n[farandole] warning: " + std::to_string(100 - kept) +
                                      " lines lost, as stderr was not read\nafter\n"));
}

TEST(StderrSink, WritesALineLargerThanThePipe) {
  PipeAsStderr pipe;
  const std::string line = std::string(300'000, 'x') + "\n";
  ASSERT_TRUE(EndsWhileFull(pipe, [&] { StderrSink().Line(line); }));
  std::string text;
  for (int i = 0; i < 100 && text.size() < line.size(); ++i) {
    text += pipe.Read();
    StderrSink().Flush();
  }
  EXPECT_EQ(text, line);
}

TEST(StderrSink, LeavesTheFlagsOfStderrToTheProcessesThatShareIt) {
  PipeAsStderr pipe;
  pipe.Fill();
  const int before = ::fcntl(STDERR_FILENO, F_GETFL);
  ASSERT_TRUE(EndsWhileFull(pipe, [] { StderrSink().Line("x\n"); }));
  EXPECT_EQ(::fcntl(STDERR_FILENO, F_GETFL), before);
}

TEST(StderrSink, WritesInAForkedChildWhatTheChildSays) {
  PipeAsStderr pipe;
  pipe.Fill();
  std::atomic<bool> stop = false;
  std::thread chatter([&] {
    while (!stop.load()) StderrSink().Line("of the parent\n");
  });
  int ended = 0;
  for (int i = 0; i < 100; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(5);  // ends a child that hangs
      StderrSink().Line("of a child\n");
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) ++ended;
    if (ended <= i) break;
  }
  stop.store(true);
  while (pipe.Read() != "") {
  }
  chatter.join();
  EXPECT_EQ(ended, 100) << "a forked child hangs in its first line";
  const pid_t child = ::fork();
  if (child == 0) {
    (void)pipe.Read();
    StderrSink().Line("of a child\n");
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(pipe.Read(), "of a child\n") << "what the parent has to write is the parent's";
}

TEST(StderrSink, DoesNotWaitAtAPipeThatItMayNotOpen) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  PipeAsStderr pipe;
  for (const bool full : {true, false}) {
    if (full) pipe.Fill();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(5);
      const bool other = ::setuid(65534) == 0;
      StderrSink().Line("of another user\n");
      ::_exit(other ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_EQ(pipe.Read(), full ? "" : "of another user\n");
  }
}

TEST(StderrSinkDeathTest, SaysTheLastLineBeforeAnAbort) {
  EXPECT_DEATH(
      {
        StderrSink().Line("last words\n");
        std::abort();
      },
      "last words");
}

TEST(StderrSink, WaitsForAReaderAtTheEndOfTheProcessButNotForLong) {
  PipeAsStderr pipe;
  for (const bool reads : {true, false}) {
    pipe.Fill();
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(10);
      StderrSink().Line("last words\n");
      std::exit(0);
    }
    std::string text;
    int status = 0;
    while (::waitpid(child, &status, WNOHANG) == 0) {
      if (reads) text += pipe.Read();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(WIFEXITED(status)) << "the end of the process waits for a reader of stderr";
    text += pipe.Read();
    if (reads) {
      EXPECT_EQ(text, "last words\n");
    }
  }
}

}  // namespace
}  // namespace farandole
