// Control messages over TCP: frames between this rank and those it has streams with.
#pragma once

#include <memory>

#include "core/clock.h"
#include "core/net/stream_hub.h"
#include "core/transport.h"

namespace farandole {

/// Of a rank that has joined: the hub knows where the others listen. News ring the hub's doorbell.
/// The hub is shut down with the transport.
/// Streams to neighbours are opened by SetNeighbours, others by the first message.
///
/// Allgather goes through a tree of the ranks: texts up to rank 0, the answer down. So no rank
/// exchanges more than 9 messages, and it takes 2 log8(size) hops.
///
/// Thread safety: the holder of the engine lock only.
std::unique_ptr<Transport> MakeTcpTransport(std::shared_ptr<StreamHub> hub, const Clock& clock);

}  // namespace farandole
