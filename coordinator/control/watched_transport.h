// Bad news by TCP beside a network that carries the work, as MPI does, and may be stuck with it.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "core/net/stream_hub.h"
#include "core/transport.h"

namespace farandole {

/// Opens sockets on ranks that have neighbours on other hosts, and tells these where they listen.
/// Collective over all ranks.
/// @param elsewhere   This rank's neighbours on other hosts.
/// @param options     Without a key, which rank 0 makes.
/// @param interfaces  See TcpNetworkOptions.
/// @return nullptr if there are no such neighbours; also, with a warning, where a rank can have no
/// sockets; what Allgather returns.
Result<std::shared_ptr<StreamHub>> ListenBeside(Transport& transport,
                                                std::span<const int> elsewhere, HubOptions options,
                                                const std::string& interfaces, int64_t timeout_ns);

/// `transport`, with the losses and final errors that the hub knows of. The neighbours with an
/// address in the hub are connected by SetNeighbours.
///
/// Thread safety: the holder of the engine lock only.
std::unique_ptr<Transport> MakeWatchedTransport(std::unique_ptr<Transport> transport,
                                                std::shared_ptr<StreamHub> hub);

}  // namespace farandole
