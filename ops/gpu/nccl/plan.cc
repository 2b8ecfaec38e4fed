#include "ops/gpu/nccl/plan.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "ops/cpu/batch.h"
#include "ops/gpu/comm_stream.h"

namespace farandole {
namespace {

// How the elements of a reduction travel. It follows from what all members know alike, but for
// `as_it_is` and `pack.scale` of a sum, whose prescale may be this rank's own.
struct NcclReduction {
  DType travels = DType::kFloat32;
  NcclDataType type = NcclDataType::kFloat32;
  NcclRedOp op = NcclRedOp::kSum;
  bool as_it_is = false;  // NCCL may read and write the tensors: nothing is cast or multiplied
  MoveSpec pack;          // before and after NCCL, where they are
  MoveSpec unpack;
};

constexpr int64_t kAlignBytes = 16;

bool IsSixteenBitFloat(DType dtype) { return IsFloating(dtype) && SizeOf(dtype) == 2; }

DType Travels(const Batch& batch) {
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
    case DType::kUint16:
    case DType::kUint32:
    case DType::kUint64:
    case DType::kComplex64:
    case DType::kComplex128:
    case DType::kFloat8E4m3fn:
    case DType::kFloat8E5m2:
      break;
  }
  return NcclDataType::kUint8;  // unreachable: CheckBatch knows the dtype
}

NcclRedOp OpOf(ReduceOp op, bool averages) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kPreMulSum:
      return NcclRedOp::kSum;
    case ReduceOp::kAverage:
      return averages ? NcclRedOp::kAvg : NcclRedOp::kSum;
    case ReduceOp::kMin:
      return NcclRedOp::kMin;
    case ReduceOp::kMax:
      return NcclRedOp::kMax;
    case ReduceOp::kProduct:
      return NcclRedOp::kProd;
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      break;  // refused by the backend
    case ReduceOp::kAdasum:
      break;
  }
  return NcclRedOp::kSum;  // unreachable: CheckBatch knows the op
}

// `needs_buffer`: the tensors cannot be used where they are, whatever their type.
NcclReduction PlanReduction(const Batch& batch, bool needs_buffer) {
  const DType travels = Travels(batch);
  const auto size = static_cast<int>(batch.ranks.size());
  const bool floating = IsFloating(batch.dtype);
  const bool averages = batch.op == ReduceOp::kAverage;
  const bool plain = travels == batch.dtype && batch.prescale == 1.0 && batch.postscale == 1.0;
  const bool exact = std::has_single_bit(batch.ranks.size()) && plain && !needs_buffer;
  const bool folds = averages && IsSixteenBitFloat(travels) && !exact;
  const bool divides = averages && !floating;

  NcclReduction reduction;
  reduction.travels = travels;
  reduction.type = TypeOf(travels);
  reduction.op = OpOf(batch.op, floating && !folds);
  reduction.as_it_is = plain && !needs_buffer && !folds && !divides;
  reduction.pack = {.from = batch.dtype, .to = travels, .scale = batch.prescale, .op = batch.op};
  if (folds) reduction.pack.scale /= size;
  reduction.unpack = {.from = travels, .to = batch.dtype, .scale = batch.postscale, .op = batch.op};
  if (divides) reduction.unpack.divisor = size;
  return reduction;
}

// Elements from one tensor's begin in the buffer to that of the next.
int64_t NcclStride(int64_t count, DType dtype) {
  const int64_t step = kAlignBytes / SizeOf(dtype);
  return (count + step - 1) / step * step;
}

// What this rank gives to a reduction: nullptr if it is absent.
const void* NcclContribution(const Batch& batch, const Segment& segment) {
  return IsAbsent(batch, batch.my_index) ? nullptr : segment.in;
}

// ---- allreduce and broadcast ----

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

// ---- variable-size collectives ----

using Call = NcclPlan::Call;
using Route = NcclPlan::Route;
using Kind = NcclTransfer::Kind;

std::byte* At(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* At(const void* base, int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

const Segment& Only(const Batch& batch) { return batch.segments.front(); }
int64_t Members(const Batch& batch) { return static_cast<int64_t>(batch.ranks.size()); }
int64_t SplitOf(const Batch& batch, int member) {
  return batch.splits[static_cast<size_t>(member)];
}
int64_t LongestSplit(const Batch& batch) {
  return *std::max_element(batch.splits.begin(), batch.splits.end());
}
bool SplitsAreEqual(const Batch& batch) {
  return LongestSplit(batch) * Members(batch) == batch.count;
}

/// Where a result lies that is not wanted, but has to be somewhere, is the buffer.
void* OutOf(const Batch& batch, void* buffer) {
  return Only(batch).out != nullptr ? Only(batch).out : buffer;
}

// ---- reducescatter ----

/// From a split's begin in the buffer to that of the next.
int64_t SplitStrideBytes(const NcclPlan& plan) { return plan.count * SizeOf(plan.pack.to); }

/// The count must not depend on the route, which a rank's own prescale may decide: so equal splits
/// are not aligned in the buffer either.
NcclPlan PlanReducescatter(const Batch& batch) {
  const NcclReduction reduction = PlanReduction(batch, !SplitsAreEqual(batch));
  NcclPlan plan;
  plan.call = Call::kReduceScatter;
  plan.type = reduction.type;
  plan.op = reduction.op;
  plan.pack = reduction.pack;
  plan.unpack = reduction.unpack;
  plan.route = reduction.as_it_is ? Route::kStraight : Route::kFused;
  plan.count = LongestSplit(batch);
  if (!SplitsAreEqual(batch)) plan.count = NcclStride(plan.count, reduction.travels);
  const bool gives = NcclContribution(batch, Only(batch)) != nullptr;
  if (plan.route == Route::kFused || !gives) {
    plan.buffer_bytes = Members(batch) * SplitStrideBytes(plan);
  } else if (Only(batch).out == nullptr) {
    plan.buffer_bytes = SplitStrideBytes(plan);
  }
  return plan;
}

NcclEnds EndsOfReducescatter(const Batch& batch, const NcclPlan& plan, void* buffer) {
  const auto mine = [&] { return At(buffer, batch.my_index * SplitStrideBytes(plan)); };
  if (plan.route == Route::kFused) return {buffer, mine()};
  const void* const in = NcclContribution(batch, Only(batch));
  if (in != nullptr) return {in, OutOf(batch, buffer)};
  return {buffer, Only(batch).out != nullptr ? Only(batch).out : mine()};
}

// ---- allgather and alltoall ----

NcclPlan PlanCopies(const Batch& batch) {
  const bool gathers = batch.kind == OpKind::kAllgather;
  NcclPlan plan;
  plan.route = Route::kStraight;
  plan.call = gathers && SplitsAreEqual(batch) ? Call::kAllGather : Call::kGroup;
  if (plan.call == Call::kAllGather) plan.count = LongestSplit(batch) * SizeOf(batch.dtype);
  plan.pack = plan.unpack = BitwiseMove(batch.dtype);
  if (Only(batch).out == nullptr) {
    plan.buffer_bytes = OutputCount(batch, Only(batch)) * SizeOf(batch.dtype);
  }
  return plan;
}

void BroadcastSplits(const Batch& batch, void* out, std::vector<NcclTransfer>& transfers) {
  int64_t offset = 0;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t size_bytes = SplitOf(batch, member) * SizeOf(batch.dtype);
    if (size_bytes == 0) continue;
    std::byte* const to = At(out, offset);
    const void* const from = member == batch.my_index ? Only(batch).in : to;
    transfers.push_back({Kind::kBroadcast, member, from, to, size_bytes});
    offset += size_bytes;
  }
}

void ExchangeSplits(const Batch& batch, void* out, std::vector<NcclTransfer>& transfers) {
  int64_t sent = 0;
  int64_t received = 0;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t to = batch.sends[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    const int64_t from = batch.receives[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    if (to > 0) {
      transfers.push_back({Kind::kSend, member, At(Only(batch).in, sent), nullptr, to});
    }
    if (from > 0) {
      transfers.push_back({Kind::kReceive, member, nullptr, At(out, received), from});
    }
    sent += to;
    received += from;
  }
}

NcclPlan PlanVariableSize(const Batch& batch) {
  return batch.kind == OpKind::kReducescatter ? PlanReducescatter(batch) : PlanCopies(batch);
}

void PackVariableSize(const Batch& batch, const NcclPlan& plan, void* buffer,
                      std::vector<DeviceMove>& moves) {
  if (batch.kind != OpKind::kReducescatter) return;
  const void* const in = NcclContribution(batch, Only(batch));
  if (in == nullptr) {
    moves.push_back({nullptr, buffer, Members(batch) * plan.count});
    return;
  }
  if (plan.route == Route::kStraight) return;
  int64_t begin = 0;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t count = SplitOf(batch, member);
    moves.push_back(
        {At(in, begin * SizeOf(batch.dtype)), At(buffer, member * SplitStrideBytes(plan)), count});
    begin += count;
  }
}

void UnpackVariableSize(const Batch& batch, const NcclPlan& plan, void* buffer,
                        std::vector<DeviceMove>& moves) {
  const int64_t count = OutputCount(batch, Only(batch));
  if (plan.route != Route::kFused || Only(batch).out == nullptr || count == 0) return;
  moves.push_back({At(buffer, batch.my_index * SplitStrideBytes(plan)), Only(batch).out, count});
}

NcclEnds EndsOfVariableSize(const Batch& batch, const NcclPlan& plan, void* buffer) {
  if (batch.kind == OpKind::kReducescatter) return EndsOfReducescatter(batch, plan, buffer);
  return {Only(batch).in, OutOf(batch, buffer)};
}

}  // namespace

NcclPlan PlanNccl(const Batch& batch) {
  if (batch.count == 0) return {};
  if (IsVariableSize(batch.kind)) return PlanVariableSize(batch);
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
  if (IsVariableSize(batch.kind)) return PackVariableSize(batch, plan, buffer, moves);
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
  if (IsVariableSize(batch.kind)) return UnpackVariableSize(batch, plan, buffer, moves);
  const bool at_root = IsBroadcast(batch) && IsRoot(batch);
  Walk(batch, plan.pack.to, [&](const Segment& segment, int64_t offset) {
    if (segment.out == nullptr || (at_root && segment.out == segment.in)) return;
    moves.push_back({At(buffer, offset), segment.out, segment.count});
  });
}

NcclEnds EndsOf(const Batch& batch, const NcclPlan& plan, void* buffer) {
  if (IsVariableSize(batch.kind)) return EndsOfVariableSize(batch, plan, buffer);
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

void TransfersOf(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<NcclTransfer>& transfers) {
  transfers.clear();
  if (plan.route == Route::kNothing || plan.call != Call::kGroup) return;
  void* const out = OutOf(batch, buffer);
  if (batch.kind == OpKind::kAllgather) {
    BroadcastSplits(batch, out, transfers);
  } else {
    ExchangeSplits(batch, out, transfers);
  }
}

// Elements of a slice are a multiple of what 16 bytes can hold of any type, so that tensors of the
// next one are as aligned as the whole.
void NcclSlices::Begin(const Batch& batch, int64_t slice_bytes) {
  batch_ = &batch;
  each_ = std::max<int64_t>(batch.count, 1);
  count_ = 1;
  if (IsVariableSize(batch.kind) || batch.count == 0) return;
  const DType travels = Reduces(batch.kind) ? Travels(batch) : batch.dtype;
  const int64_t limit = std::max<int64_t>(slice_bytes / SizeOf(travels), kAlignBytes);
  count_ = (batch.count + limit - 1) / limit;
  each_ = ((batch.count + count_ - 1) / count_ + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  count_ = (batch.count + each_ - 1) / each_;
}

const Batch& NcclSlices::Get(int64_t number) {
  if (count_ == 1) return *batch_;
  slice_ = *batch_;
  segments_.clear();
  slice_.count = 0;
  const int64_t begin = number * each_;
  const int64_t end = std::min(begin + each_, batch_->count);
  int64_t first = 0;  // of the segment
  for (const Segment& segment : batch_->segments) {
    const int64_t from = std::max(begin, first) - first;
    const int64_t to = std::min(end, first + segment.count) - first;
    first += segment.count;
    if (to <= from) continue;
    const int64_t offset = from * SizeOf(batch_->dtype);
    segments_.push_back({segment.in == nullptr ? nullptr : At(segment.in, offset),
                         segment.out == nullptr ? nullptr : At(segment.out, offset), to - from});
    slice_.count += to - from;
  }
  slice_.segments = segments_;
  return slice_;
}

}  // namespace farandole
