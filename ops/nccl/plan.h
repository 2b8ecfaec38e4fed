// How one batch goes over NCCL: in which element type, with which of its operations, and what our
// kernels do before and after. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/data_plane.h"
#include "ops/device.h"
#include "ops/nccl/api.h"

namespace farandole {

/// The route, `type`, `op` and `count` follow from what all members know alike, so that all of them
/// make the same call of NCCL.
struct NcclPlan {
  enum class Route : uint8_t {
    kNothing,   ///< No elements.
    kStraight,  ///< One tensor as it is: NCCL reads and writes the user's memory.
    kFused,     ///< Packed into the fusion buffer, reduced there in place, unpacked.
  };
  Route route = Route::kNothing;
  NcclDataType type = NcclDataType::kFloat32;
  NcclRedOp op = NcclRedOp::kSum;
  int64_t count = 0;         ///< Elements of `type` for NCCL, the gaps of alignment included.
  int64_t buffer_bytes = 0;  ///< Of the fusion buffer, as far as this rank needs it.
  MoveSpec pack;
  MoveSpec unpack;
};

/// @param batch  A checked allreduce or broadcast (CheckBatch) of at least two members.
///
/// Types: floats travel as `wire`; bool as uint8; int16, which NCCL has not got, as int32. Integers
/// travel as int64 when their sum is divided or, like a product, multiplied afterwards; a sum that
/// wraps in the tensor's own width has the same bits as one that wraps later. Average: ncclAvg for
/// 32- and 64-bit floats; 16-bit wires are multiplied by 1/size in float, before the one rounding,
/// unless the tensor can go straight and 1/size is a power of two, where ncclAvg has the same bits.
/// Sums of int64 wrap in 64 bits even then: NCCL has nothing wider. Broadcasts move bytes. Every
/// tensor starts at a multiple of 16 bytes; what lies in the gaps is reduced along and read by
/// nobody.
NcclPlan PlanNccl(const Batch& batch);

/// What the launch before the collective moves, by `plan.pack`. Empty: no launch is needed.
/// `buffer` may be nullptr if plan.buffer_bytes is 0.
void PackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
               std::vector<DeviceMove>& moves);
/// After the collective, for `plan.unpack`.
void UnpackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<DeviceMove>& moves);

/// The pointers for the collective.
struct NcclEnds {
  const void* in = nullptr;
  void* out = nullptr;
};
NcclEnds EndsOf(const Batch& batch, const NcclPlan& plan, void* buffer);

}  // namespace farandole
