// Batches of one process set over NCCL: pack, one collective, unpack, all in one stream.
#pragma once

#include <memory>
#include <string>

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
  int size = 1;           ///< Members of the set.
  int index = 0;          ///< Position of this rank among them.
  /// Which rank sits on which GPU of which host, in a form that ends every error message.
  std::string map;
  Counters* counters = nullptr;  ///< May be nullptr.
};

/// Non-blocking throughout: NCCL's calls are made, and asked about, from Connect and Step.
std::unique_ptr<CudaWay> MakeNcclWay(NcclWayOptions options);

}  // namespace farandole
