// Control messages over MPI point to point, on a communicator that nobody else uses.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>

#include "core/clock.h"
#include "core/transport.h"

namespace farandole {

/// A message travels in slices of at most so many bytes, the first of which begins with the length
/// of the message, 8 bytes. MPI libraries send so little without the receiver's help.
inline constexpr size_t kMpiSliceBytes = 4000;

/// Between neighbours, and between all other ranks.
enum MpiTag : int { kMpiNeighbourTag = 0, kMpiOthersTag = 1 };

/// Sends are copied into pooled buffers and left to MPI_Isend. A receive of one slice is posted for
/// each neighbour, and one for all other ranks: testing these takes the same time however many
/// ranks there are, where a probe for any source looks at each of them. MPI has no sleeping wait:
/// this transport must be polled (PollAfterNs), and it never rings a doorbell.
///
/// Order: all messages between two ranks carry one tag and MPI does not let messages of one
/// (sender, communicator, tag) overtake.
///
/// @param communicator  Errors must return. Kept for ever: if it were freed, its context number
///                      could come back for a later engine while a late message of this one is
///                      still on its way.
/// Thread safety: the holder of the engine lock only. Lifetime: ends before MPI_Finalize; buffers
/// that MPI may still read or write then are left to it.
std::unique_ptr<Transport> MakeMpiTransport(MPI_Comm communicator, const Clock& clock);

}  // namespace farandole
