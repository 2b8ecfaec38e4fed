#include "test/fakes/fake_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FakeDeviceTest : public ::testing::Test {
 protected:
  FakeDevice& device(int index = 0) { return runtime_.fake(index); }
  std::shared_ptr<DeviceEvent> NewEvent(int index = 0) {
    return device(index).CreateEvent().value();
  }
  static bool IsComplete(DeviceEvent& event) { return event.IsComplete().value(); }

  FakeDeviceRuntime runtime_{2};
};

TEST_F(FakeDeviceTest, RunsCommandsLaterAndInOrder) {
  FakeStream* stream = device().NewStream();
  stream->Hold();
  std::vector<int> order;
  for (int i : {1, 2, 3}) stream->Enqueue("a test", [&order, i] { order.push_back(i); });
  EXPECT_EQ(stream->executed(), 0);
  stream->Release();
  stream->Synchronize();
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST_F(FakeDeviceTest, AWaitingStreamSeesALateWrite) {
  FakeStream* producer = device().NewStream();
  const StreamHandle consumer = device().CreateStream().value();
  float from = 0.0f, to = 0.0f;
  producer->Hold();
  producer->Enqueue("a late write", [&from] { from = 7.0f; });
  const auto ready = NewEvent(), end = NewEvent();
  ASSERT_TRUE(ready->Record(producer->handle()).ok());
  ASSERT_TRUE(ready->MakeWait(consumer).ok());
  ASSERT_TRUE(device().Copy(&to, &from, sizeof to, consumer).ok());
  ASSERT_TRUE(end->Record(consumer).ok());
  EXPECT_FALSE(IsComplete(*end));
  producer->Release();
  FakeStream::Find(consumer)->Synchronize();
  EXPECT_TRUE(IsComplete(*end));
  EXPECT_EQ(to, 7.0f);
}

TEST_F(FakeDeviceTest, AStreamThatDoesNotWaitMissesALateWrite) {
  FakeStream* producer = device().NewStream();
  const StreamHandle consumer = device().CreateStream().value();
  float from = 0.0f, to = -1.0f;
  producer->Hold();
  producer->Enqueue("a late write", [&from] { from = 7.0f; });
  ASSERT_TRUE(device().Copy(&to, &from, sizeof to, consumer).ok());
  FakeStream::Find(consumer)->Synchronize();
  EXPECT_EQ(to, 0.0f);
  producer->Release();
  producer->Synchronize();  // its write ends before `from` does
}

TEST_F(FakeDeviceTest, AWaitKeepsItsMomentWhenTheEventIsRecordedAgain) {
  FakeStream* early = device().NewStream();
  FakeStream* late = device().NewStream();
  FakeStream* waiting = device().NewStream();
  const auto event = NewEvent();
  ASSERT_TRUE(event->Record(early->handle()).ok());
  ASSERT_TRUE(event->MakeWait(waiting->handle()).ok());
  late->Hold();
  ASSERT_TRUE(event->Record(late->handle()).ok());
  waiting->Synchronize();  // would hang if it waited for the newer record
  EXPECT_FALSE(IsComplete(*event));
  late->Release();
}

TEST_F(FakeDeviceTest, ANullStreamIsTheDefaultStream) {
  const auto event = NewEvent();
  ASSERT_TRUE(event->MakeWait(device().NewStream()->handle()).ok());
  EXPECT_TRUE(IsComplete(*event)) << "never recorded: nobody waits";
  device().default_stream()->Hold();
  ASSERT_TRUE(event->Record(nullptr).ok());
  EXPECT_FALSE(IsComplete(*event));
  device().default_stream()->Release();
  device().default_stream()->Synchronize();
  EXPECT_TRUE(IsComplete(*event));
}

TEST_F(FakeDeviceTest, StreamsOfTwoDevicesWaitForEachOther) {
  FakeStream* producer = device(0).NewStream();
  FakeStream* consumer = device(1).NewStream();
  producer->Hold();
  const auto event = NewEvent(0);
  ASSERT_TRUE(event->Record(producer->handle()).ok());
  ASSERT_TRUE(event->MakeWait(consumer->handle()).ok());
  EXPECT_THAT(event->Record(consumer->handle()).message(), HasSubstr("was used on device 0"));
  EXPECT_FALSE(consumer->Idle());
  producer->Release();
  consumer->Synchronize();
}

TEST_F(FakeDeviceTest, CastsTakeOneLaunchPerThousandTensorsAndNoneForNoElements) {
  FakeStream* stream = device().NewStream();
  std::vector<float> in(1025, 3.0f), out(1025);
  std::vector<CastItem> items;
  for (size_t i = 0; i < in.size(); ++i) items.push_back({&in[i], &out[i], 1});
  items[5].in = nullptr;
  items.push_back({});
  CastSpec spec;
  spec.scale = 0.5;
  spec.op = ReduceOp::kProduct;
  int launches = 0;
  ASSERT_TRUE(device().Cast(items, spec, stream->handle(), &launches).ok());
  EXPECT_EQ(launches, 2);
  ASSERT_TRUE(device().Cast({}, spec, stream->handle(), &launches).ok());
  EXPECT_EQ(launches, 0);
  items.clear();
  stream->Synchronize();
  EXPECT_EQ(out[0], 1.5f);
  EXPECT_EQ(out[5], 1.0f) << "the identity of a product";
  EXPECT_EQ(out[1024], 1.5f);
  EXPECT_EQ(device().counts().launches, 2);
  EXPECT_EQ(device().counts().items, 1025);
}

TEST_F(FakeDeviceTest, AFailedDeviceExecutesNothingAndHangsNobody) {
  FakeStream* stream = device().NewStream();
  const auto event = NewEvent();
  stream->Hold();
  float from = 1.0f, to = 0.0f;
  ASSERT_TRUE(device().Copy(&to, &from, sizeof to, stream->handle()).ok());
  ASSERT_TRUE(event->Record(stream->handle()).ok());
  device().FailDevice();
  stream->Release();
  stream->Synchronize();
  EXPECT_EQ(to, 0.0f);
  EXPECT_EQ(event->IsComplete().status().code(), Code::kInternal);
  EXPECT_FALSE(device().Copy(&to, &from, sizeof to, stream->handle()).ok());
  EXPECT_TRUE(NewEvent(1)->IsComplete().ok()) << "other devices go on";
}

TEST_F(FakeDeviceTest, FreeWaitsUntilTheMemoryIsNotUsed) {
  FakeStream* stream = device().NewStream();
  auto* memory = static_cast<int*>(device().Allocate(sizeof(int)).value());
  stream->SlowDown(2000);
  int seen = 0;
  stream->Enqueue("a late use", [memory, &seen] { seen = *memory = 5; });
  device().Free(memory);
  EXPECT_EQ(seen, 5);
  EXPECT_EQ(device().counts().host_waits, 1);
}

__attribute__((no_sanitize("address"))) void WriteUnseen(void* memory, int64_t offset) {
  static_cast<volatile unsigned char*>(memory)[offset] = 0;
}

TEST_F(FakeDeviceTest, NoticesWritesBesideABlock) {
  void* memory = device().Allocate(10).value();
  WriteUnseen(memory, 10);
  device().Free(memory);
  EXPECT_THAT(device().TakeMisuses(), ElementsAre(HasSubstr("bytes after a block")));
  void* pinned = device().AllocatePinned(10).value();
  WriteUnseen(pinned, -1);
  device().FreePinned(pinned);
  EXPECT_THAT(device().TakeMisuses(), ElementsAre(HasSubstr("bytes before a block")));
}

TEST_F(FakeDeviceTest, NoticesMemoryAndStreamsGivenBackTwice) {
  void* memory = device().Allocate(10).value();
  device().Free(memory);
  device().Free(memory);
  EXPECT_THAT(device().TakeMisuses(), ElementsAre(HasSubstr("no longer, allocated")));
  const StreamHandle stream = device().CreateStream().value();
  device().DestroyStream(stream);
  EXPECT_THAT(device().TakeMisuses(), IsEmpty());
  device().DestroyStream(stream);
  EXPECT_THAT(device().TakeMisuses(), ElementsAre(HasSubstr("not a stream, or destroyed")));
}

TEST_F(FakeDeviceTest, ADestroyedStreamStillRunsWhatItHolds) {
  const StreamHandle handle = device().CreateStream().value();
  FakeStream* stream = FakeStream::Find(handle);
  stream->Hold();
  const auto end = NewEvent();
  ASSERT_TRUE(end->Record(handle).ok());
  device().DestroyStream(handle);
  EXPECT_FALSE(end->Record(handle).ok());
  EXPECT_FALSE(IsComplete(*end));
  stream->Release();
  stream->Synchronize();
  EXPECT_TRUE(IsComplete(*end));
  EXPECT_EQ(device().counts().live_streams, 0);
}

TEST_F(FakeDeviceTest, CapturesInsteadOfRunningAndReplays) {
  FakeStream* stream = device().NewStream();
  FakeStream* other = device().NewStream();
  int runs = 0;
  stream->BeginCapture();
  EXPECT_TRUE(device().IsCapturing(stream->handle()).value());
  stream->Enqueue("a captured call", [&runs] { ++runs; });
  const auto inside = NewEvent();
  ASSERT_TRUE(inside->Record(stream->handle()).ok());
  EXPECT_THAT(inside->IsComplete().status().message(), HasSubstr("in a capturing stream"));
  EXPECT_FALSE(inside->MakeWait(other->handle()).ok());
  const FakeStream::Graph graph = stream->EndCapture();
  EXPECT_FALSE(device().IsCapturing(stream->handle()).value());
  stream->Synchronize();
  EXPECT_EQ(runs, 0);
  stream->Launch(graph);
  stream->Launch(graph);
  stream->Synchronize();
  EXPECT_EQ(runs, 2);
}

TEST_F(FakeDeviceTest, TheCurrentDeviceIsTheThreadsOwn) {
  ASSERT_TRUE(runtime_.Open(1).value()->MakeCurrent().ok());
  EXPECT_EQ(farandole_fake_current_device(), device(1).driver());
  std::thread([] { EXPECT_EQ(farandole_fake_current_device(), nullptr); }).join();
  EXPECT_EQ(runtime_.opened(), 1);
  EXPECT_EQ(runtime_.Open(2).status().code(), Code::kInvalidArgument);
}

TEST_F(FakeDeviceTest, AnEventOutlivesItsDevice) {
  auto runtime = std::make_unique<FakeDeviceRuntime>(1);
  const auto event = runtime->fake(0).CreateEvent().value();
  runtime->fake(0).default_stream()->Hold();
  ASSERT_TRUE(event->Record(nullptr).ok());
  runtime.reset();
  EXPECT_TRUE(IsComplete(*event));
  EXPECT_FALSE(event->Record(nullptr).ok());
}

TEST(FakeDeviceDeathTest, ADeviceThatWasMisusedDoesNotEndSilently) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        FakeDeviceRuntime runtime(1);
        runtime.fake(0).DestroyStream(&runtime);
      },
      "ends with misuses");
}

}  // namespace
}  // namespace farandole
