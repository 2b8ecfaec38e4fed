// Tiny allreduces of floats in process sets that span hosts: one collective instead of three.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/hierarchical/slice_plan.h"

namespace farandole {

/// All members send their contributions to all others, by an allgather, and each reduces everything
/// as HierarchicalPlane does: host by host, then between hosts. So the bits do not depend on the
/// size of a batch.
///
/// Thread safety: the holder of the engine lock only. Reused for later batches; allocates only for
/// the largest one. Lifetime: ends before the plane given to Begin.
class OneShotAllreduce final : public PlaneOperation {
 public:
  using Pool = ReusePool<OneShotAllreduce>;

  /// @param pool  To which it returns at its end.
  OneShotAllreduce(const CpuKernels& kernels, Pool& pool) : kernels_(kernels), pool_(pool) {}

  /// Starts a batch, which has passed CheckBatch, on `flat`; it and `topology` stay valid until the
  /// end. @return As DataPlane::Start of that plane.
  Status Begin(const Batch& batch, const Topology& topology, DataPlane& flat);
  Progress Step() override;
  void Abandon() override;

 private:
  void Reduce();
  void ReduceHost(size_t number, std::byte* to);
  std::byte* Row(size_t row) { return rows_.data() + row * row_bytes_; }

  const CpuKernels& kernels_;
  Pool& pool_;
  const Batch* batch_ = nullptr;
  const Topology* topology_ = nullptr;
  InnerBatch gather_;  // on the flat plane
  std::vector<int64_t> splits_;
  size_t row_bytes_ = 0;
  /// As many elements as the batch each: of each contribution in rank order, of each host's result,
  /// and one of this member's contribution, later a result on its way.
  std::vector<std::byte> rows_;
  std::vector<const void*> sources_;
};

}  // namespace farandole
