// The entry of libfarandole_cuda.so; its only exported symbol.
#include "core/plugin_entry.h"
#include "ops/gpu/cuda/cuda_api.h"

FARANDOLE_PLUGIN_ENTRY {
  return farandole::EnterPlugin(build_id, error, error_size,
                                [&] { backends->device = farandole::MakeCudaRuntime(); });
}
