// Some ranks with a GPU plane each, in one thread; a scripted backend stands for NCCL, or a whole
// libnccl, which is a fake.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/shm/plane.h"
#include "test/fakes/nccl/open.h"
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

/// Runs `body` on a thread of its own; a test whose body hangs ends the program.
inline void MustEnd(const char* what, const std::function<void()>& body) {
  std::atomic<bool> ended{false};
  std::thread thread([&] {
    body();
    ended = true;
  });
  for (int i = 0; i < 2000 && !ended; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (!ended) {
    std::fprintf(stderr, "%s does not end\n", what);
    std::_Exit(1);
  }
  thread.join();
}

/// Ranks in one thread, two unless a test wants more; process sets 7 and 8 are of all.
class GpuPlaneTest : public ::testing::Test {
 protected:
  using Ready = std::shared_ptr<DeviceEvent>;
  using State = Progress::State;

  struct Settings {
    std::string bus_id;
    FakeNcclFacts nccl = {23203, "/x/libnccl.so.2"};
    bool share_gpu = false;
    std::string nccl_library;  ///< Of the process, instead of a script.
  };

  /// A batch of one rank, in place.
  struct Given {
    std::vector<std::vector<float>> data;
    std::vector<Segment> segments;
    Batch batch;
    PlaneOperation* operation = nullptr;
    Progress last;
    bool launched = false;
  };

  explicit GpuPlaneTest(int size = 2) : bells_(static_cast<size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(rank);
      settings_[rank].bus_id =
          rank == 0 ? "0000:17:00.0" : "0000:6" + std::to_string(4 + rank) + ":00.0";
    }
  }
  ~GpuPlaneTest() override { End(); }

  void Open() {
    std::vector<Doorbell*> bells;
    for (FutexDoorbell& bell : bells_) bells.push_back(&bell);
    const auto hub = std::make_shared<HeapMemory>(bells);
    for (const int rank : ranks_) {
      const Settings& settings = settings_[rank];
      CudaOnFake::Options options;
      options.bus_id = settings.bus_id;
      options.nccl = nullptr;
      options.nccl_library = settings.nccl_library;
      if (settings.nccl_library.empty()) {
        auto nccl = std::make_shared<ScriptedNccl>(scripts_[rank], settings.nccl);
        nccl_[rank] = nccl.get();
        options.nccl = std::move(nccl);
      }
      options.share_gpu = settings.share_gpu;
      options.log = &logs_[rank];
      planes_.push_back(std::make_unique<CudaOnFake>(
          std::make_unique<SharedMemoryPlane>(hub, rank, BestCpuKernels()), std::move(options)));
    }
    for (const uint32_t set : {7u, 8u}) AddSet(set, ranks_);
  }
  /// Streams run what they hold, which uses the tensors.
  void End() {
    for (auto& plane : planes_) plane->device().ReleaseStreams();
    MustEnd("the end of the planes", [this] { EndTogether(planes_); });
  }

  CudaOnFake& plane(int rank) { return *planes_[static_cast<size_t>(rank)]; }
  void AddSet(uint32_t set, const std::vector<int>& ranks) {
    sets_[set] = ranks;
    for (size_t i = 0; i < ranks.size(); ++i) {
      ASSERT_TRUE(plane(ranks[i]).AddSet(set, sets_[set], static_cast<int>(i)).ok());
    }
  }

  /// Starts a rank's next batch of a set: a sum of float tensors of value `rank + 1`.
  Given& Start(int rank, uint32_t set, const std::vector<int64_t>& counts = {4},
               std::span<const Ready> ready = {}) {
    Given& given = *given_.emplace_back(std::make_unique<Given>());
    for (const int64_t count : counts) {
      given.data.emplace_back(static_cast<size_t>(count), static_cast<float>(rank + 1));
      given.batch.count += count;
    }
    for (auto& one : given.data) {
      given.segments.push_back({one.data(), one.data(), static_cast<int64_t>(one.size())});
    }
    const std::vector<int>& members = sets_[set];
    given.batch.number = ++numbers_[rank];
    given.batch.set = set;
    given.batch.ranks = members;
    given.batch.my_index =
        static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
    given.batch.segments = given.segments;
    given.batch.device = DeviceKind::kCuda;
    given.batch.ready = ready;
    Result<PlaneOperation*> started = plane(rank).Start(given.batch);
    EXPECT_TRUE(started.ok()) << started.status().ToString();
    if (started.ok()) given.operation = started.value();
    return given;
  }
  void StartAll(uint32_t set) {
    for (const int rank : sets_[set]) Start(rank, set);
  }

  static const Progress& Step(Given& given) {
    if (given.operation == nullptr) return given.last;
    given.last = given.operation->Step();
    given.launched = given.launched || given.last.state == State::kLaunched;
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
  /// Steps one that may be launched until it is: handed over first, then launched.
  static void Launch(Given& given) {
    for (int i = 0; i < 3 && given.last.state != State::kLaunched; ++i) Step(given);
    EXPECT_EQ(given.last.state, State::kLaunched);
  }
  /// Often enough for all that can happen to happen.
  void StepOften() {
    for (int round = 0; round < 200; ++round) {
      for (const auto& given : given_) Step(*given);
    }
  }
  bool AllDone() const {
    return std::ranges::all_of(given_,
                               [](const auto& given) { return given->last.state == State::kDone; });
  }
  bool AllLaunched() const {
    return std::ranges::all_of(given_, [](const auto& given) { return given->launched; });
  }
  /// Steps all that was started to its end. @return What each has then in its first place.
  std::vector<float> Finish() {
    EXPECT_TRUE(StepUntil([this] { return AllDone(); }));
    std::vector<float> results;
    for (const auto& given : given_) results.push_back(given->data[0][0]);
    given_.clear();
    return results;
  }
  static void Abandon(Given& given) {
    MustEnd("Abandon", [&] { given.operation->Abandon(); });
    given.operation = nullptr;
  }
  /// All that rank 0's streams hold runs.
  void Synchronize() {
    MustEnd("what the streams hold", [this] { plane(0).Synchronize(); });
  }
  /// All ranks are through with a first batch of both sets, so that their backends are there.
  void Warm() {
    for (const uint32_t set : {7u, 8u}) StartAll(set);
    Finish();
    for (Script& script : scripts_) script.calls.clear();
    numbers_.clear();
    for (const int rank : ranks_) numbers_[rank] = 1;
  }
  /// A stream of rank 0 that holds a late write, and the event behind it.
  FakeStream* HoldProducer(Ready& written) {
    FakeStream* const producer = plane(0).device().NewStream();
    written = plane(0).device().CreateEvent().value();
    producer->Hold();
    producer->Enqueue("a late write", [] {});
    EXPECT_TRUE(written->Record(producer->handle()).ok());
    return producer;
  }

  std::vector<int> ranks_;
  std::vector<FutexDoorbell> bells_;
  std::map<int, Settings> settings_;
  Script scripts_[3];
  ScriptedNccl* nccl_[3] = {};
  LinesLog logs_[3];
  std::vector<std::unique_ptr<CudaOnFake>> planes_;
  std::map<uint32_t, std::vector<int>> sets_;
  std::map<int, int64_t> numbers_;  // of the last batch of each rank
  std::vector<std::unique_ptr<Given>> given_;
};

/// Over a libnccl that behaves as NCCL's sources say, and is a fake.
class GpuPlaneOverNccl : public GpuPlaneTest {
 protected:
  explicit GpuPlaneOverNccl(int size = 2) : GpuPlaneTest(size) {
    for (auto& [rank, settings] : settings_) settings.nccl_library = FARANDOLE_FAKE_NCCL;
    control().reset();
  }
  ~GpuPlaneOverNccl() override {
    End();
    EXPECT_STREQ(control().take_misuses(), "");
    EXPECT_EQ(control().live_comms(), 0);
    control().reset();
  }
  static const FakeNcclControl& control() {
    static const FakeNccl library(FARANDOLE_FAKE_NCCL);
    return library.control();
  }
};

}  // namespace farandole
