// Memory of the fake ncclMemAlloc, counted.
#pragma once

#include <cstdint>

namespace farandole {

int64_t FakeNcclMemoryBytes();

}  // namespace farandole
