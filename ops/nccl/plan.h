// How one batch goes over NCCL: in which element type, with which of its operations, and what our
// kernels do before and after. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/data_plane.h"
#include "ops/device.h"
#include "ops/nccl/api.h"
#include "ops/nccl/transfer.h"

namespace farandole {

/// `route`, `call`, `type`, `op` and `count` follow from what all members know alike, so that all
/// of them make the same call of NCCL; of an alltoall each makes its own part.
struct NcclPlan {
  enum class Route : uint8_t {
    kNothing,   ///< No elements.
    kStraight,  ///< As it is: NCCL reads and writes the user's memory.
    kFused,     ///< Packed into the fusion buffer, reduced there in place, unpacked.
  };
  enum class Call : uint8_t {
    kAllReduce,
    kBroadcast,
    kAllGather,
    kReduceScatter,
    kGroup,  ///< Of what TransfersOf tells.
  };
  Route route = Route::kNothing;
  Call call = Call::kAllReduce;
  NcclDataType type = NcclDataType::kUint8;
  NcclRedOp op = NcclRedOp::kSum;
  /// Elements of `type` for NCCL, the gaps of alignment included; of one part, where NCCL counts
  /// parts.
  int64_t count = 0;
  int64_t buffer_bytes = 0;  ///< Of the fusion buffer, as far as this rank needs it.
  MoveSpec pack;
  MoveSpec unpack;
};

/// @param batch  A checked one (CheckBatch) of at least two members.
///
/// Reductions: ops/nccl/reduction.h; what is only copied travels as bytes. A reducescatter of parts
/// that are not equal, or that are cast or multiplied, is packed with every part as long as the
/// longest. An allgather of parts that are not equal is one group of broadcasts, one for each part:
/// each byte passes each link once, as in ncclAllGather, where sending a part to each of the others
/// would pass the sender's link once for each of them. An alltoall is one group of sends and
/// receives, the own piece among them.
NcclPlan PlanNccl(const Batch& batch);

/// What the launch before the collective moves, by `plan.pack`. Empty: no launch is needed.
/// `buffer` may be nullptr if plan.buffer_bytes is 0.
void PackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
               std::vector<DeviceMove>& moves);
/// After the collective, for `plan.unpack`.
void UnpackMoves(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<DeviceMove>& moves);

/// The pointers for the collective, unless it is a group.
struct NcclEnds {
  const void* in = nullptr;
  void* out = nullptr;
};
NcclEnds EndsOf(const Batch& batch, const NcclPlan& plan, void* buffer);
/// What a group consists of. Empty, only for an alltoall: this rank has nothing to do.
void TransfersOf(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<NcclTransfer>& transfers);

}  // namespace farandole
