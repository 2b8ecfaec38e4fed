// Batches of one process set through host memory: down from the GPU, over a CPU plane, up again.
#pragma once

#include <memory>

#include "ops/cuda/host_set.h"
#include "ops/cuda/lane.h"
#include "ops/cuda/way.h"
#include "ops/staged/staging.h"

namespace farandole {

struct StagedWayOptions {
  CudaLane* lane = nullptr;
  HostSet* host = nullptr;
  Staging* staging = nullptr;
};

/// Works where NCCL does not: ranks that share a GPU, no library. A batch is cut into pieces of one
/// staging slot (ops/staged/cut.h); while one is on the host plane, others are copied. The result
/// is bitwise that of the CPU plane, whose collective it is; the GPU casts and multiplies by the
/// prescale, with the same rounding.
///
/// Begin answers ResourceExhausted if a slot is too small for as many ranks.
///
/// What it names outlives it. Abandon leaves commands in the stream that may touch the batch's
/// tensors until the stream has passed them.
std::unique_ptr<CudaWay> MakeStagedWay(const StagedWayOptions& options);

}  // namespace farandole
