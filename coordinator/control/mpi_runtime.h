// The process's MPI behind the interface that the library sees.
#pragma once

#include <memory>

#include "core/plugin.h"

namespace farandole {

/// @param services  Borrowed; outlives the runtime.
std::unique_ptr<MpiRuntime> MakeMpiRuntime(const Services& services);

}  // namespace farandole
