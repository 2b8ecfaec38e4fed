#include "ops/nccl/plan.h"

#include <cstddef>

#include "ops/cpu/batch.h"
#include "ops/cuda/lane.h"
#include "ops/nccl/plan_parts.h"
#include "ops/nccl/reduction.h"

namespace farandole {
namespace {

bool IsBroadcast(const Batch& batch) { return batch.kind == OpKind::kBroadcast; }
bool IsRoot(const Batch& batch) { return batch.my_index == batch.root_index; }

// The one tensor that has elements, or nullptr if there are several.
const Segment* OnlyTensor(const Batch& batch) {
  const Segment* only = nullptr;
  for (const Segment& segment : batch.segments) {
    if (segment.count == 0) continue;
    if (only != nullptr) return nullptr;
    only = &segment;
  }
  return only;
}

NcclPlan PlanBroadcast(const Batch& batch) {
  NcclPlan plan;
  plan.route = OnlyTensor(batch) != nullptr ? NcclPlan::Route::kStraight : NcclPlan::Route::kFused;
  plan.call = NcclPlan::Call::kBroadcast;
  plan.type = NcclDataType::kUint8;
  plan.pack = plan.unpack = BitwiseMove(batch.dtype);
  return plan;
}

NcclPlan PlanAllreduce(const Batch& batch) {
  const NcclReduction reduction = PlanReduction(batch, OnlyTensor(batch) == nullptr);
  NcclPlan plan;
  plan.route = reduction.as_it_is ? NcclPlan::Route::kStraight : NcclPlan::Route::kFused;
  plan.call = NcclPlan::Call::kAllReduce;
  plan.type = reduction.type;
  plan.op = reduction.op;
  plan.pack = reduction.pack;
  plan.unpack = reduction.unpack;
  return plan;
}

// Calls `visit(segment, byte offset in the packed buffer)` for every tensor that has elements.
// @return Elements up to the end of the last.
template <class Visit>
int64_t Walk(const Batch& batch, DType packed, Visit visit) {
  int64_t begin = 0;
  int64_t end = 0;
  for (const Segment& segment : batch.segments) {
    if (segment.count == 0) continue;
    visit(segment, begin * SizeOf(packed));
    end = begin + segment.count;
    begin += NcclStride(segment.count, packed);
  }
  return end;
}

std::byte* At(void* buffer, int64_t offset) { return static_cast<std::byte*>(buffer) + offset; }

}  // namespace

NcclPlan PlanNccl(const Batch& batch) {
  if (batch.count == 0) return {};
  if (IsVariableSize(batch.kind)) return PlanParts(batch);
  NcclPlan plan = IsBroadcast(batch) ? PlanBroadcast(batch) : PlanAllreduce(batch);
  const DType packed = plan.pack.to;
  const int64_t count = Walk(batch, packed, [](const Segment&, int64_t) {});
  const int64_t bytes = count * SizeOf(packed);
  plan.count = IsBroadcast(batch) ? bytes : count;
  if (plan.route == NcclPlan::Route::kFused) {
    plan.buffer_bytes = bytes;
  } else if (OnlyTensor(batch)->out == nullptr) {
    plan.buffer_bytes = IsBroadcast(batch) && IsRoot(batch) ? 0 : bytes;
  }
  return plan;
}

void PackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
               std::vector<DeviceMove>& moves) {
  moves.clear();
  if (plan.route == NcclPlan::Route::kNothing) return;
  if (IsVariableSize(batch.kind)) return PackParts(batch, plan, buffer, moves);
  if (IsBroadcast(batch) && (!IsRoot(batch) || plan.route == NcclPlan::Route::kStraight)) return;
  if (plan.route == NcclPlan::Route::kStraight) {
    const Segment& only = *OnlyTensor(batch);
    if (NcclContribution(batch, only) != nullptr) return;
    moves.push_back({nullptr, EndsOf(batch, plan, buffer).out, only.count});
    return;
  }
  Walk(batch, plan.pack.to, [&](const Segment& segment, int64_t offset) {
    moves.push_back({NcclContribution(batch, segment), At(buffer, offset), segment.count});
  });
}

void UnpackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<DeviceMove>& moves) {
  moves.clear();
  if (plan.route != NcclPlan::Route::kFused) return;
  if (IsVariableSize(batch.kind)) return UnpackParts(batch, plan, buffer, moves);
  const bool at_root = IsBroadcast(batch) && IsRoot(batch);
  Walk(batch, plan.pack.to, [&](const Segment& segment, int64_t offset) {
    if (segment.out == nullptr || (at_root && segment.out == segment.in)) return;
    moves.push_back({At(buffer, offset), segment.out, segment.count});
  });
}

NcclEnds EndsOf(const Batch& batch, const NcclPlan& plan, void* buffer) {
  if (IsVariableSize(batch.kind)) return EndsOfParts(batch, plan, buffer);
  if (plan.route == NcclPlan::Route::kFused) return {buffer, buffer};
  const Segment& only = *OnlyTensor(batch);
  void* const spare = plan.buffer_bytes > 0 ? buffer : nullptr;
  void* const out = only.out != nullptr ? only.out : spare;
  const bool gives = IsBroadcast(batch) ? IsRoot(batch) : NcclContribution(batch, only) != nullptr;
  if (!gives) return {out, out};
  // A root that wants no result: in place, where NCCL writes nothing at the root.
  if (out == nullptr) return {only.in, const_cast<void*>(only.in)};
  return {only.in, out};
}

}  // namespace farandole
