// What an engine has done so far, as numbers: read by tests, benchmarks and users, never by
// decisions.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/types.h"

namespace farandole {

/// The names users see are in CounterName. Append new ones at the end, before kCount.
enum class Counter : uint8_t {
  kSubmissions,       ///< Submissions taken from callers.
  kMessagesUp,        ///< Control messages sent to the parent.
  kMessagesDown,      ///< Control messages sent to children.
  kMessagesReceived,  ///< Control messages received from either side.
  kControlBytesSent,  ///< Bytes of those sent.
  kWakeUps,           ///< Times a sleeping thread was woken (futex wakes paid for).
  kEngineLoops,       ///< Times the engine looked for work.
  kDecisions,         ///< Decisions applied, and agreements.
  kBatches,           ///< Batches started.
  kTensors,           ///< Tensors in those batches; tensors / batches is the mean batch.
  kBatchBytes,        ///< Bytes of tensor data in those batches.
  kBytesCopied,       ///< Bytes moved by packing, unpacking and staging.
  kBulkBytesSent,     ///< Bytes a data plane handed to a transport or a peer.
  kQuarantinedBytes,  ///< Library buffers given up because a third party may still write to them.
  kDeviceLaunches,    ///< Kernels launched on a GPU by us, NCCL's own not counted.
  kInPlaceBytes,      ///< Bytes of tensor data in batches reduced where they lie, without copies.
  kBulkMessagesSent,  ///< Messages in which planes over messages sent bulk bytes.
  kAgreements,        ///< Operations that ranks of a host agreed to run, without votes.
  kSteps,          ///< Steps of training that this rank has ended; what the times are: StepTimes.
  kStepNs,         ///< The time of those steps.
  kBlockedNs,      ///< Of that: its thread waited for operations of all ranks.
  kInputNs,        ///< It waited for input.
  kQueuedNs,       ///< It had no processor.
  kCollectingNs,   ///< Its garbage collector ran.
  kOtherGroupsNs,  ///< Its thread waited for operations of other sets or groups of ranks.
  kLinkNs,         ///< The network needed for what was sent to another host.
  // Operations of this rank that have ended, in whichever way; one for each kind: see EndedOf.
  kAllreduces,
  kBroadcasts,
  kAllgathers,
  kReducescatters,
  kAlltoalls,
  kBarriers,
  kOperationErrors,  ///< Of those, how many ended by an error while the engine went on.
  kNegotiationNs,    ///< Their times from the submission until all ranks had submitted.
  kExecutionNs,      ///< And from there to the end.
  kVotesByName,      ///< Submissions announced in full, not by the number of a known tensor.
  kWireBytes,        ///< kBatchBytes as they travel, in the wire's dtype.
  kStallReports,     ///< Reports of stalls that this rank has read.
  kCount,
};
inline constexpr size_t kCounterCount = static_cast<size_t>(Counter::kCount);

/// "submissions", "messages_up", ... stable names for users.
std::string_view CounterName(Counter counter);
/// The counter of ended operations of a kind up to kBarrier.
constexpr Counter EndedOf(OpKind kind) {
  return static_cast<Counter>(static_cast<uint8_t>(Counter::kAllreduces) +
                              static_cast<uint8_t>(kind));
}
static_assert(EndedOf(OpKind::kBarrier) == Counter::kBarriers);

/// One engine's counters. Header-only, so that a plug-in can count without a symbol of ours.
/// Thread safety: Add from the holder of the engine lock only (one writer at a time, so no locked
/// instruction is paid); AddShared for counters written by any thread; Get from any thread. A
/// counter uses one of the two, always.
class Counters {
 public:
  void Add(Counter counter, int64_t n = 1) {
    std::atomic<int64_t>& cell = Cell(counter);
    cell.store(cell.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  void AddShared(Counter counter, int64_t n = 1) {
    Cell(counter).fetch_add(n, std::memory_order_relaxed);
  }
  int64_t Get(Counter counter) const {
    return cells_[static_cast<size_t>(counter)].load(std::memory_order_relaxed);
  }

 private:
  std::atomic<int64_t>& Cell(Counter counter) { return cells_[static_cast<size_t>(counter)]; }

  std::array<std::atomic<int64_t>, kCounterCount> cells_{};
};

struct NamedCount {
  std::string_view name;
  int64_t value = 0;
};

/// All counters with their names, in the order of Counter. Not one instant: each is read by itself.
std::vector<NamedCount> Snapshot(const Counters& counters);

}  // namespace farandole
