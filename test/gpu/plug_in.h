// The GPU of these programs: whatever plug-in FARANDOLE_CUDA_PLUGIN names, also a fake one, which
// is then said in every result.
#pragma once

#include <memory>

#include "core/counters.h"
#include "core/doorbell.h"
#include "ops/data_plane.h"
#include "ops/device.h"
#include "test/gpu/mirror_plane.h"

namespace farandole {

/// Ends the program with the reason if there is none.
std::shared_ptr<DeviceRuntime> GpuRuntime();

/// The GPU plane as a context has it: settings from FARANDOLE_NCCL and FARANDOLE_SHARE_GPU.
/// @param bell      Rung when a batch is launched.
/// @param counters  May be nullptr.
MakePlaneOnDevice GpuPlaneHere(Doorbell& bell, Counters* counters = nullptr);

/// The version of the NCCL that FARANDOLE_NCCL names or that is found; 0, and why, if there is
/// none.
int NcclVersionHere();
/// FARANDOLE_SHARE_GPU=1.
bool SharesGpu();

}  // namespace farandole
