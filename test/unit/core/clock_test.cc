#include "core/clock.h"

#include <gtest/gtest.h>

namespace farandole {
namespace {

TEST(SteadyClock, NeverRunsBackwards) {
  const Clock& clock = SteadyClock();
  int64_t before = clock.NowNs();
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = clock.NowNs();
    ASSERT_GE(now, before);
    before = now;
  }
  EXPECT_LT(before, kNever);
}

TEST(SteadyClock, IsOneClockForTheWholeProcess) { EXPECT_EQ(&SteadyClock(), &SteadyClock()); }

}  // namespace
}  // namespace farandole
