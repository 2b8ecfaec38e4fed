// N ranks in one process and one thread, on a fake clock: tests decide who steps when.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/control/in_process.h"
#include "coordinator/diagnosis/diagnosis.h"
#include "coordinator/engine/engine.h"
#include "ops/shm/plane.h"
#include "test/support/fake_clock.h"

namespace farandole {

/// Keeps what an engine says.
class RecordingLog final : public Log {
 public:
  bool Enabled(LogLevel level) const override { return level >= LogLevel::kWarning; }
  void Write(LogLevel, std::string_view message) override { lines.emplace_back(message); }
  std::vector<std::string> lines;
};

/// The real engine, transport, plane and kernels; only time is a fake, and threads are replaced by
/// Step.
class SteppedJob {
 public:
  /// Wraps rank r's plane, e.g. in one that stops; gets the plane and gives the one to use.
  using WrapPlane =
      std::function<std::unique_ptr<DataPlane>(int rank, std::unique_ptr<DataPlane> plane)>;

  /// With `base.threads` the engines run by themselves and on real time; then nobody steps them.
  /// @param gpus    Gives rank r the GPU it works on.
  /// @param memory  Gives what rank r's engine shares with the plane that `wrap` made.
  explicit SteppedJob(int size, EngineOptions base = Stepped(), const WrapPlane& wrap = nullptr,
                      const std::function<RankDevice*(int rank)>& gpus = nullptr,
                      const std::function<BorrowedMemory*(int rank)>& memory = nullptr);
  static EngineOptions Stepped();

  int size() const { return static_cast<int>(ranks_.size()); }
  Engine& engine(int rank) { return *ranks_[static_cast<size_t>(rank)].engine; }
  const Counters& counters(int rank) const { return *ranks_[static_cast<size_t>(rank)].counters; }
  const std::vector<std::string>& log(int rank) const {
    return ranks_[static_cast<size_t>(rank)].log->lines;
  }
  FakeClock& clock() { return clock_; }
  const InProcessHub& hub() const { return *hub_; }
  InProcessHub& hub() { return *hub_; }
  const std::vector<int>& parent() const { return parent_; }

  /// Steps every rank in turn until a whole round moves nothing. @return operator new calls in
  /// those steps, if the program counts them.
  int64_t Settle();
  /// Settle, advancing the clock by the linger time once, so that held submissions go too.
  int64_t SettleHeld();

 private:
  struct Rank {
    std::unique_ptr<FutexDoorbell> doorbell;
    std::unique_ptr<LivenessTable> liveness;
    std::unique_ptr<Counters> counters;
    std::unique_ptr<RecordingLog> log;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<DataPlane> plane;
    std::unique_ptr<Diagnosis> diagnosis;
    std::unique_ptr<Engine> engine;
  };
  FakeClock clock_;
  std::unique_ptr<InProcessHub> hub_;
  std::shared_ptr<HeapMemory> local_;
  std::vector<int> parent_;
  std::vector<Rank> ranks_;
};

}  // namespace farandole
