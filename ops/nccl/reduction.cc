#include "ops/nccl/reduction.h"

#include <bit>

#include "ops/cpu/batch.h"

namespace farandole {
namespace {

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
      break;  // refused by NcclWay::Begin
    case ReduceOp::kAdasum:
      break;
  }
  return NcclRedOp::kSum;  // unreachable: CheckBatch knows the op
}

}  // namespace

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

int64_t NcclStride(int64_t count, DType dtype) {
  const int64_t step = kAlignBytes / SizeOf(dtype);
  return (count + step - 1) / step * step;
}

const void* NcclContribution(const Batch& batch, const Segment& segment) {
  return IsAbsent(batch, batch.my_index) ? nullptr : segment.in;
}

}  // namespace farandole
