// A process that mpirun started, with what a CUDA plane of one process per rank stands on.
#pragma once

#include <memory>
#include <string>

#include "core/counters.h"
#include "core/doorbell.h"
#include "core/plugin.h"
#include "core/transport.h"
#include "ops/data_plane.h"

namespace farandole {

/// Members go in the order in which MPI wants it.
struct MpiRank {
  FutexDoorbell bell;
  Counters counters;
  Backends backends;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<DataPlane> host;

  MpiRuntime& mpi() const { return *backends.mpi; }
  /// After the last use of all the rest; every rank must come.
  Status Leave();
};

/// @param plugin  The file of libfarandole_mpi.so.
Result<std::unique_ptr<MpiRank>> JoinMpi(const std::string& plugin);

}  // namespace farandole
