// What observes an engine, and the one place where that is made.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/diagnosis/detectors.h"
#include "coordinator/diagnosis/program_probe.h"
#include "coordinator/diagnosis/stall_report.h"
#include "coordinator/engine/engine_observer.h"
#include "coordinator/engine/engine_options.h"
#include "core/config.h"
#include "core/counters.h"
#include "core/flight_recorder.h"
#include "core/log.h"
#include "core/timeline.h"

namespace farandole {

// A source each, which has the class. What they are given outlives them.
std::unique_ptr<EngineObserver> MakeFlightEvents(FlightRecorder& recorder);
std::unique_ptr<EngineObserver> MakeCountEvents(Counters& counters);
/// In Horovod's words.
std::unique_ptr<EngineObserver> MakeTimelineEvents(Timeline& timeline);
/// @param mode  kWarn or kRaise.
std::unique_ptr<EngineObserver> MakeNumberCheck(NanCheck mode, int rank, Log& log);

/// Owns the observers of one engine, which it outlives. Says what the log says of stalls.
class Diagnosis final : private DetectorListener {
 public:
  struct Options {
    int rank = 0;
    NanCheck nan_check = NanCheck::kOff;
    Log* log = nullptr;
    Timeline* timeline = nullptr;         ///< May be nullptr.
    FlightRecorder* recorder = nullptr;   ///< May be nullptr.
    std::vector<std::string> hosts = {};  ///< Their names, by rank; empty: unknown.
  };
  explicit Diagnosis(const Options& options);
  ~Diagnosis() override;

  /// Of the engine that will be made of these.
  void Observe(EngineParts& parts);

 private:
  std::vector<std::string> OnStalls(const std::vector<StallFacts>& stalls, int64_t now_ns) override;
  void OnStallReported() override;
  std::optional<StepTimes> TakeStep() override;
  void OnLate(const LateRank& late) override;
  bool AskActivity(std::vector<uint64_t> threads, int64_t now_ns) override {
    return program_.Ask(std::move(threads), now_ns);
  }
  std::optional<Activity> FindActivity(int64_t now_ns) override { return program_.Find(now_ns); }

  class StepQueue;

  Log& log_;
  const std::vector<std::string> hosts_;
  StepQueue* steps_ = nullptr;  // one of the observers
  std::vector<std::unique_ptr<EngineObserver>> observers_;
  StallReport stall_report_;
  ProgramProbe program_;
};

}  // namespace farandole
