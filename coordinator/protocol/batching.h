// Divides a Work decision into batches: a pure function that every member evaluates alike.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/protocol/listener.h"

namespace farandole {

/// A tensor of a key in a batch.
struct BatchEntry {
  int32_t key = 0;     ///< Position in the decision's keys.
  int32_t tensor = 0;  ///< Position in that key's signature.tensors.
};

/// Tensors reduced together: one kind, op, dtype, wire, device, factors, root and absent set.
struct BatchPlan {
  std::vector<BatchEntry> entries;
  std::vector<int32_t> absent;  ///< Global ranks that contribute nothing, ascending.
  int64_t bytes = 0;            ///< Of the tensors, in their own dtype.
};

/// Appends to `plans` (cleared first; inner vectors keep their capacity and `plans.size()` is the
/// answer through
/// `*count`, so that the steady state allocates nothing).
///
/// Tensors keep the order of the decision; one larger than the threshold is a batch by itself; a
/// batch is closed when the next compatible tensor would exceed `threshold_bytes` or when
/// `threshold_bytes` is 0. Tensors marked skipped, and tensors of zero elements, are in no batch.
void FormBatches(const WorkDecision& work, int64_t threshold_bytes, std::vector<BatchPlan>& plans,
                 size_t* count);

}  // namespace farandole
