#include "core/types.h"

namespace farandole {

// The switch has no default, so that the compiler reports an enumerator that is missing. What
// follows it is for numbers that are no enumerator; those from outside are refused earlier
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
  if (wire == WireFormat::kSame || wire == WireFormat::kInt8 || !castable) return dtype;
  return wire == WireFormat::kFloat16 ? DType::kFloat16 : DType::kBfloat16;
}

// The names of torch, so that messages say what users wrote.
std::string_view Name(DType dtype) {
  static constexpr std::string_view kNames[] = {
      "bool",    "uint8",     "int8",       "int16",         "int32",      "int64",
      "float16", "bfloat16",  "float32",    "float64",       "uint16",     "uint32",
      "uint64",  "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"};
  static_assert(std::size(kNames) == kDTypeCount);
  return NameAt(kNames, dtype, "unknown dtype");
}

std::string_view Name(ReduceOp op) {
  static constexpr std::string_view kNames[] = {"sum",        "average", "min",    "max",
                                                "product",    "bit_and", "bit_or", "bit_xor",
                                                "premul_sum", "adasum"};
  static_assert(std::size(kNames) == static_cast<size_t>(kLastReduceOp) + 1);
  return NameAt(kNames, op, "unknown op");
}

// The names of the functions of the Python package. The announcement of a step has none and is
// described.
std::string_view Name(OpKind kind) {
  static constexpr std::string_view kNames[] = {
      "allreduce", "broadcast",       "allgather",          "reducescatter", "alltoall",
      "barrier",   "add_process_set", "remove_process_set", "optimizer step"};
  static_assert(std::size(kNames) == static_cast<size_t>(kLastOpKind) + 1);
  return NameAt(kNames, kind, "unknown kind");
}

std::string_view Name(DeviceKind device) {
  static constexpr std::string_view kNames[] = {"cpu", "cuda"};
  static_assert(std::size(kNames) == kDeviceKindCount);
  return NameAt(kNames, device, "unknown device");
}

std::string_view Name(WireFormat format) {
  static constexpr std::string_view kNames[] = {"as it is", "float16", "bfloat16", "int8"};
  static_assert(std::size(kNames) == static_cast<size_t>(kLastWireFormat) + 1);
  return NameAt(kNames, format, "unknown wire dtype");
}

}  // namespace farandole
