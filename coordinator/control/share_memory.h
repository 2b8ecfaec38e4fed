// Which ranks share memory: the ranks of a host, if all of them can map one file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/doorbell.h"
#include "core/status.h"
#include "core/transport.h"
#include "ops/shm/host_memory.h"

namespace farandole {

struct SharedMemory {
  std::shared_ptr<HostMemory> memory;  ///< nullptr: this rank shares none.
  /// By rank: equal for ranks that share memory, negative for those that share none. The same on
  /// all ranks.
  std::vector<int> group;
  /// Why the ranks of some host share none, although they might; or empty. The same on all ranks.
  std::string failure;
};

/// The lowest rank of each host creates the memory, and the others open it. Where a rank cannot,
/// no rank of its host shares memory, which is no error.
///
/// Collective over all ranks, before the engines start; blocks up to `timeout_ns`.
/// @param host  By rank: the number of its host, from 0; the same on all ranks.
/// @param bell  Of this rank; outlives the memory.
/// @return As Transport::Allgather.
Result<SharedMemory> ShareMemory(Transport& transport, std::span<const int> host, Doorbell* bell,
                                 int64_t timeout_ns);

}  // namespace farandole
