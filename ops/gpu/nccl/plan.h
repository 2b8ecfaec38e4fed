// How one batch goes over NCCL: in which element type, with which of its operations, and what our
// kernels do before and after. Pure.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/status.h"
#include "ops/cpu/batch.h"
#include "ops/data_plane.h"
#include "ops/device.h"
#include "ops/gpu/nccl/library.h"

namespace farandole {

/// One call of NCCL. It follows from what all members know alike, so that all of them make the same
/// one; pointers, and an alltoall's sends and receives, are each member's own.
struct NcclCall {
  enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kSend, kReceive };
  Kind kind = Kind::kAllReduce;
  const void* in = nullptr;  ///< Of a broadcast only the root's is read.
  void* out = nullptr;
  /// Elements of `type`, the gaps of alignment included; of one split, where NCCL counts those.
  int64_t count = 0;
  NcclDataType type = NcclDataType::kUint8;
  NcclRedOp op = NcclRedOp::kSum;
  int peer = 0;  ///< Position of a broadcast's root, or of whom is sent to or received from.
};

struct NcclPlan {
  CastSpec pack_spec;
  std::vector<CastItem> pack;   ///< The launch before the calls; none is needed for no items.
  std::vector<NcclCall> calls;  ///< Several are one group. None: this rank has nothing to do.
  CastSpec unpack_spec;
  /// The launch after them. A result that NCCL writes where the user sees it is copied from there
  /// to where it is, which does nothing unless results are to be poisoned.
  std::vector<CastItem> unpack;
};

/// Gives the fusion buffer, of at least that size; called once at most for each plan.
using NcclBufferSource = std::function<Result<void*>(int64_t size_bytes)>;

/// Either NCCL reads and writes the user's memory, or tensors are packed into the fusion buffer,
/// reduced there in place, and unpacked.
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
///
/// @param batch  A checked one (CheckBatch) of at least two members.
/// @param plan   Written anew; allocates nothing once grown.
/// @return What `buffer` returns.
Status PlanNccl(const Batch& batch, const NcclBufferSource& buffer, NcclPlan& plan);

/// Divides an allreduce or broadcast into slices of at most about `slice_bytes` on the wire, alike
/// on all members: each is packed while the one before it travels, and none needs a larger buffer.
/// Other kinds, and a batch without elements, are one slice.
///
/// Thread safety: none. Lifetime: the batch outlives its division. No allocation once grown.
class NcclSlices {
 public:
  void Begin(const Batch& batch, int64_t slice_bytes);
  /// A batch of its own, valid until the next call; nullptr at the end.
  const Batch* Next();

 private:
  const Batch* batch_ = nullptr;
  int64_t left_ = 0;  // slices
  int64_t each_ = 0;  // elements
  int64_t begin_ = 0;
  SegmentCursor cursor_;
  Batch slice_;
  std::vector<Segment> segments_;
};

}  // namespace farandole
