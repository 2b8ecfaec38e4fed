#include "core/types.h"

namespace farandole {

// No switch here has a default, so that the compiler reports an enumerator that is missing. What
// follows a switch is for numbers that are no enumerator; those from outside are refused earlier
// (CheckRange).
int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kUint8:
    case DType::kInt8:
    case DType::kFloat8E4m3fn:
    case DType::kFloat8E5m2:
      return 1;
    case DType::kInt16:
    case DType::kUint16:
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

bool IsFloating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

bool IsDefined(ReduceOp op, DType dtype) {
  if (!IsReducible(dtype)) return false;
  if (IsFloating(dtype)) return !IsBitwise(op);
  if (op == ReduceOp::kAdasum) return false;
  // Of bool only sums and averages are missing: all else is `and`, `or` or `xor` of 0 and 1
  // (CpuKernels).
  const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAverage || op == ReduceOp::kPreMulSum;
  return dtype != DType::kBool || !sums;
}

Carrier CarrierOf(DType dtype) {
  if (IsReducible(dtype)) return {dtype, 1};
  switch (SizeOf(dtype)) {
    case 1:
      return {DType::kUint8, 1};
    case 2:
      return {DType::kInt16, 1};
    case 4:
      return {DType::kInt32, 1};
    default:
      return {DType::kInt64, SizeOf(dtype) / 8};
  }
}

DType WireDType(DType dtype, WireFormat wire) {
  // Integers would lose digits. A 16-bit float would lose range or precision as the other kind and
  // save no byte.
  const bool castable = dtype == DType::kFloat32 || dtype == DType::kFloat64;
  if (wire == WireFormat::kSame || !castable) return dtype;
  return wire == WireFormat::kFloat16 ? DType::kFloat16 : DType::kBfloat16;
}

// The names of torch, so that messages say what users wrote.
std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kUint8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kUint16:
      return "uint16";
    case DType::kUint32:
      return "uint32";
    case DType::kUint64:
      return "uint64";
    case DType::kComplex64:
      return "complex64";
    case DType::kComplex128:
      return "complex128";
    case DType::kFloat8E4m3fn:
      return "float8_e4m3fn";
    case DType::kFloat8E5m2:
      return "float8_e5m2";
  }
  return "unknown dtype";
}

std::string_view Name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAverage:
      return "average";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kBitAnd:
      return "bit_and";
    case ReduceOp::kBitOr:
      return "bit_or";
    case ReduceOp::kBitXor:
      return "bit_xor";
    case ReduceOp::kPreMulSum:
      return "premul_sum";
    case ReduceOp::kAdasum:
      return "adasum";
  }
  return "unknown op";
}

// The names of the functions of the Python package. The announcement of a step has none and is
// described.
std::string_view Name(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce:
      return "allreduce";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kAllgather:
      return "allgather";
    case OpKind::kReducescatter:
      return "reducescatter";
    case OpKind::kAlltoall:
      return "alltoall";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kAddSet:
      return "add_process_set";
    case OpKind::kRemoveSet:
      return "remove_process_set";
    case OpKind::kStep:
      return "optimizer step";
  }
  return "unknown kind";
}

std::string_view Name(DeviceKind device) {
  switch (device) {
    case DeviceKind::kCpu:
      return "cpu";
    case DeviceKind::kCuda:
      return "cuda";
  }
  return "unknown device";
}

std::string_view Name(WireFormat format) {
  switch (format) {
    case WireFormat::kSame:
      return "as it is";
    case WireFormat::kFloat16:
      return "float16";
    case WireFormat::kBfloat16:
      return "bfloat16";
  }
  return "unknown wire dtype";
}

}  // namespace farandole
