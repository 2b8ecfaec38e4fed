// Control messages over MPI point to point, on a communicator that nobody else uses.
#pragma once

#include <mpi.h>

#include <memory>

#include "core/clock.h"
#include "core/transport.h"

namespace farandole {

/// Sends are copied into pooled buffers and left to MPI_Isend; receives are found by MPI_Improbe,
/// so that a message of any size goes into one reused buffer. MPI has no sleeping wait: this
/// transport must be polled (PollAfterNs), and it never rings a doorbell.
///
/// Order: all messages between two ranks carry one tag and MPI does not let messages of one
/// (sender, communicator, tag) overtake; one receive is in flight at a time.
///
/// @param communicator  Errors must return. Kept for ever: if it were freed, its context number
///                      could come back for a later engine while a late message of this one is
///                      still on its way.
/// Thread safety: the holder of the engine lock only. Lifetime: ends before MPI_Finalize; buffers
/// that MPI may still read or write then are left to it.
std::unique_ptr<Transport> MakeMpiTransport(MPI_Comm communicator, const Clock& clock);

}  // namespace farandole
