#include "coordinator/engine/callback_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "coordinator/engine/work.h"

namespace farandole {
namespace {

TEST(CallbackThreads, KeepNoWorksThatHaveEndedBehindOneThatHasNot) {
  CallbackThreads threads([](const Work& work) { work.SleepUntilDone(-1); });
  const auto start = [&threads] {
    auto work = std::make_shared<Work>();
    std::unique_ptr<Callback> callback = threads.Make([](const Status&) {});
    EXPECT_TRUE(work->AddCallback(callback));
    threads.WaitFor(work);
    return work;
  };
  const std::shared_ptr<Work> first = start();
  std::vector<std::weak_ptr<Work>> ended;
  for (int i = 0; i < 1000; ++i) {
    const std::shared_ptr<Work> work = start();
    ended.push_back(work);
    EXPECT_TRUE(work->Finish(Status()));
  }
  EXPECT_LT(std::ranges::count_if(ended, [](const auto& work) { return !work.expired(); }), 200);
  EXPECT_TRUE(first->Finish(Status()));
}

}  // namespace
}  // namespace farandole
