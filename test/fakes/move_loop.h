// What `Device::Move` computes, one element after the other on the host.
#pragma once

#include <span>

#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// @return InvalidArgument for a pair of types that MoveSpec excludes.
Status MoveInLoop(std::span<const DeviceMove> moves, const MoveSpec& spec);

}  // namespace farandole
