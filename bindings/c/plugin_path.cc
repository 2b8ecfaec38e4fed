#include "bindings/c/plugin_path.h"

#include <dlfcn.h>

namespace farandole {

std::string BesideThisLibrary(const char* file) {
  // The path by which the loader found the library that holds this function.
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&BesideThisLibrary), &info) == 0 || info.dli_fname == nullptr)
    return file;
  const std::string self = info.dli_fname;
  const size_t slash = self.rfind('/');
  // Without a directory the name alone, for which dlopen searches.
  return slash == std::string::npos ? file : self.substr(0, slash + 1) + file;
}

}  // namespace farandole
