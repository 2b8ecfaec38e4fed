// The settings of a rank's negotiation; those on which ranks must agree are compared at init.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/protocol/request.h"
#include "ops/data_plane.h"

namespace farandole {

struct NegotiationOptions {
  int rank = 0;
  int size = 1;
  std::vector<int>
      parent;  ///< parent[r] of every rank r; parent[0] = -1; parent[r] < r is not required.
  int64_t fusion_threshold_bytes = int64_t{128} << 20;      ///< 0: every tensor is its own batch.
  int64_t cuda_fusion_threshold_bytes = int64_t{25} << 20;  ///< The same for tensors on a GPU.
  int window = 2;  ///< Unfinished batches per (set, device kind).
  uint32_t max_ids = 65'536;
  /// Work of at least so many ids is remembered, to be handled as one when it comes again.
  size_t least_known_ids = 16;
  /// What idle ids may take before they are retired, on every rank, and how many keys without
  /// one are kept before idle ones are forgotten, on this rank. 0: they are looked for at each
  /// Flush.
  size_t idle_id_bytes = size_t{256} << 10;
  size_t idle_keys = 1024;
  bool join_allreduce_only = false;  ///< Other collectives are refused while a rank has joined.
  uint32_t max_live_sets = kMaxLiveSets;
  int64_t stall_ns = 10'000'000'000;  ///< Age at which an incomplete key is reported; <= 0: never.
  int64_t stall_shutdown_ns = 0;      ///< Age at which one ends the job; <= 0: never.
  int64_t answer_wait_ns =
      5'000'000'000;             ///< After this a query is published with the silent ranks listed.
  bool divergence_check = true;  ///< Ranks none of which can go on end the job.
  /// All ranks submit the keys of the global set in the same order, but for those with a function
  /// of their own. Ranks that do not end the job, too.
  bool in_order = false;
  int slots = 0;                ///< Of the job: see core/slots.h. 0: it has none.
  std::vector<uint8_t> planes;  ///< Per DeviceKind, of sets whose ranks share no memory.
  std::vector<int> memory;      ///< By rank: equal and >= 0 if they share memory. Empty: none do.
  uint8_t memory_plane = 0;     ///< For the CPU, of sets whose ranks all share memory.
  uint8_t hosts_plane = 0;      ///< For the CPU, of those of which some ranks do.

  /// The planes of a set, per DeviceKind. Rank 0 decides those of new sets.
  std::vector<uint8_t> PlanesOf(std::span<const int32_t> ranks) const;
  /// No key is looked at before this age: the earlier of the two limits that are set; <= 0: never.
  int64_t LookNs() const {
    const bool both = stall_ns > 0 && stall_shutdown_ns > 0;
    return both ? std::min(stall_ns, stall_shutdown_ns) : std::max(stall_ns, stall_shutdown_ns);
  }
  int64_t FusionThreshold(DeviceKind device) const {
    return device == DeviceKind::kCuda ? cuda_fusion_threshold_bytes : fusion_threshold_bytes;
  }
};

}  // namespace farandole
