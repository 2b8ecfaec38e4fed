// The entry of libfarandole_cuda.so where nvcc was not found at build time: says so.
#include "core/plugin_entry.h"

FARANDOLE_PLUGIN_ENTRY {
  return farandole::RefusePlugin(
      "built without CUDA; install the CUDA toolkit, 12.1 or newer, with nvcc on the PATH or named "
      "by CUDACXX, and build farandole again",
      error, error_size);
}
