#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "coordinator/diagnosis/diagnosis.h"

namespace farandole {
namespace {

/// Of the negotiation, by OpKind; what runs is named without the prefix.
constexpr const char* kSpans[] = {
    "NEGOTIATE_ALLREDUCE",     "NEGOTIATE_BROADCAST",   "NEGOTIATE_ALLGATHER",
    "NEGOTIATE_REDUCESCATTER", "NEGOTIATE_ALLTOALL",    "NEGOTIATE_BARRIER",
    "NEGOTIATE_PROCESS_SET",   "NEGOTIATE_PROCESS_SET", "NEGOTIATE_STEP"};
static_assert(std::size(kSpans) == static_cast<size_t>(kLastOpKind) + 1);
constexpr size_t kPrefix = sizeof("NEGOTIATE_") - 1;

const char* SpanOf(const Operation& operation) {
  return kSpans[static_cast<size_t>(operation.name.kind)];
}

/// As Horovod names a tensor: "allreduce.weight". Unnamed ones ("allreduce.noname.1") are so
/// already.
std::string TrackName(const KeyName& key) {
  return IsUnnamed(key) ? key.name : std::string(Name(key.kind)) + "." + key.name;
}

class TimelineEvents final : public EngineObserver {
 public:
  explicit TimelineEvents(Timeline& timeline) : timeline_(timeline) {}

  void Observe(EngineObservers& lists) override {
    for (auto* const list : {&lists.decided, &lists.batch_done, &lists.done}) list->push_back(this);
  }

  void OnDecided(const WorkDecision& work, const OperationRegistry& operations,
                 int64_t now_ns) override {
    if (!timeline_.on()) return;
    if (timeline_.marks_decisions()) timeline_.AddInstant("CYCLE_START", now_ns);
    for (const DecidedKey& key : work.keys) {
      Operation* const operation = key.mine ? operations.Find(key.key) : nullptr;
      if (operation == nullptr) continue;
      AddSpan(*operation, {0, SpanOf(*operation), operation->submitted_ns, now_ns, work.number});
    }
  }

  void OnDone(Operation& operation, int64_t now_ns) override {
    if (!timeline_.on()) return;
    AddSpan(operation, {0, SpanOf(operation) + kPrefix, operation.decided_ns, now_ns});
  }

  void OnBatchDone(const Batch& batch, int64_t began_ns, int64_t now_ns) override {
    if (!timeline_.on()) return;
    timeline_.Add(
        {0, "BATCH", began_ns, now_ns, batch.number, batch.count * SizeOf(batch.dtype), false});
  }

  void OnStalls(const std::vector<StallFacts>& stalls, bool, int64_t now_ns) override {
    if (!timeline_.on()) return;
    for (const StallFacts& stall : stalls) {
      const uint32_t track = timeline_.NameTrack(TrackName(stall.key));
      timeline_.Add({track, "STALL", now_ns, now_ns, -1, -1, true, DescribeStall(stall)});
    }
  }

 private:
  void AddSpan(Operation& operation, TimelineSpan span) {
    if (operation.track == 0) operation.track = timeline_.NameTrack(TrackName(operation.name));
    span.track = operation.track;
    span.bytes = TotalBytes(operation);
    span.set = operation.name.set;
    const std::vector<TensorSignature>& tensors = operation.signature.tensors;
    if (!tensors.empty()) span.dtype = Name(tensors.front().dtype);
    timeline_.Add(span);
  }

  Timeline& timeline_;
};

}  // namespace

std::unique_ptr<EngineObserver> MakeTimelineEvents(Timeline& timeline) {
  return std::make_unique<TimelineEvents>(timeline);
}

}  // namespace farandole
