// The CUDA plane's line of batches, its choice and its log; a scripted way stands for NCCL.
#include "ops/cuda/cuda_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/local/local_plane.h"
#include "test/planes/cuda_on_fake.h"

namespace farandole {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using State = Progress::State;

/// What the scripted ways of one rank do, and did.
struct Script {
  bool may_launch = true;
  Status check;
  std::vector<std::string> calls;  // "connect", "begin 3", "launch 3", "abandon"
};

class ScriptedWay final : public CudaWay {
 public:
  ScriptedWay(CudaLane& lane, Script& script) : lane_(lane), script_(script) {}

  const char* name() const override { return "scripted"; }
  Progress Connect() override {
    script_.calls.push_back("connect");
    return Progress::Done();
  }
  Status Begin(const Batch& batch) override {
    batch_ = &batch;
    script_.calls.push_back("begin " + std::to_string(batch.number));
    return {};
  }
  Progress Step() override {
    if (!script_.may_launch) return Progress::Waiting();
    Status awaited = lane_.WaitFor(batch_->ready);
    Result<std::shared_ptr<DeviceEvent>> end = lane_.MarkEnd();
    if (!awaited.ok() || !end.ok()) return Progress::Failed(end.status());
    end_ = end.value();
    script_.calls.push_back("launch " + std::to_string(batch_->number));
    return Progress::Launched();
  }
  std::shared_ptr<DeviceEvent> end() const override { return end_; }
  Status Check() override { return script_.check; }
  void Abandon() override { script_.calls.push_back("abandon"); }

 private:
  CudaLane& lane_;
  Script& script_;
  const Batch* batch_ = nullptr;
  std::shared_ptr<DeviceEvent> end_;
};

class ScriptedNccl final : public NcclByWord {
 public:
  ScriptedNccl(Script& script, FakeNcclFacts facts)
      : NcclByWord(std::move(facts)), script_(script) {}
  std::unique_ptr<CudaWay> MakeWay(NcclWayOptions options) override {
    return std::make_unique<ScriptedWay>(*options.lane, script_);
  }

 private:
  Script& script_;
};

class LinesLog final : public Log {
 public:
  bool Enabled(LogLevel) const override { return true; }
  void Write(LogLevel level, std::string_view message) override {
    lines.push_back(std::string(Name(level)) + ": " + std::string(message));
  }
  std::vector<std::string> lines;
};

/// Two ranks in one thread.
class CudaPlaneTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;

  struct Settings {
    std::string bus_id;
    FakeNcclFacts nccl = {23203, "/x/libnccl.so.2"};
    bool share_gpu = false;
  };

  /// A batch of one rank, in place.
  struct Given {
    std::vector<float> data;
    Segment segment;
    Batch batch;
    PlaneOperation* operation = nullptr;
    Progress last;
  };

  CudaPlaneTest() {
    settings_[0].bus_id = "0000:17:00.0";
    settings_[1].bus_id = "0000:65:00.0";
  }

  void Open() {
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<LocalHub>(bells);
    for (int rank = 0; rank < kRanks; ++rank) {
      CudaOnFake::Options options;
      options.bus_id = settings_[rank].bus_id;
      auto nccl = std::make_unique<ScriptedNccl>(scripts_[rank], settings_[rank].nccl);
      nccl_[rank] = nccl.get();
      options.nccl = std::move(nccl);
      options.share_gpu = settings_[rank].share_gpu;
      options.log = &logs_[rank];
      planes_.push_back(std::make_unique<CudaOnFake>(
          std::make_unique<LocalPlane>(hub, rank, BestCpuKernels()), std::move(options)));
      for (const uint32_t set : {7u, 8u}) {
        ASSERT_TRUE(planes_.back()->AddSet(set, ranks_, rank).ok());
      }
    }
  }

  CudaOnFake& plane(int rank) { return *planes_[static_cast<size_t>(rank)]; }

  /// Starts batch `number` of a set on a rank: four floats of value `rank + 1`.
  Given& Start(int rank, uint32_t set, int64_t number, std::span<DeviceEvent* const> ready = {}) {
    given_.push_back(std::make_unique<Given>());
    Given& given = *given_.back();
    given.data.assign(4, static_cast<float>(rank + 1));
    given.segment = {given.data.data(), given.data.data(), 4};
    given.batch.number = number;
    given.batch.set = set;
    given.batch.ranks = ranks_;
    given.batch.my_index = rank;
    given.batch.segments = {&given.segment, 1};
    given.batch.count = 4;
    given.batch.device = DeviceKind::kCuda;
    given.batch.ready = ready;
    Result<PlaneOperation*> started = plane(rank).Start(given.batch);
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    if (started.ok()) given.operation = started.value();
    return given;
  }

  static const Progress& Step(Given& given) {
    if (given.operation == nullptr) return given.last;
    given.last = given.operation->Step();
    const bool over = given.last.state == State::kDone || given.last.state == State::kFailed;
    if (over) given.operation = nullptr;
    return given.last;
  }

  /// Steps all that was given, in order, until `reached`; streams have threads of their own.
  bool StepUntil(const std::function<bool()>& reached) {
    for (int round = 0; round < 1'000'000; ++round) {
      for (const auto& given : given_) Step(*given);
      if (reached()) return true;
      std::this_thread::yield();
    }
    return false;
  }
  /// Often enough for all that can happen to happen.
  void StepOften() {
    for (int round = 0; round < 200; ++round) {
      for (const auto& given : given_) Step(*given);
    }
  }
  bool AllDone() const {
    for (const auto& given : given_) {
      if (given->last.state != State::kDone) return false;
    }
    return true;
  }
  /// Both ranks are through with a first batch of both sets, so that their ways are there.
  void Warm() {
    for (const uint32_t set : {7u, 8u}) {
      for (int rank = 0; rank < kRanks; ++rank) Start(rank, set, 1);
    }
    ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
    given_.clear();
    for (Script& script : scripts_) script.calls.clear();
  }

  const std::vector<int> ranks_ = {0, 1};
  FutexDoorbell bells_[kRanks];
  Settings settings_[kRanks];
  Script scripts_[kRanks];
  ScriptedNccl* nccl_[kRanks] = {};
  LinesLog logs_[kRanks];
  std::vector<std::unique_ptr<CudaOnFake>> planes_;
  std::vector<std::unique_ptr<Given>> given_;
};

TEST_F(CudaPlaneTest, TouchesNothingBeforeASetsFirstBatch) {
  Open();
  EXPECT_EQ(plane(0).loads(), 0);
  EXPECT_EQ(nccl_[0]->finds, 0);
}

TEST_F(CudaPlaneTest, LaunchesTheBatchesOfAllSetsInTheOrderStarted) {
  Open();
  Warm();
  scripts_[0].may_launch = false;
  Start(0, 7, 2);
  Start(0, 8, 3);
  Start(0, 7, 4);
  StepOften();
  EXPECT_THAT(scripts_[0].calls, ElementsAre("begin 2"));
  scripts_[0].may_launch = true;
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_THAT(scripts_[0].calls,
              ElementsAre("begin 2", "launch 2", "begin 3", "launch 3", "begin 4", "launch 4"));
}

TEST_F(CudaPlaneTest, IsLaunchedBeforeItsEndAndDoneAfterItAndInOrder) {
  Open();
  Warm();
  plane(0).lane().Hold();
  Given& first = Start(0, 7, 2);
  Given& second = Start(0, 8, 3);
  EXPECT_EQ(Step(first).state, State::kLaunched);
  ASSERT_NE(first.operation->end(), nullptr);
  EXPECT_EQ(Step(second).state, State::kLaunched);
  StepOften();
  EXPECT_EQ(first.last.state, State::kWaiting);
  EXPECT_EQ(first.last.poll_after_ns, 50'000);
  EXPECT_FALSE(first.last.for_inputs);
  EXPECT_EQ(second.last.state, State::kWaiting);
  EXPECT_EQ(second.last.poll_after_ns, kByDoorbell);  // the first one polls for both
  plane(0).lane().Release();
  EXPECT_TRUE(StepUntil([&] { return first.last.state == State::kDone; }));
  EXPECT_TRUE(StepUntil([&] { return second.last.state == State::kDone; }));
}

TEST_F(CudaPlaneTest, IsNotDoneBeforeAnEarlierBatchIs) {
  Open();
  Warm();
  Given& first = Start(0, 7, 2);
  Given& second = Start(0, 8, 3);
  Step(first);
  Step(second);
  plane(0).lane().Synchronize();  // both ends have passed
  for (int i = 0; i < 10; ++i) EXPECT_NE(Step(second).state, State::kDone);
  EXPECT_EQ(Step(first).state, State::kDone);
  EXPECT_EQ(Step(second).state, State::kDone);
}

TEST_F(CudaPlaneTest, SaysThatItWaitsForInputsWhileTheProducerIsLate) {
  Open();
  Warm();
  FakeStream* producer = plane(0).device().NewStream();
  const std::shared_ptr<DeviceEvent> ready = plane(0).device().CreateEvent().value();
  producer->Hold();
  producer->Enqueue("a late write", [] {});
  ASSERT_TRUE(ready->Record(producer->handle()).ok());
  DeviceEvent* const events[] = {ready.get()};
  Given& late = Start(0, 7, 2, events);
  Given& behind = Start(0, 8, 3);
  StepOften();
  EXPECT_EQ(late.last.state, State::kWaiting);
  EXPECT_TRUE(late.last.for_inputs);
  EXPECT_TRUE(behind.last.for_inputs);
  producer->Release();
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
}

TEST_F(CudaPlaneTest, StopsSayingSoOnceTheInputsAreThere) {
  Open();
  Warm();
  const std::shared_ptr<DeviceEvent> ready = plane(0).device().CreateEvent().value();
  DeviceEvent* const events[] = {ready.get()};  // never recorded: there already
  plane(0).lane().Hold();
  Given& given = Start(0, 7, 2, events);
  Step(given);
  EXPECT_TRUE(Step(given).for_inputs);
  plane(0).lane().LetPass(1);  // the mark of the inputs, not the end
  EXPECT_TRUE(StepUntil([&] { return !given.last.for_inputs; }));
  EXPECT_EQ(given.last.state, State::kWaiting);
  plane(0).lane().Release();
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
}

TEST_F(CudaPlaneTest, ABatchInLineMovesWhenTheLineDoes) {
  Open();
  Warm();
  scripts_[0].may_launch = false;
  Given& first = Start(0, 7, 2);
  Given& second = Start(0, 8, 3);
  StepOften();
  EXPECT_EQ(second.last.state, State::kWaiting);
  Given& third = Start(0, 7, 4);
  EXPECT_EQ(Step(third).state, State::kWaiting);
  scripts_[0].may_launch = true;
  EXPECT_EQ(Step(first).state, State::kLaunched);
  EXPECT_EQ(Step(third).state, State::kMoved);
  EXPECT_EQ(Step(third).state, State::kWaiting);
  EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
}

TEST_F(CudaPlaneTest, AnAbandonedBatchTakesAllOthersAlong) {
  Open();
  Warm();
  plane(0).lane().Hold();
  Given& launched = Start(0, 7, 2);
  Step(launched);
  scripts_[0].may_launch = false;
  Given& begun = Start(0, 8, 3);
  Step(begun);
  begun.operation->Abandon();
  begun.operation = nullptr;
  EXPECT_THAT(scripts_[0].calls,
              ElementsAre("begin 2", "launch 2", "begin 3", "abandon", "abandon"));  // of both sets
  EXPECT_EQ(Step(launched).state, State::kFailed);
  EXPECT_EQ(launched.last.status.code(), Code::kAborted);
  EXPECT_EQ(plane(0).Start(launched.batch).status().code(), Code::kAborted);
  plane(0).lane().Release();
}

TEST_F(CudaPlaneTest, ReportsAnErrorThatComesAfterTheLaunch) {
  Open();
  Warm();
  plane(0).lane().Hold();
  Given& given = Start(0, 7, 2);
  Step(given);
  scripts_[0].check = Unavailable("a peer is gone");
  EXPECT_EQ(Step(given).state, State::kFailed);
  EXPECT_EQ(given.last.status.code(), Code::kUnavailable);
  EXPECT_EQ(given.last.status.message(), "a peer is gone");
  EXPECT_THAT(std::string(plane(0).Start(given.batch).status().message()),
              HasSubstr("a peer is gone"));
  plane(0).lane().Release();
}

TEST_F(CudaPlaneTest, ReportsADeviceThatFails) {
  Open();
  Warm();
  plane(0).lane().Hold();
  Given& given = Start(0, 7, 2);
  Step(given);
  plane(0).device().FailDevice();
  EXPECT_EQ(Step(given).state, State::kFailed);
  EXPECT_EQ(given.last.status.code(), Code::kInternal);
}

TEST_F(CudaPlaneTest, ARankWithoutAGpuFailsAllMembersByItsSentence) {
  Open();
  plane(1).FailLoading(Unavailable("libfarandole_cuda.so is not there"));
  Given& first = Start(0, 7, 1);
  Given& second = Start(1, 7, 1);
  EXPECT_TRUE(StepUntil([&] { return first.operation == nullptr && second.operation == nullptr; }));
  for (const Given* given : {&first, &second}) {
    EXPECT_EQ(given->last.state, State::kFailed);
    EXPECT_EQ(given->last.status.message(),
              "rank 1 (host here) cannot use its GPU: libfarandole_cuda.so is not there");
  }
}

TEST_F(CudaPlaneTest, SaysItsWayOncePerSetOnTheFirstRank) {
  Open();
  Warm();
  EXPECT_THAT(
      logs_[0].lines,
      ElementsAre("info: CUDA tensors of process set 7 (2 ranks) go over NCCL 2.32.3 "
                  "(/x/libnccl.so.2, fake CUDA (host memory and threads; no GPU)): rank 0: host "
                  "here, GPU 0000:17:00.0; rank 1: host here, GPU 0000:65:00.0",
                  HasSubstr("process set 8")));
  EXPECT_THAT(logs_[1].lines, IsEmpty());
}

TEST_F(CudaPlaneTest, StagesRanksThatShareAGpuAndSaysWhy) {
  settings_[1].bus_id = settings_[0].bus_id;
  Open();
  Given& first = Start(0, 7, 1);
  Given& second = Start(1, 7, 1);
  ASSERT_TRUE(StepUntil([this] { return AllDone(); }));
  EXPECT_EQ(first.data, std::vector<float>(4, 3.0f));
  EXPECT_EQ(second.data, first.data);
  EXPECT_THAT(scripts_[0].calls, IsEmpty());
  EXPECT_THAT(
      logs_[0].lines,
      ElementsAre("warning: CUDA tensors of process set 7 (2 ranks) go through host memory, which "
                  "is slower than NCCL: ranks 0 and 1 of host here share the GPU 0000:17:00.0, "
                  "which NCCL refuses. Give each rank a GPU of its own; FARANDOLE_SHARE_GPU=1 lets "
                  "NCCL 2.30.0 or newer share one."));
}

TEST_F(CudaPlaneTest, SharesAGpuOverNcclWhenAsked) {
  for (Settings& settings : settings_) {
    settings.bus_id = "0000:17:00.0";
    settings.share_gpu = true;
  }
  Open();
  Warm();
  for (const ScriptedNccl* nccl : nccl_) EXPECT_EQ(nccl->allowed, 2);  // once per set
  EXPECT_THAT(logs_[0].lines[0], HasSubstr("take turns"));
}

TEST_F(CudaPlaneTest, RefusesDifferentNcclVersionsOnAllMembers) {
  settings_[1].nccl = {22304, "/old/libnccl.so.2"};
  Open();
  Given& first = Start(0, 7, 1);
  Given& second = Start(1, 7, 1);
  EXPECT_TRUE(StepUntil([&] { return first.operation == nullptr && second.operation == nullptr; }));
  for (const Given* given : {&first, &second}) {
    EXPECT_EQ(given->last.status.code(), Code::kMismatch);
    EXPECT_THAT(std::string(given->last.status.message()), HasSubstr("/old/libnccl.so.2"));
  }
}

TEST_F(CudaPlaneTest, NeedsNeitherNcclNorAPeerForOneMember) {
  settings_[0].nccl.version = 0;
  Open();
  const std::vector<int> alone = {0};
  ASSERT_TRUE(plane(0).AddSet(9, alone, 0).ok());
  Given given;
  given.data = {1, 2, 3, 4};
  given.segment = {given.data.data(), given.data.data(), 4};
  given.batch.set = 9;
  given.batch.ranks = alone;
  given.batch.segments = {&given.segment, 1};
  given.batch.count = 4;
  given.batch.prescale = 3.0;
  given.operation = plane(0).Start(given.batch).value();
  while (given.operation != nullptr) Step(given);
  EXPECT_EQ(given.last.state, State::kDone);
  EXPECT_EQ(given.data, (std::vector<float>{3, 6, 9, 12}));
  EXPECT_EQ(nccl_[0]->finds, 0);
}

TEST_F(CudaPlaneTest, RefusesWhatItCannotRun) {
  Open();
  Given& given = Start(0, 7, 1);
  Batch bad = given.batch;
  bad.op = ReduceOp::kSum;
  bad.dtype = bad.wire = DType::kBool;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInvalidArgument);
  bad = given.batch;
  bad.kind = OpKind::kAllgather;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kUnimplemented);
  bad = given.batch;
  bad.set = 99;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInternal);
  bad = given.batch;
  bad.my_index = 1;
  EXPECT_EQ(plane(0).Start(bad).status().code(), Code::kInternal);
  EXPECT_EQ(plane(0).AddSet(7, ranks_, 0).code(), Code::kInvalidArgument);
  given.operation->Abandon();
}

}  // namespace
}  // namespace farandole
