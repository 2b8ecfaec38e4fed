// The CPU data plane between processes: a link carries bytes, the kernels reduce.
#pragma once

#include <memory>

#include "core/counters.h"
#include "core/network.h"
#include "ops/cpu/kernels.h"
#include "ops/data_plane.h"
#include "ops/p2p/link.h"

namespace farandole {

/// @param name      Of the network, in error messages.
/// @param links     Makes the link of each set with its first batch.
/// @param kernels   Outlives the plane.
/// @param counters  May be nullptr. Counts bytes copied, bulk bytes sent, quarantined bytes.
/// Thread safety and contract: `class DataPlane`.
std::unique_ptr<DataPlane> MakeP2pPlane(const char* name, P2pLinkFactory links,
                                        const CpuKernels& kernels, Counters* counters);

/// A plane over links of its own, with the counters of `options`; else as MakeP2pPlane. Collective,
/// and the errors, as Network::CreateLinks.
Result<std::unique_ptr<DataPlane>> CreateP2pPlane(Network& network, const LinkOptions& options,
                                                  const CpuKernels& kernels);

}  // namespace farandole
