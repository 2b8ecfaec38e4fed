// Which ranks share memory: the ranks of a host, if all of them can map one file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coordinator/control/peer_watch.h"
#include "core/doorbell.h"
#include "core/status.h"
#include "core/transport.h"
#include "ops/shm/host_memory.h"

namespace farandole {

struct HostGroup {
  std::shared_ptr<HostMemory> memory;  ///< nullptr: this rank shares none.
  /// The rank's peers that share it: its lowest rank watches all of them, the others the lowest.
  /// nullptr without memory.
  std::unique_ptr<PeerWatch> peers;
  /// By rank: equal for ranks that share memory, negative for those that share none. The same on
  /// all ranks.
  std::vector<int> group;
  /// Why the ranks of some host share none, although they might; or empty. The same on all ranks.
  std::string failure;
  /// Processors that the ranks of this host may use, taken together, also if each may use one only.
  int cores = 0;
};

/// The lowest rank of each host creates the memory, and the others open it. Where a rank cannot,
/// no rank of its host shares memory, which is no error.
///
/// Collective over all ranks, before the engines start; blocks up to `timeout_ns`.
/// @param host  By rank: the number of its host, from 0; the same on all ranks.
/// @param bell  Of this rank; outlives the result. Its state is moved to the memory, if there is
///              any, which outlives all use of the bell.
/// @return As Transport::Allgather.
Result<HostGroup> ShareMemory(Transport& transport, std::span<const int> host, FutexDoorbell& bell,
                              int64_t timeout_ns);

}  // namespace farandole
