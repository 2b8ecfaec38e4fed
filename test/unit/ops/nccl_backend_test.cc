// Order, errors and memory of batches over NCCL, with one rank of a scripted NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "ops/gpu/nccl/backend.h"
#include "test/fakes/fake_device.h"
#include "test/unit/ops/scripted_nccl.h"

namespace farandole {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

/// A batch of float tensors of one rank, 1, 2, 3, ... each.
struct Tensors {
  explicit Tensors(std::vector<int64_t> counts) {
    for (int64_t count : counts) {
      data.emplace_back(static_cast<size_t>(count));
      std::iota(data.back().begin(), data.back().end(), 1.0f);
      batch.count += count;
    }
    for (std::vector<float>& one : data) {
      segments.push_back({one.data(), one.data(), static_cast<int64_t>(one.size())});
    }
    batch.ranks = ranks;
    batch.segments = segments;
    batch.device = DeviceKind::kCuda;
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  const std::vector<int> ranks = {0, 1};
  std::vector<std::vector<float>> data;
  std::vector<Segment> segments;
  Batch batch;
};

class NcclBackendTest : public ::testing::Test {
 protected:
  explicit NcclBackendTest(bool registers = false) {
    queue_ =
        std::make_unique<LaunchQueue>(LaunchStreams::Create(device(), &counters_).value(), nullptr);
    NcclSetOptions options;
    options.unique_id.assign(128, 'u');
    options.ranks_text = "rank 0: host a";
    options.registers = registers;
    backend_ = MakeNcclBackend(*nccl_.library(), *queue_, options, /*slice_bytes=*/1 << 20);
    // When this is launched the communicator is up, and the launch thread rests until the next one.
    const Tensors nothing({0});
    Launch(nothing);
  }
  ~NcclBackendTest() override { End(); }
  /// What a test looks at in `nccl_` stands still from now on.
  void End() {
    backend_ = nullptr;
    if (queue_ != nullptr) (void)queue_->Stop(-1);
    queue_ = nullptr;
  }

  FakeDevice& device() { return runtime_.fake(0); }
  /// Both ranks contribute the same: the scripted sum is twice the one.
  void SumFloats() {
    nccl_.when_reducing = [](ScriptedNccl::Reduction one) {
      FakeStream::Find(one.stream)->Enqueue("a sum", [one] {
        for (size_t i = 0; i < one.count; ++i) {
          static_cast<float*>(one.out)[i] = 2 * static_cast<const float*>(one.in)[i];
        }
      });
    };
  }
  std::shared_ptr<LaunchTask> Launch(const Tensors& tensors) {
    std::shared_ptr<LaunchTask> task = backend_->Begin(tensors.batch).value();
    while (!task->launched() && !queue_->failed()) std::this_thread::yield();
    return task;
  }
  void Finish(const Tensors& tensors) {
    const std::shared_ptr<LaunchTask> task = Launch(tensors);
    ASSERT_FALSE(queue_->failed()) << queue_->failure().ToString();
    while (!task->end->IsComplete().value()) std::this_thread::yield();
  }

  FakeDeviceRuntime runtime_{1};
  ScriptedNccl nccl_;
  Counters counters_;
  std::unique_ptr<LaunchQueue> queue_;
  std::unique_ptr<GpuBackend> backend_;
};

TEST_F(NcclBackendTest, PacksReducesLooksForPoisonAndUnpacksInThreeLaunches) {
  SumFloats();
  Tensors tensors({3, 2});
  Finish(tensors);
  EXPECT_EQ(tensors.data[0], (std::vector<float>{2, 4, 6}));
  EXPECT_EQ(tensors.data[1], (std::vector<float>{2, 4}));
  EXPECT_EQ(counters_.Get(Counter::kDeviceLaunches), 3);
}

TEST_F(NcclBackendTest, LetsNcclReadAndWriteOneTensorAsItIs) {
  SumFloats();
  Tensors tensors({1000});
  Finish(tensors);
  EXPECT_EQ(tensors.data[0][999], 2000);
  EXPECT_EQ(device().counts().live_blocks, 1) << "the flag that poisons results";
  EXPECT_EQ(counters_.Get(Counter::kBytesCopied), 0);
}

TEST_F(NcclBackendTest, ReadsWhatALateProducerWrites) {
  SumFloats();
  Tensors tensors({3, 2});
  FakeStream* producer = device().NewStream();
  producer->Hold();
  producer->Enqueue("a late write", [&] { tensors.data[0].assign(3, 5.0f); });
  const std::shared_ptr<DeviceEvent> ready[] = {device().CreateEvent().value()};
  ASSERT_TRUE(ready[0]->Record(producer->handle()).ok());
  tensors.batch.ready = ready;
  const std::shared_ptr<LaunchTask> task = Launch(tensors);
  EXPECT_FALSE(task->inputs->IsComplete().value());
  producer->Release();
  while (!task->end->IsComplete().value()) std::this_thread::yield();
  EXPECT_THAT(tensors.data[0], Each(10.0f));
}

TEST_F(NcclBackendTest, UsesTwoBuffersInTurnAndKeepsThem) {
  SumFloats();
  for (int i = 0; i < 5; ++i) {
    Tensors tensors({3, 2});
    Finish(tensors);
  }
  EXPECT_EQ(device().counts().live_blocks, 3) << "and the flag that poisons results";
  End();
  EXPECT_EQ(device().counts().live_blocks, 0);
}

TEST_F(NcclBackendTest, DividesALargeBatchIntoSlicesOfOneBuffer) {
  SumFloats();
  Tensors tensors({1'000'000, 7, 500'000});  // 6 MB in slices of 1 MiB
  Finish(tensors);
  for (const std::vector<float>& one : tensors.data) {
    for (size_t i = 0; i < one.size(); ++i) ASSERT_EQ(one[i], 2 * static_cast<float>(i + 1)) << i;
  }
  End();
  EXPECT_EQ(nccl_.CountOf("AllReduce"), 6);
  EXPECT_LE(device().counts().of(FakeCall::kAllocate), 3) << "the flag and two buffers";
}

TEST_F(NcclBackendTest, ReusesABufferOnlyWhenItsLastResultIsUnpacked) {
  SumFloats();
  device().streams().at(2)->Hold();  // unpack
  Tensors first({3, 2}), second({3, 2}), third({3, 2});
  Launch(first);
  Launch(second);
  const std::shared_ptr<LaunchTask> last = Launch(third);
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  EXPECT_FALSE(device().streams().at(0)->Idle()) << "the third one waits for the first";
  device().ReleaseStreams();
  while (!last->end->IsComplete().value()) std::this_thread::yield();
  EXPECT_EQ(first.data[0], (std::vector<float>{2, 4, 6}));
  EXPECT_EQ(second.data[0], (std::vector<float>{2, 4, 6}));
}

TEST_F(NcclBackendTest, EndsTheQueueAtAFailedCallAndAbortsOnce) {
  Tensors tensors({2, 2});
  nccl_.answers["AllReduce"] = {NcclResult::kInternalError};
  Launch(tensors);
  EXPECT_THAT(std::string(queue_->failure().message()),
              HasSubstr("ncclAllReduce: unhandled error; NCCL 2.32.3"));
  Launch(tensors);  // finds that it has failed
  End();
  EXPECT_EQ(nccl_.CountOf("AllReduce"), 1);
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
  EXPECT_EQ(nccl_.CountOf("CommFinalize"), 0);
}

TEST_F(NcclBackendTest, AbortsWhenTheDeviceFailsSoThatPeersDoNotWait) {
  Tensors tensors({2, 2});
  device().FailCall(FakeCall::kCast, 2);
  Launch(tensors);
  EXPECT_EQ(queue_->failure().code(), Code::kInternal);
  End();
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
}

TEST_F(NcclBackendTest, SaysThatThereIsNoMemory) {
  device().FailCall(FakeCall::kAllocate, 1);
  Tensors tensors({2, 2});
  Launch(tensors);
  EXPECT_EQ(queue_->failure().code(), Code::kResourceExhausted);
  EXPECT_THAT(std::string(queue_->failure().message()), HasSubstr("2097152 bytes"));
}

TEST_F(NcclBackendTest, LooksForErrorsWhileABatchIsInFlight) {
  Tensors tensors({2, 2});
  device().streams().at(1)->Hold();
  nccl_.states = {NcclResult::kRemoteError};
  Launch(tensors);
  while (!queue_->failed()) std::this_thread::yield();
  EXPECT_EQ(queue_->failure().code(), Code::kUnavailable);
  device().ReleaseStreams();
  End();
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
}

TEST_F(NcclBackendTest, CallsNothingForABatchWithoutElements) {
  Tensors tensors({0, 0});
  Finish(tensors);
  End();
  EXPECT_THAT(nccl_.calls, Not(Contains("AllReduce")));
}

TEST_F(NcclBackendTest, FinalizesAndDestroysAtItsEnd) {
  Tensors tensors({2, 2});
  Finish(tensors);
  End();
  EXPECT_THAT(nccl_.calls,
              ElementsAre("CommInitRankConfig", "AllReduce", "CommFinalize", "CommDestroy"));
}

TEST_F(NcclBackendTest, RefusesBitwiseOpsByNameAndGoesOn) {
  SumFloats();
  Tensors bits({4}), sums({4});
  bits.batch.dtype = bits.batch.wire = DType::kInt32;
  bits.batch.op = ReduceOp::kBitOr;
  const Status refused = backend_->Begin(bits.batch).status();
  EXPECT_EQ(refused.code(), Code::kUnimplemented);
  EXPECT_THAT(refused.message(), StartsWith("allreduce on a GPU: NCCL has no bit_or"));
  Finish(sums);
  EXPECT_EQ(sums.data[0][3], 8.0f);
}

TEST_F(NcclBackendTest, NamesTheCallThatFails) {
  const std::vector<int64_t> different = {3, 1};
  Tensors tensors({4});
  tensors.batch.kind = OpKind::kAllgather;
  tensors.batch.splits = different;
  nccl_.answers["Broadcast"] = {NcclResult::kInternalError};
  Launch(tensors);
  EXPECT_THAT(std::string(queue_->failure().message()), StartsWith("ncclBroadcast: "));
}

class NcclRegisteredTest : public NcclBackendTest {
 protected:
  NcclRegisteredTest() : NcclBackendTest(/*registers=*/true) {}
};

TEST_F(NcclRegisteredTest, FreesMemoryOnlyWhenItsResultsAreUnpackedAlsoAfterAFailure) {
  SumFloats();
  FakeStream& unpack = *device().streams().at(2);
  std::atomic<int> ended{0}, freed{0}, in_use{0};
  nccl_.when_ending = [&](std::string_view call) {
    if (call == "CommDestroy") ++ended;
    if (call == "MemFree") ++(unpack.Idle() ? freed : in_use);
  };
  unpack.Hold();  // as behind a batch of another set, whose peers do not come
  const Tensors tensors({2, 2});
  Launch(tensors);
  backend_ = nullptr;  // ends on a thread of its own
  while (ended == 0) std::this_thread::yield();
  queue_->Abort(Aborted("another set failed"));
  for (int i = 0; i < 10'000 && in_use == 0; ++i) std::this_thread::yield();
  device().ReleaseStreams();
  End();
  EXPECT_EQ(in_use, 0);
  EXPECT_EQ(freed, 1);
}

}  // namespace
}  // namespace farandole
