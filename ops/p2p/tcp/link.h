// TCP as a link (ops/p2p/link.h): the links of all sets of a plane share the sockets to each rank.
#pragma once

#include "core/net/data_streams.h"
#include "core/network.h"
#include "ops/p2p/link.h"

namespace farandole {

/// Messages are written when they are sent, from the caller's memory, and read straight to where a
/// receive is posted. With several sockets to a rank, long messages take them in turn.
///
/// A sender is at most kLinkSlots messages of a round ahead of the receives that are posted, which
/// headers report. What arrives before its receive is copied aside: of each set, sender and round
/// at most kLinkSlots messages. So every socket is read to its end while a message from its rank is
/// awaited, and no set waits for another one's receives.
///
/// A link polls for a millisecond after anything has moved. Then it sleeps until sockets that it
/// waits for are ready, if `options` have a doorbell.
///
/// @param streams  Outlives the links. @param plane  See StreamId.
/// Errors of links, for good: Unavailable with the rank that cannot be reached; Internal with the
/// rank that breaks the protocol.
P2pLinkFactory MakeTcpLinks(DataStreams& streams, int plane, const LinkOptions& options);

}  // namespace farandole
