#include "ops/cuda/host_set.h"

namespace farandole {

Result<std::unique_ptr<HostSet>> HostSet::Create(DataPlane& plane, uint32_t set,
                                                 std::span<const int> ranks, int my_index) {
  FARANDOLE_RETURN_IF_ERROR(plane.AddSet(set, ranks, my_index));
  return std::unique_ptr<HostSet>(new HostSet(plane, set, ranks, my_index));
}

HostSet::HostSet(DataPlane& plane, uint32_t set, std::span<const int> ranks, int my_index)
    : plane_(plane), set_(set), ranks_(ranks.begin(), ranks.end()), my_index_(my_index) {}

HostSet::~HostSet() { plane_.RemoveSet(set_); }

Result<PlaneOperation*> HostSet::Start(Batch& batch) {
  batch.number = next_number_++;
  batch.set = set_;
  batch.ranks = ranks_;
  batch.my_index = my_index_;
  return plane_.Start(batch);
}

}  // namespace farandole
