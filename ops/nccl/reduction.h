// How the elements of a reduction travel over NCCL: the same for whole tensors and for parts. Pure.
#pragma once

#include <cstdint>

#include "ops/data_plane.h"
#include "ops/device.h"
#include "ops/nccl/api.h"

namespace farandole {

/// Follows from what all members know alike, but for `as_it_is` and `pack.scale` of a sum, whose
/// prescale may be this rank's own.
struct NcclReduction {
  DType travels = DType::kFloat32;
  NcclDataType type = NcclDataType::kFloat32;
  NcclRedOp op = NcclRedOp::kSum;
  bool as_it_is = false;  ///< NCCL may read and write the tensors: nothing is cast or multiplied.
  MoveSpec pack;          ///< Before, ...
  MoveSpec unpack;        ///< ... and after NCCL, where they are.
};

/// @param batch         A checked allreduce or reducescatter of at least two members.
/// @param needs_buffer  The tensors cannot be used where they are, whatever their type.
///
/// Floats travel as `wire`; bool as uint8; int16, which NCCL has not got, as int32. Integers travel
/// as int64 when their sum is divided or, like a product, multiplied afterwards; a sum that wraps
/// in the tensor's own width has the same bits as one that wraps later. Sums of int64 wrap in 64
/// bits even then: NCCL has nothing wider. Average: ncclAvg for 32- and 64-bit floats; 16-bit wires
/// are multiplied by 1/size in float, before the one rounding, unless nothing else asks for a
/// buffer and 1/size is a power of two, where ncclAvg has the same bits.
NcclReduction PlanReduction(const Batch& batch, bool needs_buffer);

/// Every tensor, and every part, begins at a multiple of 16 bytes in the fusion buffer; what lies
/// in the gaps is reduced along and read by nobody.
/// @return Elements from one's begin to that of the next.
int64_t NcclStride(int64_t count, DType dtype);

/// What this rank gives to a reduction: nullptr if it is absent.
const void* NcclContribution(const Batch& batch, const Segment& segment);

}  // namespace farandole
