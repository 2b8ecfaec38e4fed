#include "core/plugin_loader.h"

#include <dlfcn.h>

#include <array>

namespace farandole {
namespace {

Status CannotLoad(const std::string& file, const std::string& advice) {
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
  if (!files.library.empty() && dlopen(files.library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return CannotLoad(files.library, files.advice);
  }
  void* const handle = dlopen(files.plugin.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return CannotLoad(files.plugin, files.advice);
  const auto entry = reinterpret_cast<PluginEntry>(dlsym(handle, kPluginEntryName));
  if (entry == nullptr) {
    return InvalidArgument("\"" + files.plugin + "\" is no farandole plug-in: " + LoaderText());
  }
  Backends backends;
  std::array<char, 1024> error{};
  if (entry(kBuildId, &services, &backends, error.data(), error.size()) != 0) {
    return InvalidArgument("plug-in \"" + files.plugin + "\": " + error.data());
  }
  return backends;
}

}  // namespace farandole
