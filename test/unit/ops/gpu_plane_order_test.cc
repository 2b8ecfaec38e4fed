// The line in which the CUDA plane runs the batches of all sets, and how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "test/unit/ops/gpu_plane_fixture.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;

TEST_F(GpuPlaneTest, LaunchesTheBatchesOfAllSetsInTheOrderStarted) {
  Open();
  Warm();
  scripts_[0].may_launch = false;
  Start(0, 7);
  Start(0, 8);
  Start(0, 7);
  StepOften();
  EXPECT_THAT(scripts_[0].calls, ElementsAre("begin 2"));
  scripts_[0].may_launch = true;
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_THAT(scripts_[0].calls,
              ElementsAre("begin 2", "launch 2", "begin 3", "launch 3", "begin 4", "launch 4"));
}

TEST_F(GpuPlaneTest, IsLaunchedBeforeItsEndAndDoneAfterItAndInOrder) {
  Open();
  Warm();
  plane(0).HoldStreams();
  Given& first = Start(0, 7);
  Given& second = Start(0, 8);
  Launch(first);
  ASSERT_NE(first.operation->end(), nullptr);
  Launch(second);
  StepOften();
  EXPECT_EQ(first.last.state, State::kWaiting);
  EXPECT_GE(first.last.poll_after_ns, 50'000);
  EXPECT_TRUE(StepUntil([&] { return first.last.poll_after_ns > 50'000; }));  // it takes long
  EXPECT_LE(first.last.poll_after_ns, 1'000'000);
  EXPECT_FALSE(first.last.for_inputs);
  EXPECT_EQ(second.last.state, State::kWaiting);
  EXPECT_EQ(second.last.poll_after_ns, kByDoorbell);  // the first one polls for both
  plane(0).device().ReleaseStreams();
  EXPECT_TRUE(StepUntil([&] { return first.last.state == State::kDone; }));
  EXPECT_TRUE(StepUntil([&] { return second.last.state == State::kDone; }));
}

TEST_F(GpuPlaneTest, IsNotDoneBeforeAnEarlierBatchIs) {
  Open();
  Warm();
  Given& first = Start(0, 7);
  Given& second = Start(0, 8);
  Launch(first);
  Launch(second);
  plane(0).Synchronize();  // both ends are complete
  for (int i = 0; i < 10; ++i) EXPECT_NE(Step(second).state, State::kDone);
  EXPECT_EQ(Step(first).state, State::kDone);
  EXPECT_EQ(Step(second).state, State::kDone);
}

TEST_F(GpuPlaneTest, SaysThatItWaitsForInputsWhileTheProducerIsLate) {
  Open();
  Warm();
  Ready events[1];
  FakeStream* const producer = HoldProducer(events[0]);
  Given& late = Start(0, 7, {4}, events);
  Given& behind = Start(0, 8);
  StepOften();
  EXPECT_EQ(late.last.state, State::kWaiting);
  EXPECT_TRUE(late.last.for_inputs);
  EXPECT_TRUE(behind.last.for_inputs);
  producer->Release();
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
}

TEST_F(GpuPlaneTest, StopsSayingSoOnceTheInputsAreThere) {
  Open();
  Warm();
  const Ready events[] = {
      plane(0).device().CreateEvent().value()};  // never recorded: there already
  plane(0).HoldStreams();
  Given& given = Start(0, 7, {4}, events);
  Launch(given);
  EXPECT_TRUE(Step(given).for_inputs);
  FakeStream::Find(scripts_[0].stream->stream())
      ->LetPass(1);  // the mark of the inputs, not the end
  EXPECT_TRUE(StepUntil([&] { return !given.last.for_inputs; }));
  EXPECT_EQ(given.last.state, State::kWaiting);
  plane(0).device().ReleaseStreams();
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
}

TEST_F(GpuPlaneTest, ABatchInLineMovesWhenTheLineDoes) {
  Open();
  Warm();
  scripts_[0].may_launch = false;
  Given& first = Start(0, 7);
  Given& second = Start(0, 8);
  StepOften();
  EXPECT_EQ(second.last.state, State::kWaiting);
  Given& third = Start(0, 7);
  EXPECT_EQ(Step(third).state, State::kWaiting);
  scripts_[0].may_launch = true;
  Launch(first);
  EXPECT_EQ(Step(third).state, State::kMoved);
  EXPECT_EQ(Step(third).state, State::kWaiting);
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
}

TEST_F(GpuPlaneTest, AnAbandonedBatchTakesAllOthersAlong) {
  Open();
  Warm();
  plane(0).HoldStreams();
  Given& launched = Start(0, 7);
  Launch(launched);
  scripts_[0].may_launch = false;
  Given& begun = Start(0, 8);
  Step(begun);
  Abandon(begun);
  EXPECT_THAT(scripts_[0].calls,
              ElementsAre("begin 2", "launch 2", "begin 3", "abandon", "abandon"));  // of both sets
  EXPECT_EQ(Step(launched).state, State::kFailed);
  EXPECT_EQ(launched.last.status.code(), Code::kAborted);
  EXPECT_EQ(plane(0).Start(launched.batch).status().code(), Code::kAborted);
}

TEST_F(GpuPlaneTest, ReportsADeviceThatFails) {
  Open();
  Warm();
  plane(0).HoldStreams();
  Given& given = Start(0, 7);
  Launch(given);
  plane(0).device().FailDevice();
  EXPECT_EQ(Step(given).state, State::kFailed);
  EXPECT_EQ(given.last.status.code(), Code::kInternal);
}

}  // namespace
}  // namespace farandole
