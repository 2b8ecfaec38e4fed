// Two ranks with a GPU plane each, in one thread; a scripted backend stands for NCCL.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/shm/plane.h"
#include "test/planes/cuda_on_fake.h"

namespace farandole {
/// What the scripted backends of one rank do, and did.
struct Script {
  bool may_launch = true;
  CommStream* stream = nullptr;    // of the last batch
  std::vector<std::string> calls;  // "begin 3", "launch 3", "abandon"
};

/// Launches at once, on the thread that steps it, in a stream of its own.
class ScriptedBackend final : public GpuBackend {
 public:
  ScriptedBackend(Device& device, Script& script)
      : stream_(CommStream::Create(device, nullptr).value()), script_(script) {}

  Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) override {
    batch_ = &batch;
    script_.stream = stream_.get();
    script_.calls.push_back("begin " + std::to_string(batch.number));
    task_ = std::make_shared<LaunchTask>();
    return task_;
  }
  Progress Step() override {
    if (!script_.may_launch) return Progress::Waiting();
    const Status awaited = stream_->WaitFor(batch_->ready);
    if (!awaited.ok()) return Progress::Failed(awaited);
    Status marked;
    if (!batch_->ready.empty()) marked = stream_->Record(task_->inputs);
    if (marked.ok()) marked = stream_->Record(task_->end);
    if (!marked.ok()) return Progress::Failed(marked);
    task_->SetLaunched();
    script_.calls.push_back("launch " + std::to_string(batch_->number));
    return Progress::Done();
  }
  void Abandon() override { script_.calls.push_back("abandon"); }

 private:
  const std::unique_ptr<CommStream> stream_;
  Script& script_;
  const Batch* batch_ = nullptr;
  std::shared_ptr<LaunchTask> task_;
};

class ScriptedNccl final : public NcclByWord {
 public:
  ScriptedNccl(Script& script, FakeNcclFacts facts)
      : NcclByWord(std::move(facts)), script_(script) {}
  std::unique_ptr<GpuBackend> Make(LaunchQueue& queue, NcclSetOptions options) override {
    shared_gpu = options.shared_gpu;
    return std::make_unique<ScriptedBackend>(queue.streams().pack->device(), script_);
  }

  bool shared_gpu = false;

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
class GpuPlaneTest : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;

  struct Settings {
    std::string bus_id;
    FakeNcclFacts nccl = {23203, "/x/libnccl.so.2"};
    bool share_gpu = false;
    std::string nccl_library;  ///< Of the process, instead of a script.
  };

  /// A batch of one rank, in place.
  struct Given {
    std::vector<float> data;
    Segment segment;
    Batch batch;
    PlaneOperation* operation = nullptr;
    Progress last;
  };

  GpuPlaneTest() {
    settings_[0].bus_id = "0000:17:00.0";
    settings_[1].bus_id = "0000:65:00.0";
  }

  ~GpuPlaneTest() override {
    EndTogether(planes_);  // their streams run what they hold, which uses the tensors
  }

  void Open() {
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<HeapMemory>(bells);
    for (int rank = 0; rank < kRanks; ++rank) {
      CudaOnFake::Options options;
      options.bus_id = settings_[rank].bus_id;
      auto nccl = std::make_shared<ScriptedNccl>(scripts_[rank], settings_[rank].nccl);
      nccl_[rank] = nccl.get();
      options.nccl = std::move(nccl);
      options.nccl_library = settings_[rank].nccl_library;
      if (!options.nccl_library.empty()) {
        options.nccl = nullptr;
        nccl_[rank] = nullptr;
      }
      options.share_gpu = settings_[rank].share_gpu;
      options.log = &logs_[rank];
      planes_.push_back(std::make_unique<CudaOnFake>(
          std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()), std::move(options)));
      for (const uint32_t set : {7u, 8u}) {
        ASSERT_TRUE(planes_.back()->AddSet(set, ranks_, rank).ok());
      }
    }
  }

  CudaOnFake& plane(int rank) { return *planes_[static_cast<size_t>(rank)]; }

  /// Starts batch `number` of a set on a rank: four floats of value `rank + 1`.
  Given& Start(int rank, uint32_t set, int64_t number,
               std::span<const std::shared_ptr<DeviceEvent>> ready = {}) {
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
    const bool over =
        given.last.state == Progress::State::kDone || given.last.state == Progress::State::kFailed;
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
  /// Steps one that may be launched until it is: handed over first, then launched.
  static void Launch(Given& given) {
    for (int i = 0; i < 3 && given.last.state != Progress::State::kLaunched; ++i) Step(given);
    EXPECT_EQ(given.last.state, Progress::State::kLaunched);
  }
  /// Often enough for all that can happen to happen.
  void StepOften() {
    for (int round = 0; round < 200; ++round) {
      for (const auto& given : given_) Step(*given);
    }
  }
  bool AllDone() const {
    for (const auto& given : given_) {
      if (given->last.state != Progress::State::kDone) return false;
    }
    return true;
  }
  /// Both ranks are through with a first batch of both sets, so that their backends are there.
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

}  // namespace farandole
