#include "core/plugin_loader.h"

#include <dlfcn.h>

#include <array>

namespace farandole {
namespace {

Status CannotLoad(const std::string& file, const std::string& advice) {
  // Read before anything else can call the loader, which keeps only the last error of each thread.
  const std::string text = LoaderText();
  return Unavailable("cannot load \"" + file + "\": " + text +
                     (advice.empty() ? "" : "; " + advice));
}

}  // namespace

std::string LoaderText() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

Result<Backends> LoadPlugin(const PluginFiles& files, const Services& services) {
  // RTLD_GLOBAL: libmpi opens components of its own, which may look for its symbols in the global
  // scope.
  if (!files.library.empty() && dlopen(files.library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return CannotLoad(files.library, files.advice);
  }
  // RTLD_NOW: a missing symbol is an error here and not a crash at its first call. The handle is
  // never closed: objects of the plug-in, and threads of its library, live until the process ends.
  void* const handle = dlopen(files.plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return CannotLoad(files.plugin, files.advice);
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(handle, kPluginEntryName));
  if (entry == nullptr) {
    return InvalidArgument("\"" + files.plugin + "\" is no farandole plug-in: " + LoaderText());
  }
  Backends backends;
  // A C array: a std::string may not cross the border before the builds are known to be the same.
  std::array<char, 1024> error{};
  if (entry(kBuildId, &services, &backends, error.data(), error.size()) != 0) {
    return InvalidArgument("plug-in \"" + files.plugin + "\": " + error.data());
  }
  return backends;
}

}  // namespace farandole
