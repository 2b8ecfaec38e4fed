// The data plane of CUDA tensors: for each GPU of the rank it finds out with the set's members what
// they share, then runs each batch over NCCL or staged through host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/counters.h"
#include "core/log.h"
#include "ops/cuda/rank_gpus.h"
#include "ops/data_plane.h"

namespace farandole {

struct CudaPlaneOptions {
  RankGpus* gpus = nullptr;   ///< Outlives the plane.
  DataPlane* host = nullptr;  ///< A CPU plane for this plane alone; outlives it.
  Counters* counters = nullptr;
  Log* log = nullptr;        ///< May be nullptr.
  std::string host_name;     ///< Equal for ranks that share a machine.
  std::string nccl_library;  ///< FARANDOLE_NCCL: path of the libnccl to use; empty: found.
  bool share_gpu = false;    ///< FARANDOLE_SHARE_GPU: NCCL even where ranks share a GPU.
};

/// Nothing is loaded and no device touched before a set's first batch.
///
/// That batch begins with an exchange over the host plane: who sits on which GPU, with which NCCL.
/// All members judge the same answers and so choose the same way (ops/cuda/choose_way.h), NCCL's
/// unique id travels there too. Batches of one device are launched strictly in decision order on
/// one stream, also those of different sets, because NCCL demands one order; those of different
/// devices go side by side (ops/cuda/cuda_line.h).
///
/// An operation goes kMoved/kWaiting ... kLaunched ... kDone: launched when its last command is in
/// the stream and `end()` exists, done when that moment has passed. What is launched is never
/// waited for by the host. Result contract: that of `DataPlane`, except that NCCL sums in the wire
/// type and in an order of its own, so that floats may differ in the last bits from a CPU plane's
/// (equal on all ranks all the same). Averages of 16-bit wires are multiplied by 1/size before the
/// rounding. Sums of int64 wrap before they are divided. Whether a minimum or maximum of floats
/// keeps a NaN is up to NCCL.
std::unique_ptr<DataPlane> MakeCudaPlane(const CudaPlaneOptions& options);

}  // namespace farandole
