// An MPI error as a Status: made in the leaf that called, with the call's name and MPI's own text.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <span>

#include "core/status.h"

namespace farandole {

/// What the failed call was about; -1: not applicable.
struct MpiCall {
  const char* name;    ///< "MPI_Isend"
  int peer = -1;       ///< Global rank at the other end.
  int64_t bytes = -1;  ///< Length of the message.
};

/// OK for MPI_SUCCESS; else Internal: `MPI_Isend to or from rank 3, 4096 bytes: MPI_ERR_TRUNCATE:
/// message truncated`.
Status FromMpi(int code, const MpiCall& call);

/// The same for calls that complete several requests: MPI_ERR_IN_STATUS is replaced by the first
/// error in `statuses`.
Status FromMpi(int code, const MpiCall& call, std::span<const MPI_Status> statuses);

}  // namespace farandole
