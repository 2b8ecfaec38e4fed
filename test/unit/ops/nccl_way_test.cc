// Order, errors and memory of batches over NCCL, step by step, with one rank of a scripted NCCL.
#include "ops/nccl/nccl_way.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "test/fakes/fake_device.h"
#include "test/support/fake_clock.h"
#include "test/unit/ops/scripted_nccl.h"

namespace farandole {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using State = Progress::State;

constexpr int64_t kPage = 2 << 20;

/// Each look at it takes a second, so that what waits for it needs no time.
class HastyClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns_.fetch_add(kNsPerSecond); }

 private:
  mutable std::atomic<int64_t> now_ns_{kNsPerSecond};
};

class KeepsLines final : public Log {
 public:
  bool Enabled(LogLevel) const override { return true; }
  void Write(LogLevel, std::string_view message) override { lines.emplace_back(message); }
  std::vector<std::string> lines;
};

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

class NcclWayTest : public ::testing::Test {
 protected:
  NcclWayTest() : lane_(CudaLane::Create(device(), &counters_).value()) { Make(); }

  FakeDevice& device() { return runtime_.fake(0); }
  FakeStream& stream() { return *FakeStream::Find(lane_->stream()); }
  NcclWayOptions Options() {
    NcclWayOptions options;
    options.library = nccl_.library();
    options.lane = lane_.get();
    options.unique_id.assign(128, 'u');
    options.size = 2;
    options.map = "rank 0: host a";
    options.counters = &counters_;
    options.log = &log_;
    return options;
  }
  void Make() { Make(Options()); }
  void Make(NcclWayOptions options) {
    way_.reset();
    way_ = MakeNcclWay(std::move(options));
    ASSERT_EQ(way_->Connect().state, State::kDone);
    nccl_.calls.clear();
  }
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
  void Launch(const Tensors& tensors) {
    ASSERT_TRUE(way_->Begin(tensors.batch).ok());
    ASSERT_EQ(way_->Step().state, State::kLaunched);
  }

  FakeDeviceRuntime runtime_{1};
  ScriptedNccl nccl_;
  Counters counters_;
  KeepsLines log_;
  std::unique_ptr<CudaLane> lane_;
  std::unique_ptr<CudaWay> way_;
};

TEST_F(NcclWayTest, LaunchesBeforeTheProducerHasWrittenAndSeesWhatItWrites) {
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{4}, {4, 4}}) {
    Tensors tensors(counts);
    SumFloats();
    FakeStream* producer = device().NewStream();
    producer->Hold();
    producer->Enqueue("a late write", [&] { tensors.data[0][2] = 100.0f; });
    const std::shared_ptr<DeviceEvent> ready = device().CreateEvent().value();
    ASSERT_TRUE(ready->Record(producer->handle()).ok());
    DeviceEvent* const events[] = {ready.get()};
    tensors.batch.ready = events;
    Launch(tensors);
    EXPECT_FALSE(way_->end()->IsComplete().value());
    EXPECT_EQ(tensors.data[0][0], 1.0f);
    producer->Release();
    stream().Synchronize();
    EXPECT_TRUE(way_->end()->IsComplete().value());
    EXPECT_THAT(tensors.data[0], ElementsAre(2.0f, 4.0f, 200.0f, 8.0f));
  }
}

TEST_F(NcclWayTest, PacksAndUnpacksManyTensorsInTwoLaunches) {
  Tensors tensors(std::vector<int64_t>(1000, 3));
  tensors.batch.wire = DType::kBfloat16;
  Launch(tensors);
  EXPECT_EQ(counters_.Get(Counter::kDeviceLaunches), 2);
  EXPECT_EQ(device().counts().launches, 2);
  stream().Synchronize();
}

TEST_F(NcclWayTest, LaunchesNothingForOneTensorAsItIs) {
  Tensors tensors({1000});
  const void* in = nullptr;
  nccl_.when_reducing = [&](ScriptedNccl::Reduction one) { in = one.in; };
  Launch(tensors);
  EXPECT_EQ(device().counts().launches, 0);
  EXPECT_EQ(in, tensors.data[0].data());
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce"));
}

TEST_F(NcclWayTest, UnpacksOnlyOnceTheCollectiveIsInTheStream) {
  Tensors tensors({2, 2});
  Launch(tensors);  // the buffer is there from now on
  nccl_.answers["AllReduce"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress, NcclResult::kInProgress};
  ASSERT_TRUE(way_->Begin(tensors.batch).ok());
  EXPECT_EQ(way_->Step().state, State::kMoved);
  const Progress waiting = way_->Step();
  EXPECT_EQ(waiting.state, State::kWaiting);
  EXPECT_EQ(waiting.poll_after_ns, 50'000);
  EXPECT_EQ(device().counts().launches, 3);
  EXPECT_EQ(way_->Step().state, State::kLaunched);
  EXPECT_EQ(device().counts().launches, 4);
  stream().Synchronize();
}

TEST_F(NcclWayTest, WaitsForARegistrationBeforeTheCollective) {
  Tensors tensors({2, 2});
  nccl_.answers["CommRegister"] = {NcclResult::kInProgress};
  nccl_.states = {NcclResult::kInProgress};
  ASSERT_TRUE(way_->Begin(tensors.batch).ok());
  EXPECT_EQ(way_->Step().state, State::kWaiting);
  EXPECT_EQ(way_->Step().state, State::kLaunched);
  stream().Synchronize();
}

TEST_F(NcclWayTest, RegistersItsBufferAndGivesItBackInOrder) {
  Tensors tensors({2, 2});
  Launch(tensors);
  Launch(tensors);
  EXPECT_EQ(counters_.Get(Counter::kRegisteredBytes), kPage);
  stream().Synchronize();
  way_.reset();
  EXPECT_THAT(nccl_.calls, ElementsAre("MemAlloc", "CommRegister", "AllReduce", "AllReduce",
                                       "CommDeregister", "CommFinalize", "CommDestroy", "MemFree"));
  EXPECT_EQ(counters_.Get(Counter::kRegisteredBytes), 0);
  EXPECT_THAT(log_.lines, IsEmpty());
}

TEST_F(NcclWayTest, UsesOrdinaryMemoryWhereNcclHasNoneAndSaysSoOnce) {
  nccl_.answers["MemAlloc"].assign(2, NcclResult::kUnhandledCudaError);
  Tensors small({2, 2}), large({kPage, 2});
  Launch(small);
  Launch(large);
  EXPECT_EQ(counters_.Get(Counter::kRegisteredBytes), 0);
  EXPECT_EQ(device().counts().of(FakeCall::kAllocate), 2);
  EXPECT_THAT(log_.lines, ElementsAre(HasSubstr("ncclMemAlloc: unhandled error")));
  stream().Synchronize();
}

TEST_F(NcclWayTest, UsesOrdinaryMemoryWithAnOldLibrary) {
  const NcclLibrary old = nccl_.Old();
  NcclWayOptions options = Options();
  options.library = &old;
  Make(options);
  Tensors tensors({2, 2});
  Launch(tensors);
  stream().Synchronize();
  way_.reset();
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce", "CommFinalize", "CommDestroy"));
  EXPECT_THAT(log_.lines, ElementsAre(HasSubstr("2.19 can")));
  EXPECT_EQ(device().counts().live_blocks, 0);
}

TEST_F(NcclWayTest, GoesOnWithoutARegistrationThatIsRefused) {
  nccl_.answers["CommRegister"] = {NcclResult::kInvalidUsage};
  Tensors tensors({2, 2});
  Launch(tensors);
  EXPECT_EQ(counters_.Get(Counter::kRegisteredBytes), 0);
  EXPECT_THAT(log_.lines, ElementsAre(HasSubstr("ncclCommRegister: ")));
  stream().Synchronize();
}

TEST_F(NcclWayTest, EnqueuesNothingWithoutMemoryAndRunsTheNextBatch) {
  nccl_.answers["MemAlloc"] = {NcclResult::kUnhandledCudaError};
  device().FailCall(FakeCall::kAllocate, 1);
  Tensors tensors({2, 2}), single({3});
  const Status status = way_->Begin(tensors.batch);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("2097152 bytes"));
  EXPECT_EQ(stream().executed(), 0);
  EXPECT_TRUE(stream().Idle());
  Launch(single);
  stream().Synchronize();
}

TEST_F(NcclWayTest, KeepsOldBuffersToItsEndBecauseFreeingWaitsForTheDevice) {
  Tensors small({2, 2}), large({kPage, 2});
  Launch(small);
  stream().Synchronize();
  stream().Hold();
  Launch(small);
  nccl_.calls.clear();
  Launch(large);
  EXPECT_THAT(nccl_.calls, ElementsAre("MemAlloc", "CommRegister", "AllReduce"));
  stream().Release();
  stream().Synchronize();
  nccl_.calls.clear();
  Launch(large);
  EXPECT_THAT(nccl_.calls, ElementsAre("AllReduce"));
  EXPECT_EQ(nccl_.memory.size(), 2u);
  stream().Synchronize();
  way_.reset();
  EXPECT_EQ(nccl_.CountOf("MemFree"), 2);
  EXPECT_TRUE(nccl_.memory.empty());
}

TEST_F(NcclWayTest, AbortsAtAFailedCallAndAnswersItFromThenOn) {
  Tensors tensors({2, 2});
  nccl_.answers["AllReduce"] = {NcclResult::kInternalError};
  ASSERT_TRUE(way_->Begin(tensors.batch).ok());
  const Progress failed = way_->Step();
  EXPECT_EQ(failed.state, State::kFailed);
  EXPECT_THAT(failed.status.message(), HasSubstr("ncclAllReduce: unhandled error; NCCL 2.32.3"));
  EXPECT_THAT(nccl_.calls, Contains("CommAbort"));
  EXPECT_EQ(way_->Step().status.message(), failed.status.message());
  EXPECT_EQ(way_->Begin(tensors.batch).message(), failed.status.message());
  EXPECT_EQ(way_->Check().message(), failed.status.message());
  way_.reset();
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
  EXPECT_TRUE(nccl_.memory.empty());
}

TEST_F(NcclWayTest, AbortsWhenTheDeviceFailsSoThatPeersDoNotWait) {
  Tensors tensors({2, 2});
  device().FailCall(FakeCall::kMove, 2);
  ASSERT_TRUE(way_->Begin(tensors.batch).ok());
  EXPECT_EQ(way_->Step().status.code(), Code::kInternal);
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
  stream().Synchronize();  // the pack still reads
}

TEST_F(NcclWayTest, TellsOfAnErrorAfterTheLaunch) {
  Tensors tensors({2, 2});
  Launch(tensors);
  nccl_.states = {NcclResult::kRemoteError};
  EXPECT_EQ(way_->Check().code(), Code::kUnavailable);
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
  stream().Synchronize();
}

TEST_F(NcclWayTest, AbortsOnceWhenItIsAbandoned) {
  Tensors tensors({2, 2});
  ASSERT_TRUE(way_->Begin(tensors.batch).ok());
  way_->Abandon();
  way_->Abandon();
  EXPECT_EQ(way_->Step().status.code(), Code::kAborted);
  EXPECT_EQ(way_->Begin(tensors.batch).code(), Code::kAborted);
  way_.reset();
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
  EXPECT_EQ(nccl_.CountOf("CommFinalize"), 0);
}

TEST_F(NcclWayTest, GivesUpMemoryThatAStreamMayStillUse) {
  const HastyClock clock;
  NcclWayOptions options = Options();
  options.clock = &clock;
  Make(options);
  Tensors tensors({2, 2});
  stream().Hold();
  Launch(tensors);
  way_.reset();
  EXPECT_EQ(counters_.Get(Counter::kQuarantinedBytes), kPage);
  EXPECT_EQ(nccl_.CountOf("CommAbort"), 1);
  EXPECT_EQ(nccl_.CountOf("MemFree"), 0);
  stream().Release();
  stream().Synchronize();
}

TEST_F(NcclWayTest, CallsNothingForABatchWithoutElements) {
  Tensors tensors({0, 0});
  Launch(tensors);
  stream().Synchronize();
  EXPECT_TRUE(way_->end()->IsComplete().value());
  EXPECT_THAT(nccl_.calls, IsEmpty());
}

TEST_F(NcclWayTest, IsLaunchedOnceAGroupIsInTheStream) {
  const std::vector<int64_t> parts = {2, 1};
  Tensors tensors({3});
  tensors.batch.kind = OpKind::kAllgather;
  tensors.batch.splits = parts;
  nccl_.answers["GroupEnd"] = {NcclResult::kInProgress};
  nccl_.states.assign(2, NcclResult::kInProgress);
  ASSERT_TRUE(way_->Begin(tensors.batch).ok());
  EXPECT_EQ(way_->Step().state, State::kMoved);
  EXPECT_EQ(way_->Step().state, State::kWaiting);
  EXPECT_EQ(way_->Step().state, State::kLaunched);
  EXPECT_EQ(nccl_.CountOf("Broadcast"), 2);
  EXPECT_EQ(device().counts().launches, 0);
  stream().Synchronize();
}

TEST_F(NcclWayTest, RefusesBitwiseOpsByNameAndGoesOn) {
  Tensors bits({4}), sums({4});
  bits.batch.dtype = bits.batch.wire = DType::kInt32;
  bits.batch.op = ReduceOp::kBitOr;
  const Status refused = way_->Begin(bits.batch);
  EXPECT_EQ(refused.code(), Code::kUnimplemented);
  EXPECT_THAT(refused.message(), StartsWith("allreduce on a GPU: NCCL has no bit_or"));
  EXPECT_THAT(nccl_.calls, IsEmpty());
  SumFloats();
  Launch(sums);
  stream().Synchronize();
  EXPECT_EQ(sums.data[0][3], 8.0f);
}

TEST_F(NcclWayTest, NamesTheCallThatFailsForEachKind) {
  const std::vector<int64_t> equal = {2, 2}, different = {3, 1};
  const auto failure = [&](OpKind kind, const std::vector<int64_t>& sizes, const char* call) {
    Tensors tensors({4});
    tensors.batch.kind = kind;
    tensors.batch.splits = tensors.batch.sends = tensors.batch.receives = sizes;
    nccl_.answers[call] = {NcclResult::kInternalError};
    Make();
    EXPECT_TRUE(way_->Begin(tensors.batch).ok());
    const Progress progress = way_->Step();
    stream().Synchronize();  // a pack may read the tensors
    return progress.status.message();
  };
  EXPECT_THAT(failure(OpKind::kAllgather, equal, "AllGather"), StartsWith("ncclAllGather: "));
  EXPECT_THAT(failure(OpKind::kAllgather, different, "Broadcast"), StartsWith("ncclBroadcast: "));
  EXPECT_THAT(failure(OpKind::kReducescatter, different, "ReduceScatter"),
              StartsWith("ncclReduceScatter: "));
  EXPECT_THAT(failure(OpKind::kAlltoall, equal, "Recv"), StartsWith("ncclRecv: "));
}

}  // namespace
}  // namespace farandole
