#include "ops/cuda/cuda_driver.h"

#include <dlfcn.h>

#include <string>

namespace farandole {
namespace {

constexpr char kDriver[] = "libcuda.so.1";

Result<CudaDriver> Find() {
  void* const library = dlopen(kDriver, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const text = dlerror();
    return Unavailable("no NVIDIA driver: " + std::string(text != nullptr ? text : kDriver));
  }
  CudaDriver driver;
  driver.get_current =
      reinterpret_cast<decltype(driver.get_current)>(dlsym(library, "cuCtxGetCurrent"));
  driver.set_current =
      reinterpret_cast<decltype(driver.set_current)>(dlsym(library, "cuCtxSetCurrent"));
  if (driver.get_current == nullptr || driver.set_current == nullptr) {
    return Unavailable("\"" + std::string(kDriver) + "\" is no CUDA driver: it has no contexts");
  }
  return driver;
}

}  // namespace

Result<CudaDriver> FindCudaDriver() {
  static const Result<CudaDriver> driver = Find();
  return driver;
}

}  // namespace farandole
