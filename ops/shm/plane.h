// The data plane of ranks that share memory, as threads of a process or as processes of a host:
// shared-memory collectives (collective.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/counters.h"
#include "ops/cpu/collective.h"
#include "ops/shm/collective.h"
#include "ops/shm/memory.h"

namespace farandole {

/// All collectives of one rank over memory that it shares. See DataPlane for the contract.
///
/// After Abandon the set is broken on this rank: its queued and later batches fail with Aborted.
/// Peers may still write to this rank's buffers (SharedMemory::Allocate), which are then
/// quarantined.
class SharedMemoryPlane final : public DataPlane {
 public:
  /// @param counters  May be nullptr; outlives the plane.
  SharedMemoryPlane(std::shared_ptr<SharedMemory> memory, int rank, const CpuKernels& kernels,
                    Counters* counters = nullptr)
      : memory_(std::move(memory)), rank_(rank), kernels_(kernels), counters_(counters) {}

  const char* name() const override { return memory_->name(); }
  /// @return What SharedMemory::Join returns; InvalidArgument for a set already added.
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override { sets_.Remove(set); }
  /// @return What CheckBatch returns; Internal for an unknown set or other members; Aborted for a
  /// broken set.
  Result<PlaneOperation*> Start(const Batch& batch) override;
  Agreement* AgreementOf(uint32_t set) override;

 private:
  const std::shared_ptr<SharedMemory> memory_;
  const int rank_;
  const CpuKernels& kernels_;
  Counters* const counters_;
  CpuSets<SharedMemorySet> sets_;
  std::array<CpuCollective::Pool, static_cast<size_t>(OpKind::kAlltoall) + 1> pools_;  // by OpKind
};

}  // namespace farandole
