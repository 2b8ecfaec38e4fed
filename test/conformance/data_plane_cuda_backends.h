// CUDA planes over fake GPUs: they prove order and arithmetic, nothing about a GPU.
#pragma once

#include <vector>

#include "test/conformance/data_plane_backends.h"

namespace farandole {

/// Ranks as threads; streams are threads too, so these cannot be stepped by one thread alone.
std::vector<PlaneParam> CudaBackendsOnFakes();

}  // namespace farandole
