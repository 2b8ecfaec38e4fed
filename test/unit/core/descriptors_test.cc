#include "core/descriptors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>

namespace farandole {
namespace {

using testing::HasSubstr;

/// The limits of this process, as they were once the test ends.
class Limits {
 public:
  explicit Limits(rlim_t soft) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit lower{soft, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &lower), 0);
  }
  ~Limits() { (void)setrlimit(RLIMIT_NOFILE, &before_); }
  rlim_t hard() const { return before_.rlim_max; }
  static rlim_t Soft() {
    rlimit now{};
    (void)getrlimit(RLIMIT_NOFILE, &now);
    return now.rlim_cur;
  }

 private:
  rlimit before_{};
};

TEST(SystemError, ALackIsOfThisRankAndNoPeersFault) {
  for (const int error : {EMFILE, ENFILE, ENOBUFS, ENOMEM}) {
    EXPECT_EQ(SystemError("open", error).code(), Code::kResourceExhausted) << error;
  }
  for (const int error : {ECONNREFUSED, ECONNRESET, EPIPE, ETIMEDOUT}) {
    EXPECT_EQ(SystemError("open", error).code(), Code::kUnavailable) << error;
  }
  EXPECT_EQ(SystemError("send", EPIPE).message(), "send: Broken pipe");
}

TEST(ReserveDescriptors, RaisesTheLimitAsFarAsItIsNeeded) {
  const Limits limits(40);
  EXPECT_TRUE(ReserveDescriptors(100).ok());
  EXPECT_GT(Limits::Soft(), 100u);
  EXPECT_LE(Limits::Soft(), 1000u);
  const rlim_t raised = Limits::Soft();
  EXPECT_TRUE(ReserveDescriptors(1).ok());
  EXPECT_EQ(Limits::Soft(), raised);
}

TEST(ReserveDescriptors, SaysHowManyThereAreAndAreNeeded) {
  const Limits limits(40);
  if (limits.hard() > 1 << 30) GTEST_SKIP() << "no limit that could be too low";
  const Status outcome = ReserveDescriptors(static_cast<int64_t>(limits.hard()));
  EXPECT_EQ(outcome.code(), Code::kResourceExhausted);
  EXPECT_THAT(outcome.message(),
              HasSubstr("can have " + std::to_string(limits.hard()) + " (ulimit -Hn)"));
  EXPECT_EQ(Limits::Soft(), limits.hard());
  EXPECT_THAT(SystemError("socket", EMFILE).message(),
              HasSubstr("Too many open files; this process has all " +
                        std::to_string(limits.hard()) + " descriptors that it may have"));
}

}  // namespace
}  // namespace farandole
