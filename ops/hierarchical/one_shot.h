// Tiny allreduces of floats in process sets that span hosts: one collective instead of three.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"
#include "ops/hierarchical/topology.h"

namespace farandole {

/// All members send their contributions to all others, by an allgather, and each reduces everything
/// as HierarchicalPlane does: host by host, then between hosts. So the bits do not depend on the
/// size of a batch.
///
/// Thread safety: the holder of the engine lock only. Reused for later batches; allocates only for
/// the largest one. Lifetime: ends before the plane given to Begin.
class OneShotAllreduce final : public PlaneOperation {
 public:
  explicit OneShotAllreduce(const CpuKernels& kernels) : kernels_(kernels) {}

  /// Starts a batch, which has passed CheckBatch, on `flat`; it and `topology` stay valid until the
  /// end. @return As DataPlane::Start of that plane.
  Status Begin(const Batch& batch, const Topology& topology, DataPlane& flat);
  Progress Step() override;
  void Abandon() override;
  bool in_use() const { return gathering_ != nullptr; }

 private:
  void PackOwn(std::byte* to) const;
  void Reduce();
  void ReduceHost(size_t number, std::byte* to);
  void Unpack(const std::byte* from) const;
  std::byte* Row(size_t row) { return rows_.data() + row * row_bytes_; }

  const CpuKernels& kernels_;
  const Batch* batch_ = nullptr;
  const Topology* topology_ = nullptr;
  PlaneOperation* gathering_ = nullptr;  // of the flat plane; nullptr: not in use
  Batch gather_;
  Segment segment_;
  std::vector<int64_t> splits_;
  size_t row_bytes_ = 0;
  /// As many elements as the batch each: of each contribution in rank order, of each host's result,
  /// and one of this member's contribution, later a result on its way.
  std::vector<std::byte> rows_;
  std::vector<const void*> sources_;
};

}  // namespace farandole
