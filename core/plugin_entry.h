// What the entry of every plug-in does before and around its own work.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>

#include "core/plugin.h"

/// Opens the definition of a plug-in's entry (see PluginEntry): `FARANDOLE_PLUGIN_ENTRY { ... }`.
#define FARANDOLE_PLUGIN_ENTRY                                                                     \
  extern "C" __attribute__((visibility("default"))) int farandole_plugin(                          \
      [[maybe_unused]] const char* build_id, [[maybe_unused]] const farandole::Services* services, \
      [[maybe_unused]] farandole::Backends* backends, char* error,                                 \
      std::size_t error_size) noexcept

namespace farandole {

/// Calls make(), which fills in the backends, if library and plug-in are of one build.
/// @return 0, or another number with an error message in `error`: another build, or what make()
/// threw.
template <class Make>
int EnterPlugin(const char* build_id, char* error, std::size_t error_size,
                const Make& make) noexcept {
  if (std::strcmp(build_id, kBuildId) != 0) {
    std::snprintf(error, error_size,
                  "it belongs to build \"%s\", the library to \"%s\"; install both from one build",
                  kBuildId, build_id);
    return 1;
  }
  try {
    make();
    return 0;
  } catch (const std::exception& e) {
    std::snprintf(error, error_size, "%s", e.what());
    return 2;
  }
}

/// The answer of a plug-in that was built without what it is for.
inline int RefusePlugin(const char* reason, char* error, std::size_t error_size) noexcept {
  std::snprintf(error, error_size, "%s", reason);
  return 1;
}

}  // namespace farandole
