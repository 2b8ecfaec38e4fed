// The description of a collective: everything that its ranks must agree on apart from the tensors.
//
// There is one such struct. The C API fills it, a signature and a batch contain it, and here are
// the functions that check, compare and hash it (messages are encoded in
// coordinator/control/wire/).
#pragma once

#include <cstdint>

#include "core/status.h"
#include "core/types.h"

namespace farandole {

/// A new option of collectives is one more field here. Base class of what has tensors or memory
/// besides.
struct Collective {
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;                ///< Allreduce, reducescatter.
  WireFormat wire_format = WireFormat::kSame;  ///< Allreduce, reducescatter.
  DeviceKind device = DeviceKind::kCpu;        ///< Where the tensors are.
  int32_t root = -1;                           ///< Broadcast: global rank; -1 otherwise.
  /// Multiplies each contribution, before it is rounded to the wire type. With ReduceOp::kPreMulSum
  /// each rank has its own, and ranks agree on 1.0 (OperationRegistry takes the rank's own out).
  double prescale = 1.0;
  double postscale = 1.0;  ///< Multiplies the reduced value before its one rounding.
  bool operator==(const Collective&) const = default;
};

/// A number from outside is one of 0 to `last`. @return InvalidArgument naming the field, the
/// number and the range.
Status CheckRange(const char* field, int64_t number, int64_t last);

/// A collective as numbers from outside: from C, or received.
struct CollectiveNumbers {
  int64_t kind = 0;
  int64_t op = 0;
  int64_t wire_format = 0;
  int64_t device = 0;
  int32_t root = -1;
  double prescale = 1.0;
  double postscale = 1.0;
};

/// @return InvalidArgument naming the field, its value and the range where a number is none of the
/// enumeration; the other fields are checked where the tensors and the ranks are known (Validate).
Result<Collective> ToCollective(const CollectiveNumbers& numbers);

/// Whether the kind combines contributions by `op`.
constexpr bool Reduces(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter;
}

/// Whether the result is a sum of the contributions, or what follows from it.
constexpr bool AddsUp(const Collective& collective) {
  return Reduces(collective.kind) &&
         (collective.op == ReduceOp::kSum || collective.op == ReduceOp::kAverage ||
          collective.op == ReduceOp::kPreMulSum);
}

/// Whether it runs as several collectives of a data plane (ops/cpu/adasum.h).
constexpr bool IsAdasum(const Collective& collective) {
  return collective.kind == OpKind::kAllreduce && collective.op == ReduceOp::kAdasum;
}

/// Equal for equal descriptions, on every rank.
uint64_t Hash(const Collective& collective);

/// Adds a value to a hash (splitmix64, by Steele, Lea and Flood, OOPSLA 2014).
uint64_t Mix(uint64_t digest, uint64_t value);

}  // namespace farandole
