// The entry of libfarandole_mpi.so; its only exported symbol.
#include "coordinator/control/mpi_runtime.h"
#include "core/plugin_entry.h"

FARANDOLE_PLUGIN_ENTRY {
  return farandole::EnterPlugin(build_id, error, error_size,
                                [&] { backends->mpi = farandole::MakeMpiRuntime(*services); });
}
