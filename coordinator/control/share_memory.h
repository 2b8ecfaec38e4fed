// Which ranks share memory: the ranks of a host, if all of them can map one file.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/doorbell.h"
#include "core/status.h"
#include "core/transport.h"
#include "ops/shm/host_memory.h"

namespace farandole {

struct HostGroup {
  std::shared_ptr<HostMemory> memory;  ///< nullptr: this rank shares none.
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
/// @param watch  Is called for the rank's peers on its host whose processes it can know: of the
///               lowest rank for all of them, of the others for the lowest. Each is alive.
/// @return As Transport::Allgather.
Result<HostGroup> ShareMemory(Transport& transport, std::span<const int> host, FutexDoorbell& bell,
                              const std::function<void(int rank, pid_t pid)>& watch,
                              int64_t timeout_ns);

}  // namespace farandole
