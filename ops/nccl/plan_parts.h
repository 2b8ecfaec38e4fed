// The plans of the kinds that cut a tensor into parts: allgather, reducescatter, alltoall. Pure.
#pragma once

#include <vector>

#include "ops/nccl/plan.h"

namespace farandole {

// What the functions of ops/nccl/plan.h answer for these kinds.
NcclPlan PlanParts(const Batch& batch);
void PackParts(const Batch& batch, const NcclPlan& plan, void* buffer,
               std::vector<DeviceMove>& moves);
void UnpackParts(const Batch& batch, const NcclPlan& plan, void* buffer,
                 std::vector<DeviceMove>& moves);
NcclEnds EndsOfParts(const Batch& batch, const NcclPlan& plan, void* buffer);

}  // namespace farandole
