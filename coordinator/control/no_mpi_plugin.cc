// The entry of libfarandole_mpi.so where MPI was not found at build time: says so.
#include <cstdio>

#include "core/plugin.h"

extern "C" __attribute__((visibility("default"))) int farandole_plugin(
    const char*, const farandole::Services*, farandole::Backends*, char* error,
    std::size_t error_size) noexcept {
  std::snprintf(error, error_size,
                "built without MPI; install libopenmpi-dev (Debian) and build farandole again");
  return 1;
}
