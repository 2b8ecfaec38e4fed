#include "core/plugin_loader.h"

#include <dlfcn.h>

#include <array>

// Type information of Protocol Buffers, as this library uses them, if it does.
extern const char kOwnProtobuf __asm__("_ZTIN6google8protobuf11MessageLiteE") __attribute__((weak));

namespace farandole {
namespace {

/// Libraries such as TensorFlow's show a copy of Protocol Buffers of another version to all that
/// are loaded after them. A plug-in is to use the same one as this library.
bool HasOtherProtobuf() {
  void* const program = dlopen(nullptr, RTLD_NOW);
  const void* const shown = dlsym(program, "_ZTIN6google8protobuf11MessageLiteE");
  return shown != nullptr && &kOwnProtobuf != nullptr && shown != &kOwnProtobuf;
}

/// A preloaded one, which a plug-in would not bind with RTLD_DEEPBIND.
bool HasOtherMalloc() {
  void* const libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
  return libc == nullptr || dlsym(libc, "malloc") != dlsym(RTLD_DEFAULT, "malloc");
}

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
  const bool is_apart = HasOtherProtobuf();
  if (is_apart && HasOtherMalloc()) {
    return Unavailable("\"" + files.plugin +
                       "\" cannot be loaded beside another library's Protocol Buffers with a "
                       "preloaded malloc: initialise before that library is loaded");
  }
  const int scope = is_apart ? RTLD_LOCAL | RTLD_DEEPBIND : RTLD_LOCAL;
  void* const handle = dlopen(files.plugin.c_str(), RTLD_NOW | scope);
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
