#include "coordinator/diagnosis/diagnosis.h"

#include <atomic>
#include <mutex>
#include <set>

#include "coordinator/diagnosis/divergence.h"
#include "coordinator/diagnosis/late_ranks.h"
#include "coordinator/diagnosis/stall_monitor.h"

namespace farandole {

ObserveNegotiation Detectors(DetectorListener& listener, size_t hosts) {
  return [&listener, hosts](NodeState& node, Decider& decider) {
    std::vector<std::unique_ptr<NegotiationObserver>> detectors;
    if (node.options.size == 1) return detectors;  // it waits for nobody
    detectors.push_back(std::make_unique<Divergence>(node, decider, listener));
    detectors.push_back(std::make_unique<StallMonitor>(node, decider, listener));
    detectors.push_back(std::make_unique<LateRanks>(node, listener, hosts));
    return detectors;
  };
}

/// One that nobody has taken makes way for the next.
class Diagnosis::StepQueue final : public EngineObserver {
 public:
  void Observe(EngineObservers& lists) override { lists.all.push_back(this); }
  void OnStep(const StepTimes& times) override {
    const std::lock_guard lock(mutex_);
    last_ = times;
    is_there_ = true;
  }
  /// Asked for each submission, so it takes the lock only once there is one.
  std::optional<StepTimes> Take() {
    if (!is_there_.load(std::memory_order_relaxed)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    is_there_ = false;
    return last_;
  }

 private:
  std::mutex mutex_;
  StepTimes last_;
  std::atomic<bool> is_there_ = false;
};

Diagnosis::Diagnosis(const Options& options) : log_(*options.log), hosts_(options.hosts) {
  const auto add = [this](std::unique_ptr<EngineObserver> one) {
    observers_.push_back(std::move(one));
  };
  auto steps = std::make_unique<StepQueue>();
  steps_ = steps.get();
  add(std::move(steps));
  if (options.recorder != nullptr) add(MakeFlightEvents(*options.recorder));
  if (options.timeline != nullptr) add(MakeTimelineEvents(*options.timeline));
  if (options.nan_check != NanCheck::kOff) {
    add(MakeNumberCheck(options.nan_check, options.rank, log_));
  }
}

Diagnosis::~Diagnosis() = default;

void Diagnosis::Observe(EngineParts& parts) {
  observers_.push_back(MakeCountEvents(*parts.counters));
  for (const auto& one : observers_) one->Observe(parts.observers);
  const std::set<std::string> hosts(hosts_.begin(), hosts_.end());
  parts.observe_negotiation = Detectors(*this, hosts.size());
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

std::optional<StepTimes> Diagnosis::TakeStep() { return steps_->Take(); }

/// rank 3 (host b) makes all wait 8.00 ms of 61 in each step: its input takes 9.04 ms longer ...
/// A network that is merely used is no fault.
void Diagnosis::OnLate(const LateRank& late) {
  if (late.cause == LateBy::kNetwork)
    return log_.Write(LogLevel::kInfo, "all wait for the network for " + Describe(late));
  const auto rank = static_cast<size_t>(late.rank);
  const std::string host = rank < hosts_.size() ? " (host " + hosts_[rank] + ")" : "";
  log_.Write(LogLevel::kWarning,
             "rank " + std::to_string(late.rank) + host + " makes all wait " + Describe(late));
}

void Diagnosis::OnStallReported() {
  for (const auto& one : observers_) one->OnStallReported();
}

}  // namespace farandole
