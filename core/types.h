// The vocabulary every layer shares: element types, reductions, collective kinds, devices.
//
// Thread safety: plain values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace farandole {

/// Element type of a tensor. The numbers are part of the C ABI and of the wire protocol: never
/// reuse one.
enum class DType : uint8_t {
  kBool = 0,
  kUint8 = 1,
  kInt8 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kBfloat16 = 7,
  kFloat32 = 8,
  kFloat64 = 9,
  kUint16 = 10,  ///< From here on: moved, not reduced (IsReducible).
  kUint32 = 11,
  kUint64 = 12,
  kComplex64 = 13,  ///< Two float32.
  kComplex128 = 14,
  kFloat8E4m3fn = 15,
  kFloat8E5m2 = 16,
};
inline constexpr int kDTypeCount = 17;
inline constexpr int kReducibleDTypeCount = 10;

/// How contributions are combined. The numbers are part of the C ABI and of the wire protocol.
enum class ReduceOp : uint8_t {
  kSum = 0,
  kAverage = 1,  ///< The sum divided by the size of the process set.
  kMin = 2,
  kMax = 3,
  kProduct = 4,
  kBitAnd = 5,  ///< The bitwise ones are for integers and, on 0 and 1, for bool.
  kBitOr = 6,
  kBitXor = 7,
  kPreMulSum = 8,  ///< A sum to which each rank gives its own `prescale` (Collective).
  kAdasum = 9,     ///< The adaptive sum of ops/cpu/adasum.h, of allreduce and floats.
};
inline constexpr ReduceOp kLastReduceOp = ReduceOp::kAdasum;
constexpr bool IsBitwise(ReduceOp op) {
  return op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
}

/// What a key negotiates. Kinds from kBarrier on move no tensor.
enum class OpKind : uint8_t {
  kAllreduce = 0,
  kBroadcast = 1,
  kAllgather = 2,
  kReducescatter = 3,
  kAlltoall = 4,
  kBarrier = 5,
  kAddSet = 6,
  kRemoveSet = 7,
  kStep = 8,  ///< Ranks compare the step of an optimizer; nobody waits for it.
};
inline constexpr OpKind kLastOpKind = OpKind::kStep;

/// Whether ranks contribute or receive different splits of a tensor: allgather, reducescatter,
/// alltoall.
constexpr bool IsVariableSize(OpKind kind) {
  return kind == OpKind::kAllgather || kind == OpKind::kReducescatter || kind == OpKind::kAlltoall;
}

enum class DeviceKind : uint8_t { kCpu = 0, kCuda = 1 };
inline constexpr DeviceKind kLastDeviceKind = DeviceKind::kCuda;
inline constexpr int kDeviceKindCount = 2;

/// Element type on the wire: the tensor's own, or a 16-bit type for float32 and float64 tensors.
/// kInt8: between hosts, sums and averages of float32 travel as blocks of 8-bit integers
/// (ops/cpu/quantize.h); all else as it is.
enum class WireFormat : uint8_t { kSame = 0, kFloat16 = 1, kBfloat16 = 2, kInt8 = 3 };
inline constexpr WireFormat kLastWireFormat = WireFormat::kInt8;

/// Size of one element in bytes.
int64_t SizeOf(DType dtype);
/// Whether it is a floating type that can be reduced.
bool IsFloating(DType dtype);
/// Whether elements of the type can be combined at all. The others are only moved, by broadcast,
/// allgather and alltoall.
constexpr bool IsReducible(DType dtype) { return static_cast<int>(dtype) < kReducibleDTypeCount; }
/// Whether elements of the type can be combined by `op`: bool has no sums, floats no bitwise ops,
/// and nothing but floats an adasum.
bool IsDefined(ReduceOp op, DType dtype);
/// As what an element is moved: `count` elements of a type that can be reduced, which are the only
/// ones that data planes know.
struct Carrier {
  DType dtype = DType::kUint8;
  int64_t count = 1;
};
Carrier CarrierOf(DType dtype);
/// The dtype that travels for a tensor of `dtype`: integers and 16-bit floats always travel as they
/// are. That of kInt8 is the tensor's own: what is made of it is no element.
DType WireDType(DType dtype, WireFormat wire);

/// The name of an enumerator, from a table that has one for each in the order of their numbers, all
/// of them literals; `unknown` for a number that is none.
template <class Enum, size_t kCount>
constexpr std::string_view NameAt(const std::string_view (&names)[kCount], Enum value,
                                  std::string_view unknown) {
  const auto number = static_cast<size_t>(value);
  return number < kCount ? names[number] : unknown;
}

/// Lower-case names as users write them: "float32", "average", "allreduce", "cpu".
std::string_view Name(DType dtype);
std::string_view Name(ReduceOp op);
std::string_view Name(OpKind kind);
std::string_view Name(DeviceKind device);
std::string_view Name(WireFormat format);  ///< "as it is", "float16", "bfloat16", "int8".

}  // namespace farandole
