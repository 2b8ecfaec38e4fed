// Batches of a process set with one member: nothing travels; what has a factor is multiplied, in
// the stream.
#pragma once

#include <memory>

#include "ops/cuda/lane.h"
#include "ops/cuda/way.h"

namespace farandole {

/// The result is bitwise that of the CPU planes' SoloRun: nothing is rounded to a wire type. One
/// launch; none in place without a factor.
///
/// The lane outlives it.
std::unique_ptr<CudaWay> MakeSoloWay(CudaLane& lane);

}  // namespace farandole
