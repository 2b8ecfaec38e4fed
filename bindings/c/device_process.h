// The process's GPUs: their plug-in is loaded once, when the first tensor on one appears.
#pragma once

#include <memory>

#include "core/config.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// Loads the plug-in beside libfarandole.so (or config.cuda_plugin) on the first call; later calls
/// give the same. Thread safety: any thread.
/// @return Unavailable saying what is missing.
Result<std::shared_ptr<DeviceRuntime>> DevicesOfProcess(const Config& config);

}  // namespace farandole
