// The move kernel on host memory: for tests, and for devices that stand in for a GPU.
#pragma once

#include <span>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Runs the very body that the GPU runs (ops/cuda/move_body.h), block after block, thread after
/// thread, over host memory. What the numbers mean: see MoveSpec. `out` may equal `in` where
/// elements of both have one size; otherwise nothing overlaps.
///
/// It is the specification made runnable, several times slower than the CPU kernels.
/// @return InvalidArgument as Device::Move. Thread safety: pure.
Status MoveOnHost(std::span<const DeviceMove> moves, const MoveSpec& spec);

}  // namespace farandole
