// The kernel that casts tensors, run on the host: what the fake GPU does, and the tests of its
// body.
#pragma once

#include <span>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Runs the very body that the GPU runs, block after block, thread after
/// thread, over host memory. What the numbers mean: see CastSpec. `out` may equal `in` where
/// elements of both have one size; otherwise nothing overlaps.
///
/// It is the specification made runnable, several times slower than the CPU kernels.
/// @return InvalidArgument as Device::Cast. Thread safety: pure.
Status CastOnHost(std::span<const CastItem> items, const CastSpec& spec);

}  // namespace farandole
