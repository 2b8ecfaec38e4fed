#include "coordinator/engine/tracing.h"

#include <algorithm>
#include <span>
#include <string>

namespace farandole {
namespace {

struct SpanName {
  const char* negotiate;
  const char* run;
};

SpanName SpanNames(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce:
      return {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"};
    case OpKind::kBroadcast:
      return {"NEGOTIATE_BROADCAST", "BROADCAST"};
    case OpKind::kAllgather:
      return {"NEGOTIATE_ALLGATHER", "ALLGATHER"};
    case OpKind::kReducescatter:
      return {"NEGOTIATE_REDUCESCATTER", "REDUCESCATTER"};
    case OpKind::kAlltoall:
      return {"NEGOTIATE_ALLTOALL", "ALLTOALL"};
    case OpKind::kBarrier:
      return {"NEGOTIATE_BARRIER", "BARRIER"};
    case OpKind::kAddSet:
    case OpKind::kRemoveSet:
      return {"NEGOTIATE_PROCESS_SET", "PROCESS_SET"};
    case OpKind::kStep:
      return {"NEGOTIATE_STEP", "STEP"};
  }
  return {"NEGOTIATE", "RUN"};
}

/// As Horovod names a tensor: "allreduce.weight". Unnamed ones ("allreduce.noname.1") are so
/// already.
std::string TrackName(const KeyName& key) {
  return IsUnnamed(key) ? key.name : std::string(Name(key.kind)) + "." + key.name;
}

}  // namespace

void Tracing::OnSubmitted(Operation& operation, int64_t now_ns) {
  if (recorder_ == nullptr) return;
  const std::vector<TensorSignature>& tensors = operation.signature.tensors;
  const DType dtype = tensors.empty() ? DType::kUint8 : tensors.front().dtype;
  operation.flight = recorder_->Record({FlightStep::kSubmitted, operation.name.kind, dtype,
                                        operation.name.set, now_ns, TotalBytes(operation)},
                                       operation.name.name);
}

void Tracing::OnFinished(const Operation& operation, const Status& status, int64_t now_ns) {
  if (recorder_ != nullptr) recorder_->NoteFinished(operation.flight, status.code(), now_ns);
}

void Tracing::OnFailed(const Status& error, int64_t now_ns) {
  if (recorder_ == nullptr) return;
  (void)recorder_->Record({.step = FlightStep::kFailed, .at_ns = now_ns}, error.message());
  recorder_->Dump("final error", error);
}

void Tracing::OnDecision(const WorkDecision& work, const OperationRegistry& operations,
                         int64_t now_ns) {
  if (on() && timeline_->marks_decisions()) timeline_->AddInstant("CYCLE_START", now_ns);
  for (const DecidedKey& key : work.keys) {
    Operation* operation = key.mine ? operations.Find(key.key) : nullptr;
    if (operation == nullptr) continue;
    if (recorder_ != nullptr) recorder_->NoteDecided(operation->flight, now_ns);
    if (!on()) continue;
    AddSpan(*operation, SpanNames(operation->name.kind).negotiate, operation->submitted_ns, now_ns);
    operation->decided_ns = now_ns;
  }
}

// One that was decided while nobody traced has no beginning.
void Tracing::OnOperationDone(Operation& operation, int64_t now_ns) {
  if (!on() || operation.decided_ns == 0) return;
  AddSpan(operation, SpanNames(operation.name.kind).run, operation.decided_ns, now_ns);
}

void Tracing::OnBatchDone(const Batch& batch, int64_t began_ns, int64_t now_ns) {
  if (!on()) return;
  timeline_->Add(
      {0, "BATCH", began_ns, now_ns, batch.number, batch.count * SizeOf(batch.dtype), false});
}

void Tracing::OnStalls(const std::vector<StallFacts>& stalls, bool is_news, int64_t now_ns) {
  if (recorder_ != nullptr && is_news) {
    // As many as a report has lines: the ring shall not hold stalls alone.
    for (const StallFacts& stall :
         std::span(stalls).first(std::min(stalls.size(), kMostStallLines)))
      (void)recorder_->Record({.step = FlightStep::kStalled,
                               .kind = stall.key.kind,
                               .set = stall.key.set,
                               .at_ns = now_ns},
                              stall.key.name);
  }
  if (!on()) return;
  for (const StallFacts& stall : stalls) {
    const uint32_t track = timeline_->NameTrack(TrackName(stall.key));
    timeline_->Add({track, "STALL", now_ns, now_ns, -1, -1, true, DescribeStall(stall)});
  }
}

void Tracing::OnStallReported() {
  if (recorder_ != nullptr) recorder_->Dump("stall");
}

void Tracing::AddSpan(Operation& operation, const char* what, int64_t begin_ns, int64_t now_ns) {
  if (operation.track == 0) operation.track = timeline_->NameTrack(TrackName(operation.name));
  timeline_->Add({operation.track, what, begin_ns, now_ns, -1, TotalBytes(operation), false});
}

}  // namespace farandole
