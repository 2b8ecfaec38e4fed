#include "ops/gpu/nccl/plan.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "ops/gpu/comm_stream.h"

namespace farandole {
namespace {

using Buffer = NcclBufferSource;
using Kind = NcclCall::Kind;

constexpr int64_t kAlignBytes = 16;

bool IsSixteenBitFloat(DType dtype) { return IsFloating(dtype) && SizeOf(dtype) == 2; }

DType WireTypeOf(const Batch& batch) {
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

// Sets type, operation and factors of a reduction. They follow from what all members know alike,
// but for the prescale of a sum, which may be this rank's own.
//
// @param needs_buffer  The tensors cannot be used where they are, whatever their type.
// @return Whether NCCL may read and write the tensors: nothing is cast or multiplied.
bool PlanReduction(const Batch& batch, bool needs_buffer, NcclPlan& plan) {
  NcclCall& call = plan.calls.front();
  const DType wire = WireTypeOf(batch);
  const auto size = static_cast<int>(batch.ranks.size());
  const bool floating = IsFloating(batch.dtype);
  const bool averages = batch.op == ReduceOp::kAverage;
  const bool plain = wire == batch.dtype && batch.prescale == 1.0 && batch.postscale == 1.0;
  const bool exact = std::has_single_bit(batch.ranks.size()) && plain && !needs_buffer;
  const bool merges = averages && IsSixteenBitFloat(wire) && !exact;  // 1/size into the prescale
  const bool divides = averages && !floating;

  call.type = TypeOf(wire);
  call.op = OpOf(batch.op, floating && !merges);
  plan.pack_spec = {.from = batch.dtype, .to = wire, .scale = batch.prescale, .op = batch.op};
  if (merges) plan.pack_spec.scale /= size;
  plan.unpack_spec = {.from = wire, .to = batch.dtype, .scale = batch.postscale, .op = batch.op};
  if (divides) plan.unpack_spec.divisor = size;
  const bool direct = plain && !needs_buffer && !merges && !divides;
  if (direct) plan.unpack_spec = BitwiseCopy(batch.dtype);
  return direct;
}

// Elements from one tensor's begin in the buffer to that of the next.
int64_t NcclStride(int64_t count, DType dtype) {
  const int64_t step = kAlignBytes / SizeOf(dtype);
  return (count + step - 1) / step * step;
}

// What this rank contributes: nullptr if it is absent.
const void* Contribution(const Batch& batch, const Segment& segment) {
  return IsAbsent(batch, batch.my_index) ? nullptr : segment.in;
}

// Where a result lies that is not wanted, but has to be somewhere, is the buffer.
Result<void*> OutOr(const Buffer& buffer, void* out, int64_t size_bytes) {
  return out != nullptr || size_bytes == 0 ? Result<void*>(out) : buffer(size_bytes);
}

void Unpack(NcclPlan& plan, const void* from, void* out, int64_t count) {
  if (out != nullptr && count > 0) plan.unpack.push_back({from, out, count});
}

std::byte* At(void* base, int64_t offset) { return static_cast<std::byte*>(base) + offset; }
const std::byte* At(const void* base, int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

// ---- allreduce and broadcast ----

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

// Elements up to the end of the last tensor in the buffer.
int64_t PackedCount(const Batch& batch, DType packed) {
  int64_t begin = 0;
  int64_t end = 0;
  for (const Segment& segment : batch.segments) {
    if (segment.count == 0) continue;
    end = begin + segment.count;
    begin += NcclStride(segment.count, packed);
  }
  return end;
}

// Of a broadcast the root alone packs, and does not unpack what it has in place.
Status PlanFused(const Batch& batch, const Buffer& buffer, NcclPlan& plan) {
  const DType packed = plan.pack_spec.to;
  const bool broadcasts = batch.kind == OpKind::kBroadcast;
  const bool is_root = broadcasts && batch.my_index == batch.root_index;
  Result<void*> memory = buffer(PackedCount(batch, packed) * SizeOf(packed));
  if (!memory.ok()) return memory.status();
  plan.calls.front().in = plan.calls.front().out = memory.value();
  int64_t offset = 0;
  for (const Segment& segment : batch.segments) {
    if (segment.count == 0) continue;
    std::byte* const at = At(memory.value(), offset);
    if (!broadcasts || is_root) {
      plan.pack.push_back({Contribution(batch, segment), at, segment.count});
    }
    if (!is_root || segment.out != segment.in) Unpack(plan, at, segment.out, segment.count);
    offset += NcclStride(segment.count, packed) * SizeOf(packed);
  }
  return {};
}

Status PlanAllreduce(const Batch& batch, const Buffer& buffer, NcclPlan& plan) {
  NcclCall& call = plan.calls.emplace_back(NcclCall{.kind = Kind::kAllReduce});
  const Segment* const only = OnlyTensor(batch);
  const bool direct = PlanReduction(batch, only == nullptr, plan);
  const DType wire = plan.pack_spec.to;
  call.count = PackedCount(batch, wire);
  if (!direct) return PlanFused(batch, buffer, plan);
  Result<void*> out = OutOr(buffer, only->out, call.count * SizeOf(wire));
  if (!out.ok()) return out.status();
  call.in = Contribution(batch, *only);
  call.out = out.value();
  if (call.in == nullptr) {
    plan.pack.push_back({nullptr, out.value(), only->count});
    call.in = out.value();
  }
  Unpack(plan, only->out, only->out, only->count);
  return {};
}

// NCCL writes nothing to a root that broadcasts in place, as one does that wants no result.
Status PlanBroadcast(const Batch& batch, const Buffer& buffer, NcclPlan& plan) {
  NcclCall& call = plan.calls.emplace_back(NcclCall{.kind = Kind::kBroadcast});
  const Segment* const only = OnlyTensor(batch);
  plan.pack_spec = plan.unpack_spec = BitwiseCopy(batch.dtype);
  call.peer = batch.root_index;
  call.count = PackedCount(batch, batch.dtype) * SizeOf(batch.dtype);
  if (only == nullptr) return PlanFused(batch, buffer, plan);
  if (batch.my_index == batch.root_index) {
    call.in = only->in;
    call.out = only->out != nullptr ? only->out : const_cast<void*>(only->in);
    if (only->out != only->in) Unpack(plan, only->out, only->out, only->count);
    return {};
  }
  Result<void*> out = OutOr(buffer, only->out, call.count);
  if (!out.ok()) return out.status();
  call.in = call.out = out.value();
  Unpack(plan, only->out, only->out, only->count);
  return {};
}

// ---- variable-size collectives, which have one segment ----

int64_t Members(const Batch& batch) { return static_cast<int64_t>(batch.ranks.size()); }
int64_t LongestSplit(const Batch& batch) {
  return *std::max_element(batch.splits.begin(), batch.splits.end());
}
bool SplitsAreEqual(const Batch& batch) {
  return LongestSplit(batch) * Members(batch) == batch.count;
}

// Every split as long as the longest, end to end; an absent rank's all the identity.
void PackSplits(const Batch& batch, const void* in, std::byte* to, NcclPlan& plan) {
  const int64_t each = plan.calls.front().count;
  if (in == nullptr) return plan.pack.push_back({nullptr, to, Members(batch) * each});
  for (const int64_t split : batch.splits) {
    plan.pack.push_back({in, to, split});
    in = At(in, split * SizeOf(batch.dtype));
    to += each * SizeOf(plan.pack_spec.to);
  }
}

// The count must not depend on whether NCCL uses the tensors, which a rank's own prescale may
// decide: so equal splits are not aligned in the buffer either.
Status PlanReducescatter(const Batch& batch, const Buffer& buffer, NcclPlan& plan) {
  NcclCall& call = plan.calls.emplace_back(NcclCall{.kind = Kind::kReduceScatter});
  const Segment& only = batch.segments.front();
  const bool equal = SplitsAreEqual(batch);
  const bool direct = PlanReduction(batch, !equal, plan);
  const DType wire = plan.pack_spec.to;
  call.count = LongestSplit(batch);
  if (!equal) call.count = NcclStride(call.count, wire);
  const int64_t split_bytes = call.count * SizeOf(wire);
  const int64_t count = OutputCount(batch, only);
  const void* const in = Contribution(batch, only);
  if (direct) Unpack(plan, only.out, only.out, count);
  if (direct && in != nullptr) {
    Result<void*> out = OutOr(buffer, only.out, split_bytes);
    if (!out.ok()) return out.status();
    call.in = in;
    call.out = out.value();
    return {};
  }
  Result<void*> memory = buffer(Members(batch) * split_bytes);
  if (!memory.ok()) return memory.status();
  std::byte* const mine = At(memory.value(), batch.my_index * split_bytes);
  PackSplits(batch, in, At(memory.value(), 0), plan);
  call.in = memory.value();
  call.out = direct && only.out != nullptr ? only.out : mine;
  if (!direct) Unpack(plan, mine, only.out, count);
  return {};
}

void BroadcastSplits(const Batch& batch, void* out, std::vector<NcclCall>& calls) {
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t bytes = batch.splits[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    if (bytes == 0) continue;
    const void* const in = member == batch.my_index ? batch.segments.front().in : out;
    calls.push_back(
        {.kind = Kind::kBroadcast, .in = in, .out = out, .count = bytes, .peer = member});
    out = At(out, bytes);
  }
}

void ExchangeSplits(const Batch& batch, void* out, std::vector<NcclCall>& calls) {
  const void* in = batch.segments.front().in;
  for (int member = 0; member < Members(batch); ++member) {
    const int64_t to = batch.sends[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    const int64_t from = batch.receives[static_cast<size_t>(member)] * SizeOf(batch.dtype);
    if (to > 0) calls.push_back({.kind = Kind::kSend, .in = in, .count = to, .peer = member});
    if (from > 0)
      calls.push_back({.kind = Kind::kReceive, .out = out, .count = from, .peer = member});
    in = At(in, to);
    out = At(out, from);
  }
}

Status PlanAllgatherOrAlltoall(const Batch& batch, const Buffer& buffer, NcclPlan& plan) {
  const Segment& only = batch.segments.front();
  const int64_t count = OutputCount(batch, only);
  plan.pack_spec = plan.unpack_spec = BitwiseCopy(batch.dtype);
  Result<void*> out = OutOr(buffer, only.out, count * SizeOf(batch.dtype));
  if (!out.ok()) return out.status();
  Unpack(plan, only.out, only.out, count);
  if (batch.kind == OpKind::kAlltoall) {
    ExchangeSplits(batch, out.value(), plan.calls);
  } else if (SplitsAreEqual(batch)) {
    const int64_t bytes = LongestSplit(batch) * SizeOf(batch.dtype);
    plan.calls.push_back(
        {.kind = Kind::kAllGather, .in = only.in, .out = out.value(), .count = bytes});
  } else {
    BroadcastSplits(batch, out.value(), plan.calls);
  }
  return {};
}

}  // namespace

Status PlanNccl(const Batch& batch, const NcclBufferSource& buffer, NcclPlan& plan) {
  plan.pack.clear();
  plan.unpack.clear();
  plan.calls.clear();
  if (batch.count == 0) return {};
  if (batch.kind == OpKind::kAllreduce) return PlanAllreduce(batch, buffer, plan);
  if (batch.kind == OpKind::kBroadcast) return PlanBroadcast(batch, buffer, plan);
  if (batch.kind == OpKind::kReducescatter) return PlanReducescatter(batch, buffer, plan);
  return PlanAllgatherOrAlltoall(batch, buffer, plan);
}

// Elements of a slice are a multiple of what 16 bytes can hold of any type, so that tensors of the
// next one are as aligned as the whole.
void NcclSlices::Begin(const Batch& batch, int64_t slice_bytes) {
  batch_ = &batch;
  left_ = 1;
  begin_ = 0;
  if (IsVariableSize(batch.kind) || batch.count == 0) return;
  const DType wire = Reduces(batch.kind) ? WireTypeOf(batch) : batch.dtype;
  const int64_t limit = std::max<int64_t>(slice_bytes / SizeOf(wire), kAlignBytes);
  left_ = (batch.count + limit - 1) / limit;
  each_ = ((batch.count + left_ - 1) / left_ + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  left_ = (batch.count + each_ - 1) / each_;
  cursor_ = SegmentCursor(batch.segments, batch.dtype);
}

const Batch* NcclSlices::Next() {
  if (left_-- == 0) return nullptr;
  if (left_ == 0 && begin_ == 0) return batch_;
  slice_ = *batch_;
  slice_.count = std::min(each_, batch_->count - begin_);
  begin_ += slice_.count;
  segments_.clear();
  for (int64_t left = slice_.count; left > 0; left -= segments_.back().count) {
    const Run run = cursor_.Next(left);
    segments_.push_back({run.in, run.out, run.count});
  }
  slice_.segments = segments_;
  return &slice_;
}

}  // namespace farandole
