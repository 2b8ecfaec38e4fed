// The CPU data plane of process sets that span hosts: shared memory within a host, the network
// between hosts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/cpu/collective.h"
#include "ops/hierarchical/one_shot.h"

namespace farandole {

/// Allreduce and broadcast are composed of collectives of two other planes. A batch is divided into
/// slices, and each passes three stages: reduce-scatter among the members of a host, allreduce of
/// each shard among the hosts, allgather in the host. So of N bytes each host sends and receives
/// 2 (H-1)/H N over its link, whatever the number of its ranks, while a plane that does not know
/// hosts sends up to (ranks of a host) times that. A broadcast goes the same way: its root is the
/// only one that contributes. The link carries one slice while the host works on others.
///
/// All else goes to the flat plane: the other kinds, integers where a host's partial result would
/// be wrong (averages, results that are scaled), and what is tiny, where latency counts: as it is,
/// or, floats, as a OneShotAllreduce. Of batches with slots all but those whose tree can be
/// evaluated within each host first, bit by bit: float32 and float64, where each host's members
/// hold one node.
///
/// Each host must have a member in each shard's allreduce, so there are as many shards as members
/// on the host that has the fewest. Ranks without shared memory count as hosts of their own.
///
/// Source: Cho et al., "BlueConnect: Decomposing all-reduce for deep learning on heterogeneous
/// network hierarchy", MLSys 2019.
///
/// Thread safety and contract: `class DataPlane`. The sets that it adds to the planes it uses have
/// the uid of the whole set; so all three are planes (or, shared memory: on each host a plane) that
/// no other set with this uid uses. Lifetime: the planes outlive it.
class HierarchicalPlane final : public DataPlane {
 public:
  struct Options {
    /// By global rank: equal and >= 0 for ranks that share memory; the same on all ranks.
    std::vector<int> memory;
    DataPlane* local =
        nullptr;  ///< Of those ranks; nullptr on a rank that shares memory with none.
    /// Of all ranks, for what goes between hosts alone. Slices take them in turn: while one ends on
    /// one plane, the next is in full flow on another.
    std::vector<DataPlane*> cross;
    DataPlane* flat = nullptr;  ///< Of all ranks, for what is not composed.
    /// Of a shard of a slice between up to 16 hosts; a multiple of 512. Short slices fill the
    /// pipeline sooner, long ones cost fewer collectives: docs/decisions.md.
    int64_t shard_bytes = 256 * 1024;
  };

  HierarchicalPlane(Options options, const CpuKernels& kernels);
  ~HierarchicalPlane() override;

  const char* name() const override { return "hierarchical"; }
  bool quantizes() const override { return true; }
  /// @return What the planes return; ResourceExhausted without memory for slices.
  Status AddSet(uint32_t uid, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t uid) override;
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Collective;
  struct Set;

  const Options options_;
  const CpuKernels& kernels_;
  CpuSets<Set> sets_;
  CpuCollective::Pool collectives_;
  OneShotAllreduce::Pool one_shots_;
};

}  // namespace farandole
