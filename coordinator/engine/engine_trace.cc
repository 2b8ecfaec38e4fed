// What the engine writes into the timeline, in Horovod's words.
#include "coordinator/engine/engine.h"

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

}  // namespace

void Engine::TraceDecision(const WorkDecision& work) {
  if (parts_.timeline->marks_decisions()) parts_.timeline->AddInstant("CYCLE_START", now_ns_);
  for (const DecidedKey& key : work.keys) {
    Operation* operation = key.mine ? FindOperation(key.key) : nullptr;
    if (operation == nullptr) continue;
    TraceSpan(*operation, SpanNames(operation->name.kind).negotiate, operation->submitted_ns);
    operation->decided_ns = now_ns_;
  }
}

void Engine::TraceRun(Operation& operation) {
  TraceSpan(operation, SpanNames(operation.name.kind).run, operation.decided_ns);
}

void Engine::TraceStall(const StallFacts& stall) {
  const uint32_t track = parts_.timeline->NameTrack(stall.key.name);
  parts_.timeline->Add({track, "STALL", now_ns_, now_ns_, -1, -1, true, DescribeStall(stall)});
}

void Engine::TraceSpan(Operation& operation, const char* what, int64_t begin_ns) {
  if (operation.track == 0) operation.track = parts_.timeline->NameTrack(operation.name.name);
  parts_.timeline->Add(
      {operation.track, what, begin_ns, now_ns_, -1, TotalBytes(operation.signature), false});
}

}  // namespace farandole
