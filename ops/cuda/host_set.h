// One process set on the host plane that a CUDA plane has for itself.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {

/// Numbers the set's host batches in one ascending sequence, whoever starts them.
///
/// Thread safety: the holder of the engine lock. Invariant: all members start the same host batches
/// in the same order. Lifetime: the plane outlives it; the set is removed with it, when none of its
/// batches may be under way.
class HostSet {
 public:
  /// @return What DataPlane::AddSet returns.
  static Result<std::unique_ptr<HostSet>> Create(DataPlane& plane, uint32_t set,
                                                 std::span<const int> ranks, int my_index);
  ~HostSet();
  HostSet(const HostSet&) = delete;
  HostSet& operator=(const HostSet&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  int my_index() const { return my_index_; }

  /// Gives `batch` number, set and members, and starts it: DataPlane::Start.
  Result<PlaneOperation*> Start(Batch& batch);

 private:
  HostSet(DataPlane& plane, uint32_t set, std::span<const int> ranks, int my_index);

  DataPlane& plane_;
  const uint32_t set_;
  const std::vector<int> ranks_;
  const int my_index_;
  int64_t next_number_ = 0;
};

}  // namespace farandole
