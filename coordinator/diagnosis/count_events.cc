#include <cstddef>
#include <cstdint>

#include "coordinator/diagnosis/diagnosis.h"

namespace farandole {
namespace {

/// Counts what a user can watch: operations by kind, where their time goes, errors and stalls.
class CountEvents final : public EngineObserver {
 public:
  explicit CountEvents(Counters& counters) : counters_(counters) {}

  void Observe(EngineObservers& lists) override {
    lists.finished.push_back(this);
    lists.all.push_back(this);
  }

  // Times are those of the engine's iterations. One that was refused was never decided.
  void OnFinished(const Operation& operation, const Status& status, int64_t now_ns) override {
    const OpKind kind = operation.name.kind;
    if (kind > OpKind::kBarrier) return;
    const int64_t decided_ns = operation.decided_ns > 0 ? operation.decided_ns : now_ns;
    counters_.Add(EndedOf(kind));
    counters_.Add(Counter::kNegotiationNs, decided_ns - operation.submitted_ns);
    counters_.Add(Counter::kExecutionNs, now_ns - decided_ns);
    if (!status.ok() && !has_failed_) counters_.Add(Counter::kOperationErrors);
  }

  void OnFailed(const Status&, int64_t /*now_ns*/) override { has_failed_ = true; }

  void OnStep(const StepTimes& times) override {
    counters_.AddShared(Counter::kSteps, 1);
    auto counter = static_cast<size_t>(Counter::kStepNs);
    for (const auto time : kTimesOfStep)
      counters_.AddShared(static_cast<Counter>(counter++), times.*time);
  }

  void OnStallReported() override { counters_.Add(Counter::kStallReports); }

 private:
  Counters& counters_;
  bool has_failed_ = false;  // the engine; what ends then ends by its error
};

}  // namespace

std::unique_ptr<EngineObserver> MakeCountEvents(Counters& counters) {
  return std::make_unique<CountEvents>(counters);
}

}  // namespace farandole
