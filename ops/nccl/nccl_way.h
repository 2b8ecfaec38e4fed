// Batches of one process set over NCCL: pack, one collective, unpack, all in one stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/counters.h"
#include "core/log.h"
#include "ops/cuda/lane.h"
#include "ops/cuda/way.h"
#include "ops/nccl/library.h"

namespace farandole {

struct NcclWayOptions {
  const NcclLibrary* library = nullptr;
  CudaLane* lane = nullptr;
  std::string unique_id;  ///< As from NcclLibrary::MakeUniqueId on one member.
  /// In place of a unique id: a way made by MakeNcclWay on the same lane, connected, of a set that
  /// has all members of this one and, at the positions `excluded`, others. Outlives Connect.
  CudaWay* parent = nullptr;
  std::vector<int> excluded = {};
  int size = 2;   ///< Members of the set; one alone needs no NCCL.
  int index = 0;  ///< Position of this rank among them.
  /// Which rank sits on which GPU of which host, in a form that ends every error message.
  std::string map;
  Counters* counters = nullptr;         ///< May be nullptr.
  Log* log = nullptr;                   ///< May be nullptr.
  const Clock* clock = &SteadyClock();  ///< For the pace of Check and the end.
};

/// Non-blocking throughout: NCCL's calls are made, and asked about, from Connect and Step. At most
/// two launches of ours per batch of up to Device::kMovesPerLaunch tensors, or parts.
///
/// Begin answers ResourceExhausted, before anything is enqueued, if there is no fusion buffer. The
/// first failure of NCCL aborts the communicator, and every later call answers it: Unavailable if a
/// peer is gone, else Internal, with call, reason, version, file and map.
std::unique_ptr<CudaWay> MakeNcclWay(const NcclWayOptions& options);

}  // namespace farandole
