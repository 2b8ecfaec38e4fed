// The entry of libfarandole_mpi.so where MPI was not found at build time: says so.
#include "core/plugin_entry.h"

FARANDOLE_PLUGIN_ENTRY {
  return farandole::RefusePlugin(
      "built without MPI; install libopenmpi-dev (Debian) and build farandole again", error,
      error_size);
}
