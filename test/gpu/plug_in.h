// The GPU of these programs: whatever plug-in FARANDOLE_CUDA_PLUGIN names, also a fake one, which
// is then said in every result.
#pragma once

#include <memory>

#include "core/counters.h"
#include "ops/data_plane.h"
#include "ops/device.h"
#include "test/gpu/mirror_plane.h"

namespace farandole {

/// Ends the program with the reason if there is none.
std::shared_ptr<DeviceRuntime> GpuRuntime();

/// The CUDA plane as a context has it: settings from FARANDOLE_NCCL and FARANDOLE_SHARE_GPU.
/// @param counters  May be nullptr.
MakePlaneOnDevice CudaPlaneHere(Counters* counters = nullptr);

/// The version of the NCCL that FARANDOLE_NCCL names or that is found; 0, and why, if there is
/// none.
int NcclVersionHere();
/// FARANDOLE_SHARE_GPU=1.
bool SharesGpu();

}  // namespace farandole
