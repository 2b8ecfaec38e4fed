#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/diagnosis/diagnosis.h"

namespace farandole {
namespace {

class FlightEvents final : public EngineObserver {
 public:
  explicit FlightEvents(FlightRecorder& recorder) : recorder_(recorder) {}

  void Observe(EngineObservers& lists) override {
    for (auto* const list : {&lists.submitted, &lists.decided, &lists.finished, &lists.all})
      list->push_back(this);
  }

  void OnSubmitted(Operation& operation, int64_t now_ns) override {
    const std::vector<TensorSignature>& tensors = operation.signature.tensors;
    const DType dtype = tensors.empty() ? DType::kUint8 : tensors.front().dtype;
    operation.flight = recorder_.Record({FlightStep::kSubmitted, operation.name.kind, dtype,
                                         operation.name.set, now_ns, TotalBytes(operation)},
                                        operation.name.name);
  }

  void OnDecided(const WorkDecision& work, const OperationRegistry& operations,
                 int64_t now_ns) override {
    for (const DecidedKey& key : work.keys) {
      const Operation* const operation = key.mine ? operations.Find(key.key) : nullptr;
      if (operation != nullptr) recorder_.NoteDecided(operation->flight, now_ns);
    }
  }

  void OnFinished(const Operation& operation, const Status& status, int64_t now_ns) override {
    recorder_.NoteFinished(operation.flight, status.code(), now_ns);
  }

  void OnStep(const StepTimes& times) override { recorder_.NoteStep(times); }

  void OnFailed(const Status& error, int64_t now_ns) override {
    (void)recorder_.Record({.step = FlightStep::kFailed, .at_ns = now_ns}, error.message());
    OnStuck(error);
  }

  void OnStuck(const Status& error) override { recorder_.Dump("final error", error); }

  // As many as a report has lines: the ring shall not hold stalls alone.
  void OnStalls(const std::vector<StallFacts>& stalls, bool is_news, int64_t now_ns) override {
    if (!is_news) return;
    for (const StallFacts& stall :
         std::span(stalls).first(std::min(stalls.size(), kMostStallLines)))
      (void)recorder_.Record({.step = FlightStep::kStalled,
                              .kind = stall.key.kind,
                              .set = stall.key.set,
                              .at_ns = now_ns},
                             stall.key.name);
  }

  // Each rank that reads of a stall writes its file, so that all of them together explain it.
  void OnStallReported() override { recorder_.Dump("stall"); }

 private:
  FlightRecorder& recorder_;
};

}  // namespace

std::unique_ptr<EngineObserver> MakeFlightEvents(FlightRecorder& recorder) {
  return std::make_unique<FlightEvents>(recorder);
}

}  // namespace farandole
