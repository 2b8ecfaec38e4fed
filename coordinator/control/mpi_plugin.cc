// The entry of libfarandole_mpi.so; its only exported symbol.
#include <cstdio>
#include <cstring>
#include <exception>

#include "coordinator/control/mpi_runtime.h"
#include "core/plugin.h"

extern "C" __attribute__((visibility("default"))) int farandole_plugin(
    const char* build_id, const farandole::Services* services, farandole::Backends* backends,
    char* error, std::size_t error_size) noexcept {
  if (std::strcmp(build_id, farandole::kBuildId) != 0) {
    std::snprintf(error, error_size,
                  "it belongs to build \"%s\", the library to \"%s\"; install both from one build",
                  farandole::kBuildId, build_id);
    return 1;
  }
  try {
    backends->mpi = farandole::MakeMpiRuntime(*services);
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 2;
  }
}
