// The CUDA plane over the process's own libnccl.
#include <cstdlib>
#include <utility>

#include "ops/cuda/cuda_plane.h"
#include "ops/cuda/cuda_plane_parts.h"
#include "ops/cuda/nccl_source.h"
#include "ops/nccl/api.h"
#include "ops/nccl/library.h"
#include "ops/nccl/nccl_way.h"

namespace farandole {
namespace {

/// For NCCL to read, unless the user set it.
void SetDefault(const char* variable, const char* value) {
  (void)setenv(variable, value, 0);  // fails for lack of memory only; then NCCL says why it refuses
}

/// NcclLibrary::OfProcess and MakeNcclWay.
class ProcessNccl final : public NcclSource {
 public:
  explicit ProcessNccl(const std::string& path) : path_(path) {}

  Result<NcclFound> Find() override {
    Result<const NcclLibrary*> library = NcclLibrary::OfProcess(path_);
    if (!library.ok()) return library.status();
    library_ = library.value();
    return NcclFound{library_->version(), library_->file(), library_->api().CommShrink != nullptr};
  }

  void AllowSharedGpus() override {
    SetDefault("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    // All ranks' kernels must fit on the GPU at once, or NCCL hangs.
    SetDefault("NCCL_MAX_CTAS", "2");
    SetDefault("NCCL_NVLS_ENABLE", "0");
  }

  Result<std::string> MakeUniqueId() override { return library_->MakeUniqueId(); }

  std::unique_ptr<CudaWay> MakeWay(NcclWayOptions options) override {
    options.library = library_;
    return MakeNcclWay(options);
  }

 private:
  const std::string path_;
  const NcclLibrary* library_ = nullptr;
};

}  // namespace

std::unique_ptr<DataPlane> MakeCudaPlane(const CudaPlaneOptions& options) {
  CudaPlaneParts parts;
  parts.options = options;
  parts.nccl = std::make_unique<ProcessNccl>(options.nccl_library);
  return MakeCudaPlane(std::move(parts));
}

}  // namespace farandole
