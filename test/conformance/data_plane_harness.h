// Runs conformance cases over all ranks of one process: as threads, or stepped by one thread in a
// random order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/doorbell.h"
#include "core/net/data_streams.h"
#include "ops/data_plane.h"
#include "test/conformance/data_plane_case.h"
#include "test/conformance/data_plane_rank.h"

namespace farandole {

/// The planes of `planes.size()` ranks that share this process, and the bells they ring.
struct PlaneGroup {
  PlaneGroup() = default;
  PlaneGroup(PlaneGroup&&) = default;
  /// Ends the ranks' planes side by side, as processes do: one may wait for its peers.
  ~PlaneGroup();

  std::vector<std::unique_ptr<FutexDoorbell>> bells;
  std::vector<std::unique_ptr<DataStreams>> streams;  // by planes
  std::vector<std::unique_ptr<DataPlane>> used;       // by those of the ranks
  std::vector<std::unique_ptr<DataPlane>> planes;
  std::vector<int> hosts = {};             ///< See PlaneCase.
  std::vector<BufferSource> buffers = {};  ///< By rank; empty: tensors lie on the heap.

  int size() const { return static_cast<int>(planes.size()); }
  /// The set of all ranks, as `rank` sees it.
  SetView Set(int rank) const;
};

/// Makes planes whose ranks are threads of this process; a row of the test's parameters.
struct PlaneBackend {
  std::string name;
  std::function<PlaneGroup(int ranks)> make;
};

/// Runs `cases` in turn on every rank of the group, one thread each. Checks every result against
/// the reference, and that all members got the same bits.
/// @return Failures, one line each.
std::string RunThreaded(PlaneGroup& group, std::span<const PlaneCase> cases);

/// The same with no threads: picks a random rank each time and steps one of its two oldest batches.
/// It cannot detect a lost wake-up, but it detects a wrong order of steps.
std::string RunInterleaved(PlaneGroup& group, std::span<const PlaneCase> cases, uint64_t seed);

/// Runs `body(rank)` on a thread per rank and joins them.
void OnEveryRank(int ranks, const std::function<void(int rank)>& body);

}  // namespace farandole
