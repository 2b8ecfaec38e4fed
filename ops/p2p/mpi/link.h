// MPI as a link (ops/p2p/link.h), and its errors as Status, with the call's name and MPI's own
// text.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <span>

#include "core/borrowed_memory.h"
#include "core/status.h"
#include "ops/p2p/link.h"

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

/// The links of a data plane over MPI. No MPI datatypes and no MPI_Op: all dtypes, 16-bit sums in
/// float, counts beyond 2^31, absent ranks and one order of summation come for free, and it is
/// faster (docs/decisions.md).
///
/// @param communicator  Over all ranks, used by nobody else; errors must return. Never freed, see
///                      MakeMpiTransport.
/// @param memory    Of the users' tensors; released around calls of MPI. May be nullptr; outlives
///                  the links.
/// Lifetime: links end before MPI_Finalize.
P2pLinkFactory MakeMpiLinks(MPI_Comm communicator, BorrowedMemory* memory);

}  // namespace farandole
