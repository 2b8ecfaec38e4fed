#include "coordinator/engine/tracing.h"

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
  const std::string kind = std::string(Name(key.kind)) + ".";
  return key.name.starts_with(kind + "noname.") ? key.name : kind + key.name;
}

}  // namespace

void Tracing::OnSubmitted(const Operation& operation, int64_t now_ns) {
  Record(FlightStep::kSubmitted, operation, Code::kOk, now_ns);
}

void Tracing::OnFinished(const Operation& operation, const Status& status, int64_t now_ns) {
  Record(FlightStep::kFinished, operation, status.code(), now_ns);
}

void Tracing::OnFailed(const Status& error, int64_t now_ns) {
  if (recorder_ == nullptr) return;
  FlightFacts event;
  event.step = FlightStep::kFailed;
  event.code = error.code();
  event.at_ns = now_ns;
  recorder_->Record(event, error.message());
  recorder_->Dump("final error", error);
}

void Tracing::Record(FlightStep step, const Operation& operation, Code code, int64_t now_ns) {
  if (recorder_ == nullptr) return;
  const std::vector<TensorSignature>& tensors = operation.signature.tensors;
  FlightFacts event{step, operation.name.kind};
  if (!tensors.empty()) event.dtype = tensors.front().dtype;
  event.code = code;
  event.set = operation.name.set;
  event.at_ns = now_ns;
  if (step == FlightStep::kSubmitted) event.bytes = TotalBytes(operation);
  recorder_->Record(event, operation.name.name);
}

void Tracing::OnDecision(const WorkDecision& work, const OperationRegistry& operations,
                         int64_t now_ns) {
  if (on() && timeline_->marks_decisions()) timeline_->AddInstant("CYCLE_START", now_ns);
  for (const DecidedKey& key : work.keys) {
    Operation* operation = key.mine ? operations.Find(key.key) : nullptr;
    if (operation == nullptr) continue;
    Record(FlightStep::kDecided, *operation, Code::kOk, now_ns);
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

void Tracing::OnStalls(const std::vector<StallFacts>& stalls, int64_t now_ns) {
  for (const StallFacts& stall : stalls) {
    if (recorder_ != nullptr) {
      FlightFacts event;
      event.step = FlightStep::kStalled;
      event.kind = stall.key.kind;
      event.set = stall.key.set;
      event.at_ns = now_ns;
      recorder_->Record(event, stall.key.name);
    }
    if (!on()) continue;
    const uint32_t track = timeline_->NameTrack(TrackName(stall.key));
    timeline_->Add({track, "STALL", now_ns, now_ns, -1, -1, true, DescribeStall(stall)});
  }
  if (recorder_ != nullptr) recorder_->Dump("stall");
}

void Tracing::AddSpan(Operation& operation, const char* what, int64_t begin_ns, int64_t now_ns) {
  if (operation.track == 0) operation.track = timeline_->NameTrack(TrackName(operation.name));
  timeline_->Add({operation.track, what, begin_ns, now_ns, -1, TotalBytes(operation), false});
}

}  // namespace farandole
