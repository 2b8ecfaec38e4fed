#include "ops/cuda/cuda_plane.h"

#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/cuda_line.h"

namespace farandole {
namespace {

struct KnownSet {
  std::vector<int> ranks;
  int my_index = 0;
};

/// Invariant: every line has every set.
class CudaPlane final : public DataPlane {
 public:
  explicit CudaPlane(CudaPlaneParts parts) : parts_(std::move(parts)) {}

  const char* name() const override { return "cuda"; }
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  Result<DataPlane*> LineOf(int gpu);

  const CudaPlaneParts parts_;
  std::map<uint32_t, KnownSet> sets_;
  std::map<int, std::unique_ptr<DataPlane>> lines_;  // by distance from home
};

Status CudaPlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  if (my_index < 0 || static_cast<size_t>(my_index) >= ranks.size()) {
    return InvalidArgument("this rank is not in process set " + std::to_string(set));
  }
  const bool fresh =
      sets_.try_emplace(set, KnownSet{{ranks.begin(), ranks.end()}, my_index}).second;
  if (!fresh) return InvalidArgument("process set " + std::to_string(set) + " was already added");
  for (const auto& [gpu, line] : lines_) {
    FARANDOLE_RETURN_IF_ERROR(line->AddSet(set, ranks, my_index));
  }
  return {};
}

void CudaPlane::RemoveSet(uint32_t set) {
  for (const auto& [gpu, line] : lines_) line->RemoveSet(set);
  sets_.erase(set);
}

Result<PlaneOperation*> CudaPlane::Start(const Batch& batch) {
  Result<DataPlane*> line = LineOf(batch.gpu);
  if (!line.ok()) return line.status();
  return line.value()->Start(batch);
}

Result<DataPlane*> CudaPlane::LineOf(int gpu) {
  if (const auto found = lines_.find(gpu); found != lines_.end()) return found->second.get();
  if (std::abs(gpu) > kMaxGpuOffset) {
    return Internal("batch for the GPU at distance " + std::to_string(gpu) + " from a rank's own");
  }
  std::unique_ptr<DataPlane> line = MakeCudaLine(parts_, gpu);
  for (const auto& [uid, set] : sets_) {
    FARANDOLE_RETURN_IF_ERROR(line->AddSet(uid, set.ranks, set.my_index));
  }
  return lines_.emplace(gpu, std::move(line)).first->second.get();
}

}  // namespace

std::unique_ptr<DataPlane> MakeCudaPlane(CudaPlaneParts parts) {
  return std::make_unique<CudaPlane>(std::move(parts));
}

}  // namespace farandole
