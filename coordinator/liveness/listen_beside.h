// Bad news by TCP beside a network that carries the work, as MPI does, and may be stuck with it.
#pragma once

#include <memory>
#include <span>

#include "core/config.h"
#include "core/net/stream_hub.h"
#include "core/transport.h"

namespace farandole {

/// Opens sockets on ranks that have neighbours on other hosts, tells these where they listen, and
/// connects them. Collective over all ranks.
/// @param elsewhere   This rank's neighbours on other hosts.
/// @param options     Without a key, which rank 0 makes.
/// @param config      Of it the interfaces and the ports.
/// @return nullptr if there are no such neighbours; also, with a warning, where a rank can have no
/// sockets; what Allgather returns.
Result<std::shared_ptr<StreamHub>> ListenBeside(Transport& transport,
                                                std::span<const int> elsewhere, HubOptions options,
                                                const Config& config, int64_t timeout_ns);

}  // namespace farandole
