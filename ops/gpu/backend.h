// How the batches of one process set run on a GPU: over NCCL (nccl/), staged through host memory
// (staged_backend.cc), or, with one member, on the GPU alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/counters.h"
#include "core/log.h"
#include "ops/data_plane.h"
#include "ops/gpu/launch_queue.h"

namespace farandole {

/// How one set's batches run, driven by the plane: Begin, then Step until kDone, batch by batch. A
/// backend whose batches the launch thread enqueues is done at once.
///
/// Thread safety: the holder of the engine lock. Nothing blocks.
class GpuBackend {
 public:
  virtual ~GpuBackend() = default;
  /// Takes a checked batch, which stays valid until Step says kDone or Abandon was called.
  /// @return What becomes of it: `launched()` when its last command is in a stream; Unimplemented
  /// for what this backend cannot run, alike on all members.
  virtual Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) = 0;
  /// kDone: the next batch may begin, of this set or another. kMoved, kWaiting or kFailed.
  virtual Progress Step() { return Progress::Done(); }
  virtual void Abandon() {}
};

/// One process set on the host plane that a GPU plane has for itself: numbers the set's host
/// batches in one ascending sequence, whoever starts them.
///
/// Thread safety: the holder of the engine lock. Invariant: all members start the same host batches
/// in the same order. Lifetime: the plane outlives it; the set is removed with it, when none of its
/// batches may be in flight.
class HostSet {
 public:
  /// @return What DataPlane::AddSet returns.
  static Result<std::unique_ptr<HostSet>> Create(DataPlane& plane, uint32_t set,
                                                 std::span<const int> ranks, int my_index);
  ~HostSet() { plane_.RemoveSet(set_); }
  HostSet(const HostSet&) = delete;
  HostSet& operator=(const HostSet&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  int my_index() const { return my_index_; }
  /// Gives `batch` number, set and members, and starts it: DataPlane::Start.
  Result<PlaneOperation*> Start(Batch& batch);

 private:
  HostSet(DataPlane& plane, uint32_t set, std::span<const int> ranks, int my_index)
      : plane_(plane), set_(set), ranks_(ranks.begin(), ranks.end()), my_index_(my_index) {}

  DataPlane& plane_;
  const uint32_t set_;
  const std::vector<int> ranks_;
  const int my_index_;
  int64_t next_number_ = 0;
};

/// Batches of a set with one member: nothing travels; what has a factor is multiplied. The result
/// is bitwise that of the CPU planes' SoloRun: nothing is rounded to a wire type. One launch; none
/// in place without a factor. The queue outlives it.
std::unique_ptr<GpuBackend> MakeSoloBackend(LaunchQueue& queue);

struct NcclFound {
  int version = 0;   ///< 23203 is 2.32.3.
  std::string file;  ///< Where it was loaded from.
};

/// What a communicator is made from.
struct NcclSetOptions {
  std::string unique_id = {};  ///< As from MakeUniqueId on one member.
  int size = 2;                ///< Members of the set; one alone needs no NCCL.
  int index = 0;               ///< Position of this rank among them.
  bool shared_gpu = false;     ///< Ranks share a GPU: few blocks per kernel, so that all fit on it.
  bool registers = false;      ///< Fusion buffers are registered with NCCL; alike on all members.
  /// Which rank is on which GPU of which host; ends every error message.
  std::string ranks_text = {};
};

/// Where a plane gets NCCL from: the process's library, or what a test puts in its place.
///
/// Thread safety: the holder of the engine lock. Lifetime: outlives the backends it made.
class NcclProvider {
 public:
  virtual ~NcclProvider() = default;
  /// Loads it. @return Why there is none, as a clause.
  virtual Result<NcclFound> Find() = 0;
  virtual Result<std::string> MakeUniqueId() = 0;
  virtual std::unique_ptr<GpuBackend> Make(LaunchQueue& queue, NcclSetOptions options) = 0;
};

/// Pinned and device memory through which all sets of a GPU stage their batches, one at a time: so
/// many slots of so many bytes on either side, allocated when first wanted.
class StagingBuffers;
inline constexpr int kStagingSlots = 3;
inline constexpr int64_t kStagingSlotBytes = int64_t{4} << 20;

/// @param counters    May be nullptr.
/// @param slot_bytes  Equal on all ranks.
Result<std::shared_ptr<StagingBuffers>> MakeStagingBuffers(Device& device, Counters* counters,
                                                           int64_t slot_bytes = kStagingSlotBytes);

/// Batches through host memory: from the GPU (D2H), over a CPU plane, back to the GPU (H2D). Works
/// where NCCL does not: ranks that share a GPU, no library. An allreduce or broadcast is divided
/// into slices of one staging slot; while one is on the host plane, others are copied. Every other
/// kind is staged whole, in a slot that grows with it. The result is bitwise that of the CPU plane,
/// whose collective it is; the GPU casts and multiplies by the prescale, with the same rounding.
///
/// It is driven by the holder of the engine lock, to whom the host plane belongs, and never blocks.
/// Abandon leaves commands in the streams that may touch the batch's tensors. `host` outlives it.
std::unique_ptr<GpuBackend> MakeStagedBackend(HostSet& host,
                                              std::shared_ptr<StagingBuffers> buffers);

}  // namespace farandole
