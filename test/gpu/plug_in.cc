#include "test/gpu/plug_in.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/plugin_loader.h"
#include "ops/cpu/kernels.h"
#include "ops/gpu/nccl/backend.h"
#include "ops/gpu/plane.h"

namespace farandole {
namespace {

std::string Setting(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

Log& PlaneLog() {
  static PrefixLog log(LogLevel::kInfo, "plane");
  return log;
}

std::shared_ptr<DeviceRuntime> Load() {
  static const Services services{&SteadyClock(), &BestCpuKernels(), &PlaneLog()};
  Result<Backends> loaded = LoadPlugin({Setting("FARANDOLE_CUDA_PLUGIN"), ""}, services);
  if (!loaded.ok() || loaded.value().device == nullptr) {
    std::fprintf(stderr, "FARANDOLE_CUDA_PLUGIN names no GPU: %s\n",
                 loaded.status().ToString().c_str());
    std::exit(2);
  }
  return std::move(loaded.value().device);
}

}  // namespace

std::shared_ptr<DeviceRuntime> GpuRuntime() {
  // Never destroyed: CUDA may be gone before.
  static const auto* runtime = new std::shared_ptr<DeviceRuntime>(Load());
  return *runtime;
}

MakePlaneOnDevice GpuPlaneHere(Doorbell& bell, Counters* counters) {
  return [counters, &bell](RankDevice& gpu, DataPlane& host) {
    static Counters others;
    GpuPlaneOptions options;
    options.device = &gpu;
    options.host = &host;
    options.nccl = MakeNcclProvider(Setting("FARANDOLE_NCCL"), SharesGpu(),
                                    Setting("FARANDOLE_NCCL_REGISTER") == "1");
    options.counters = counters != nullptr ? counters : &others;
    options.log = &PlaneLog();
    options.host_name = "here";
    options.share_gpu = SharesGpu();
    options.wake = [&bell] { bell.Ring(); };
    return MakeGpuPlane(std::move(options));
  };
}

bool SharesGpu() { return Setting("FARANDOLE_SHARE_GPU") == "1"; }

int NcclVersionHere() {
  const Result<const NcclLibrary*> library = NcclLibrary::OfProcess(Setting("FARANDOLE_NCCL"));
  if (library.ok()) return library.value()->version();
  std::fprintf(stderr, "no NCCL: %s\n", library.status().ToString().c_str());
  return 0;
}

}  // namespace farandole
