#include "coordinator/engine/caller_threads.h"

#include <gtest/gtest.h>

#include <memory>
#include <tuple>

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

TEST(CallerThreads, KnowAllIfAsManyHaveCalledAsThereAre) {
  CallerThreads threads;
  const auto work = std::make_shared<Work>();
  for (const auto& [program, helpers, knows_all] :
       {std::tuple(0, 0, false), {1, 0, true}, {1, 1, false}, {2, 0, false}}) {
    CallerThreads::WaitInSlices(program, helpers);
    CallerThreads::Waiting waiting(threads, *work, true);
    waiting.Sleeps();
    EXPECT_EQ(threads.KnowsAll(), knows_all) << program << ", " << helpers;
    EXPECT_EQ(threads.AllWait(), program < 2);
  }
  CallerThreads::WaitInSlices(0, 0);
}

// The last test: it cannot be taken back.
TEST(CallerThreads, CountOnlyWaitingOnesWhereAskedTo) {
  CallerThreads threads;
  threads.Enter();
  EXPECT_EQ(threads.Ids().size(), 1U);
  CallerThreads::CountOnlyWaiting();
  threads.Enter();
  EXPECT_TRUE(threads.Ids().empty()) << "it does not wait";
  const auto work = std::make_shared<Work>();
  {
    CallerThreads::Waiting waiting(threads, *work, true);
    waiting.Sleeps();
    EXPECT_TRUE(threads.AllWait());
    ASSERT_TRUE(work->Finish(Status()));
  }
  EXPECT_TRUE(threads.Ids().empty());
}

}  // namespace
}  // namespace farandole
