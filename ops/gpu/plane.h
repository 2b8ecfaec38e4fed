// The data plane of tensors on a rank's GPU: it finds out with a set's members what they share,
// then hands each batch to NCCL or stages it through host memory.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "core/clock.h"
#include "core/counters.h"
#include "core/log.h"
#include "ops/data_plane.h"
#include "ops/gpu/backend.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

struct GpuPlaneOptions {
  RankDevice* device = nullptr;  ///< Outlives the plane.
  DataPlane* host = nullptr;     ///< A CPU plane for this plane alone; outlives it.
  std::shared_ptr<NcclProvider> nccl;
  Counters* counters = nullptr;
  Log* log = nullptr;          ///< May be nullptr.
  std::string host_name;       ///< Equal for ranks that share a machine.
  bool share_gpu = false;      ///< FARANDOLE_SHARE_GPU: NCCL even where ranks share a GPU.
  std::function<void()> wake;  ///< Wakes who steps the plane, from any thread; may be empty.
  int64_t staging_slot_bytes = kStagingSlotBytes;
  int64_t stop_timeout_ns = 10 * kNsPerSecond;  ///< For the end of the launch thread.
};

/// Nothing is loaded and no device touched before a set's first batch.
///
/// That batch begins with an exchange over the host plane: who is on which GPU, with which NCCL
/// (backend_selection.h). Batches of all sets are handed over in decision order, because NCCL
/// demands one order per GPU; over NCCL the launch thread then puts them into streams
/// (launch_queue.h).
///
/// An operation goes kMoved/kWaiting ... kLaunched ... kDone: launched when its last command is in
/// a stream and `end()` exists, done when that event is complete. What is launched is never waited
/// for by the host. After a failure, or an Abandon, results of batches that are launched become
/// NaN. Result contract: that of `DataPlane`, except that NCCL sums in the wire type and in an
/// order of its own, so that floats may differ in the last bits from a CPU plane's (equal on all
/// ranks all the same). Averages of 16-bit wires are multiplied by 1/size before the rounding. Sums
/// of int64 wrap before they are divided. Whether a minimum or maximum of floats keeps a NaN is up
/// to NCCL.
std::unique_ptr<DataPlane> MakeGpuPlane(GpuPlaneOptions options);

}  // namespace farandole
