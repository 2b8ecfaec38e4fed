#include "ops/nccl/plan.h"

#include <bit>
#include <cstddef>

#include "ops/cpu/batch.h"
#include "ops/cuda/lane.h"

namespace farandole {
namespace {

constexpr int64_t kAlignBytes = 16;

bool IsSixteenBitFloat(DType dtype) { return IsFloating(dtype) && SizeOf(dtype) == 2; }
bool IsBroadcast(const Batch& batch) { return batch.kind == OpKind::kBroadcast; }
bool IsRoot(const Batch& batch) { return batch.my_index == batch.root_index; }
int SizeOfSet(const Batch& batch) { return static_cast<int>(batch.ranks.size()); }

// Elements from a tensor's begin to that of the next.
int64_t Stride(int64_t count, DType dtype) {
  const int64_t step = kAlignBytes / SizeOf(dtype);
  return (count + step - 1) / step * step;
}

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

// What this rank gives to the reduction.
const void* Contribution(const Batch& batch, const Segment& segment) {
  return IsAbsent(batch, batch.my_index) ? nullptr : segment.in;
}

DType Travels(const Batch& batch) {
  if (IsBroadcast(batch)) return batch.dtype;
  if (IsFloating(batch.dtype)) return batch.wire;
  if (batch.dtype == DType::kBool) return DType::kBool;
  const bool grows = batch.op == ReduceOp::kSum || batch.op == ReduceOp::kProduct;
  if (batch.op == ReduceOp::kAverage || (grows && batch.postscale != 1.0)) return DType::kInt64;
  return batch.dtype == DType::kInt16 ? DType::kInt32 : batch.dtype;
}

NcclDataType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUint8:
      return NcclDataType::kUint8;
    case DType::kInt8:
      return NcclDataType::kInt8;
    case DType::kInt16:  // travels as int32
    case DType::kInt32:
      return NcclDataType::kInt32;
    case DType::kInt64:
      return NcclDataType::kInt64;
    case DType::kFloat16:
      return NcclDataType::kFloat16;
    case DType::kBfloat16:
      return NcclDataType::kBfloat16;
    case DType::kFloat32:
      return NcclDataType::kFloat32;
    case DType::kFloat64:
      return NcclDataType::kFloat64;
  }
  return NcclDataType::kUint8;  // unreachable: CheckBatch knows the dtype
}

NcclRedOp OpOf(ReduceOp op, bool averages) {
  switch (op) {
    case ReduceOp::kSum:
      return NcclRedOp::kSum;
    case ReduceOp::kAverage:
      return averages ? NcclRedOp::kAvg : NcclRedOp::kSum;
    case ReduceOp::kMin:
      return NcclRedOp::kMin;
    case ReduceOp::kMax:
      return NcclRedOp::kMax;
    case ReduceOp::kProduct:
      return NcclRedOp::kProd;
  }
  return NcclRedOp::kSum;  // unreachable: CheckBatch knows the op
}

NcclPlan PlanBroadcast(const Batch& batch) {
  NcclPlan plan;
  plan.route = OnlyTensor(batch) != nullptr ? NcclPlan::Route::kStraight : NcclPlan::Route::kFused;
  plan.type = NcclDataType::kUint8;
  plan.pack = plan.unpack = BitwiseMove(batch.dtype);
  return plan;
}

NcclPlan PlanAllreduce(const Batch& batch) {
  const DType travels = Travels(batch);
  const bool floating = IsFloating(batch.dtype);
  const bool averages = batch.op == ReduceOp::kAverage;
  const bool as_it_is = travels == batch.dtype && batch.prescale == 1.0 && batch.postscale == 1.0;
  const bool can_go_straight = OnlyTensor(batch) != nullptr && as_it_is;
  const bool exact = std::has_single_bit(batch.ranks.size()) && can_go_straight;
  const bool folds = averages && IsSixteenBitFloat(travels) && !exact;
  const bool divides = averages && !floating;

  NcclPlan plan;
  const bool straight = can_go_straight && !folds && !divides;
  plan.route = straight ? NcclPlan::Route::kStraight : NcclPlan::Route::kFused;
  plan.type = TypeOf(travels);
  plan.op = OpOf(batch.op, floating && !folds);
  plan.pack = {.from = batch.dtype, .to = travels, .scale = batch.prescale, .op = batch.op};
  if (folds) plan.pack.scale /= SizeOfSet(batch);
  plan.unpack = {.from = travels, .to = batch.dtype, .scale = batch.postscale, .op = batch.op};
  if (divides) plan.unpack.divisor = SizeOfSet(batch);
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
    begin += Stride(segment.count, packed);
  }
  return end;
}

std::byte* At(void* buffer, int64_t offset) { return static_cast<std::byte*>(buffer) + offset; }

}  // namespace

NcclPlan PlanNccl(const Batch& batch) {
  if (batch.count == 0) return {};
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
  if (IsBroadcast(batch) && (!IsRoot(batch) || plan.route == NcclPlan::Route::kStraight)) return;
  if (plan.route == NcclPlan::Route::kStraight) {
    const Segment& only = *OnlyTensor(batch);
    if (Contribution(batch, only) != nullptr) return;
    moves.push_back({nullptr, EndsOf(batch, plan, buffer).out, only.count});
    return;
  }
  Walk(batch, plan.pack.to, [&](const Segment& segment, int64_t offset) {
    moves.push_back({Contribution(batch, segment), At(buffer, offset), segment.count});
  });
}

void UnpackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<DeviceMove>& moves) {
  moves.clear();
  if (plan.route != NcclPlan::Route::kFused) return;
  const bool at_root = IsBroadcast(batch) && IsRoot(batch);
  Walk(batch, plan.pack.to, [&](const Segment& segment, int64_t offset) {
    if (segment.out == nullptr || (at_root && segment.out == segment.in)) return;
    moves.push_back({At(buffer, offset), segment.out, segment.count});
  });
}

NcclEnds EndsOf(const Batch& batch, const NcclPlan& plan, void* buffer) {
  if (plan.route == NcclPlan::Route::kFused) return {buffer, buffer};
  const Segment& only = *OnlyTensor(batch);
  void* const spare = plan.buffer_bytes > 0 ? buffer : nullptr;
  void* const out = only.out != nullptr ? only.out : spare;
  const bool gives = IsBroadcast(batch) ? IsRoot(batch) : Contribution(batch, only) != nullptr;
  if (!gives) return {out, out};
  // A root that wants no result: in place, where NCCL writes nothing at the root.
  if (out == nullptr) return {only.in, const_cast<void*>(only.in)};
  return {only.in, out};
}

}  // namespace farandole
