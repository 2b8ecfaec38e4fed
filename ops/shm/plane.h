// The data plane of ranks that are threads of one process: the shared-memory exchange over heap
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/doorbell.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"
#include "ops/local/exchange.h"

namespace farandole {

/// Where the planes of one process find each other's memory.
///
/// Thread safety: any thread. Lifetime: planes hold it; the doorbells outlive it. Memory of a set
/// lives until its last member removed the set or died.
class LocalHub {
 public:
  /// How sets exchange. Small slots make tests cross many chunks.
  struct Options {
    int slots = 4;
    int64_t slot_bytes = 256 * 1024;
    std::optional<StorePolicy> store_policy = {};  ///< None: measured, see StorePolicyChooser.
  };
  /// Memory of one process set.
  struct Arena;

  /// @param bells One doorbell per rank, by global rank.
  explicit LocalHub(std::span<Doorbell* const> bells) : LocalHub(bells, Options()) {}
  LocalHub(std::span<Doorbell* const> bells, Options options);
  ~LocalHub();

  /// The memory of a set; the first member to ask creates it.
  /// @return ResourceExhausted if it cannot be had; InvalidArgument if `ranks` differ from those of
  /// the member who created it, or name a rank without a doorbell.
  Result<std::shared_ptr<Arena>> Join(uint32_t set, std::span<const int> ranks);
  const Options& options() const { return options_; }
  Doorbell* bell(int rank) const { return bells_[static_cast<size_t>(rank)]; }

 private:
  const std::vector<Doorbell*> bells_;
  const Options options_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, std::weak_ptr<Arena>> arenas_;
};

/// All collectives of one rank of a LocalHub. See DataPlane for the contract.
///
/// After Abandon the set is broken on this rank: its queued and later batches fail with Aborted.
class LocalPlane final : public DataPlane {
 public:
  LocalPlane(std::shared_ptr<LocalHub> hub, int rank, const CpuKernels& kernels);
  ~LocalPlane() override;

  const char* name() const override { return "local"; }
  /// @return What LocalHub::Join returns; InvalidArgument for a set already added.
  Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) override;
  void RemoveSet(uint32_t set) override;
  /// @return What CheckBatch returns; Internal for an unknown set or other members; Aborted for a
  /// broken set.
  Result<PlaneOperation*> Start(const Batch& batch) override;

 private:
  class Operation;
  struct Set;

  Operation* TakeOperation();
  void Finish(Operation* operation);

  const std::shared_ptr<LocalHub> hub_;
  const int rank_;
  const CpuKernels& kernels_;
  std::unordered_map<uint32_t, std::unique_ptr<Set>> sets_;
  std::vector<std::unique_ptr<Operation>> operations_;  // all there are
  std::vector<Operation*> free_;
};

}  // namespace farandole
