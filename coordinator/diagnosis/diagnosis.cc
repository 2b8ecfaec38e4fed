#include "coordinator/diagnosis/diagnosis.h"

#include "coordinator/diagnosis/divergence.h"
#include "coordinator/diagnosis/stall_monitor.h"

namespace farandole {

ObserveNegotiation Detectors(DetectorListener& listener) {
  return [&listener](NodeState& node, Decider& decider) {
    std::vector<std::unique_ptr<NegotiationObserver>> detectors;
    detectors.push_back(std::make_unique<Divergence>(node, decider, listener));
    detectors.push_back(std::make_unique<StallMonitor>(node, decider, listener));
    return detectors;
  };
}

Diagnosis::Diagnosis(const Options& options) : log_(*options.log) {
  const auto add = [this](std::unique_ptr<EngineObserver> one) {
    observers_.push_back(std::move(one));
  };
  if (options.recorder != nullptr) add(MakeFlightEvents(*options.recorder));
  if (options.timeline != nullptr) add(MakeTimelineEvents(*options.timeline));
  if (options.nan_check != NanCheck::kOff) {
    add(MakeNumberCheck(options.nan_check, options.rank, log_));
  }
}

void Diagnosis::Observe(EngineParts& parts) {
  for (const auto& one : observers_) parts.observers.push_back(one.get());
  parts.observe_negotiation = Detectors(*this);
}

std::vector<std::string> Diagnosis::OnStalls(const std::vector<StallFacts>& stalls,
                                             int64_t now_ns) {
  std::vector<std::string> lines = stall_report_.Lines(stalls, now_ns);
  if (log_.Enabled(LogLevel::kDebug)) {
    for (const StallFacts& stall : stalls) log_.Write(LogLevel::kDebug, DescribeStall(stall));
  }
  for (const auto& one : observers_) one->OnStalls(stalls, !lines.empty(), now_ns);
  return lines;
}

void Diagnosis::OnStallReported() {
  for (const auto& one : observers_) one->OnStallReported();
}

}  // namespace farandole
