#include "bindings/c/device_process.h"

#include <mutex>
#include <string>

#include "bindings/c/plugin_path.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"

namespace farandole {
namespace {

struct ProcessDevices {
  std::mutex mutex;
  Services services;
  std::shared_ptr<DeviceRuntime> runtime;
};

// Never destroyed: late threads may still look at it, and CUDA may be gone before it.
ProcessDevices& Process() {
  static auto* process = new ProcessDevices();
  return *process;
}

}  // namespace

Result<std::shared_ptr<DeviceRuntime>> DevicesOfProcess(const Config& config) {
  ProcessDevices& process = Process();
  std::lock_guard lock(process.mutex);
  // Only success is kept: after an error the next tensor on a GPU tries again.
  if (process.runtime != nullptr) return process.runtime;
  static PrefixLog plugin_log(config.log_level, "cuda");
  process.services.clock = &SteadyClock();
  process.services.kernels = &BestCpuKernels();
  process.services.log = &plugin_log;
  PluginFiles files;
  files.plugin =
      config.cuda_plugin.empty() ? BesideThisLibrary("libfarandole_cuda.so") : config.cuda_plugin;
  files.advice = "build farandole where nvcc is, or name the file with FARANDOLE_CUDA_PLUGIN";
  Result<Backends> loaded = LoadPlugin(files, process.services);
  if (!loaded.ok()) return loaded.status();
  // The stand-in that is built where there is no nvcc (ops/gpu/cuda/no_plugin.cc).
  if (loaded.value().device == nullptr) {
    return Unavailable("\"" + files.plugin + "\" was built without CUDA; " + files.advice);
  }
  process.runtime = std::move(loaded.value().device);
  return process.runtime;
}

}  // namespace farandole
