// How one batch goes over NCCL: in which element type, with which of its operations, and what our
// kernels do before and after. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/data_plane.h"
#include "ops/device.h"
#include "ops/gpu/nccl/library.h"

namespace farandole {

/// One of a group of NCCL's calls: what a rank sends to, or receives from, one other.
struct NcclTransfer {
  enum class Kind : uint8_t { kBroadcast, kSend, kReceive };
  Kind kind = Kind::kBroadcast;
  int peer = 0;              ///< Position of the other, or of the broadcast's root.
  const void* in = nullptr;  ///< Of a send and a broadcast; only the root's is read.
  void* out = nullptr;       ///< Of a receive and a broadcast.
  int64_t size_bytes = 0;
};

/// `route`, `call`, `type`, `op` and `count` follow from what all members know alike, so that all
/// of them make the same call of NCCL; of an alltoall each makes its own transfers.
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
    kGroup,  ///< What TransfersOf says.
  };
  Route route = Route::kNothing;
  Call call = Call::kAllReduce;
  NcclDataType type = NcclDataType::kUint8;
  NcclRedOp op = NcclRedOp::kSum;
  /// Elements of `type` for NCCL, the gaps of alignment included; of one split, where NCCL counts
  /// those.
  int64_t count = 0;
  int64_t buffer_bytes = 0;  ///< Of the fusion buffer, as far as this rank needs it.
  MoveSpec pack;
  MoveSpec unpack;
};

/// @param batch  A checked one (CheckBatch) of at least two members.
///
/// Floats travel as `wire`; bool as uint8; int16, which NCCL has not got, as int32. Integers travel
/// as int64 when their sum is divided or, like a product, multiplied afterwards; a sum that wraps
/// in the tensor's own width has the same bits as one that wraps later. Sums of int64 wrap in 64
/// bits even then: NCCL has nothing wider. Average: ncclAvg for 32- and 64-bit floats; 16-bit wires
/// are multiplied by 1/size in float, before the one rounding, unless nothing else asks for a
/// buffer and 1/size is a power of two, where ncclAvg has the same bits.
///
/// Every tensor begins at a multiple of 16 bytes in the fusion buffer; what lies in the gaps is
/// reduced along and read by nobody. What is only copied travels as bytes. A reducescatter whose
/// splits differ, or are cast or multiplied, is packed with every split as long as the longest. An
/// allgather of splits that differ is one group of broadcasts, one for each split: each byte passes
/// each link once, as in ncclAllGather, where sending a split to each of the others would pass the
/// sender's link once for each of them. An alltoall is one group of sends and receives, the own
/// split among them.
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

/// One call of NCCL.
struct NcclCall {
  NcclPlan::Call kind = NcclPlan::Call::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;
  NcclDataType type = NcclDataType::kUint8;
  NcclRedOp op = NcclRedOp::kSum;
  int root = 0;
  std::span<const NcclTransfer> transfers = {};  ///< Of a group.
};

/// Divides an allreduce or broadcast into slices of at most about `slice_bytes` on the wire, alike
/// on all members: each is packed while the one before it travels, and none needs a larger buffer.
/// Variable-size collectives are one slice.
///
/// Thread safety: none. Lifetime: the batch outlives its division. No allocation once grown.
class NcclSlices {
 public:
  void Begin(const Batch& batch, int64_t slice_bytes);
  int64_t count() const { return count_; }
  /// A batch of its own; valid until the next call.
  const Batch& Get(int64_t number);

 private:
  const Batch* batch_ = nullptr;
  int64_t count_ = 0;
  int64_t each_ = 0;  // elements
  Batch slice_;
  std::vector<Segment> segments_;
};

}  // namespace farandole
