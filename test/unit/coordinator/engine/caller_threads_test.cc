#include "coordinator/engine/caller_threads.h"

#include <gtest/gtest.h>

#include <memory>

namespace farandole {
namespace {

TEST(CallerThreads, CountNoWaitForWorkThatHasEnded) {
  CallerThreads threads;
  const auto work = std::make_shared<Work>();
  EXPECT_FALSE(threads.AllWait()) << "nobody has called";
  CallerThreads::Waiting waiting(threads, *work, true);
  EXPECT_FALSE(threads.AllWait()) << "the wait may be short";
  waiting.Sleeps();
  EXPECT_TRUE(threads.AllWait());
  ASSERT_TRUE(work->Finish(Status()));
  EXPECT_FALSE(threads.AllWait()) << "the thread has not woken, but is about to";
}

TEST(CallerThreads, CountNoWaitWithALimit) {
  CallerThreads threads;
  const auto work = std::make_shared<Work>();
  CallerThreads::Waiting waiting(threads, *work, false);
  waiting.Sleeps();
  EXPECT_FALSE(threads.AllWait());
}

}  // namespace
}  // namespace farandole
