// A prepared collective on this rank: its key, what it reduces, and the one request that may be in
// flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "coordinator/engine/work.h"
#include "coordinator/protocol/listener.h"
#include "coordinator/protocol/request.h"
#include "coordinator/protocol/validate.h"
#include "core/status.h"
#include "ops/device.h"
#include "ops/gpu/rank_device.h"

namespace farandole {

class Engine;

/// Where inputs are made: a stream of one CUDA device.
struct ProducerStream {
  int device = 0;
  StreamHandle stream = nullptr;
  bool operator==(const ProducerStream&) const = default;
};

/// How many bytes of one tensor a rank reads and writes. Where rows may differ, `out` is what a
/// result takes if all ranks pass as many rows as this one.
struct Extent {
  int64_t in = 0;
  int64_t out = 0;
  bool operator==(const Extent&) const = default;
};

struct FreeMemory {
  void operator()(float* memory) const { std::free(memory); }
};
using Residuals = std::vector<std::unique_ptr<float, FreeMemory>>;

/// What an operation without a name is called: the n-th call of a kind takes slot n mod the slots.
std::string UnnamedName(OpKind kind, uint64_t slot);
bool IsUnnamed(const KeyName& name);

/// Holds its own queue node, so that a start neither allocates nor hashes.
///
/// Thread safety: `in_flight` and the name, which operations of other kinds may share, are the lock
/// (Take). The thread that takes it owns the rest until it has pushed the operation to the engine;
/// from then on the holder of the engine lock owns it until it releases it. Those who do not have
/// the lock may read `name`, `version`, `first_version` and `holder` under the registry's mutex.
/// Lifetime: while somebody holds it (OperationRegistry::Prepare) or it is in flight, and at most
/// to the engine's end; once its process set has ended it may become an operation of another one,
/// under higher versions.
struct Operation {
  static constexpr KeyId kUnknownKey = UINT32_MAX;

  /// @return false if it is in flight, or its name for another kind.
  bool Take() {
    if (in_flight.exchange(true)) return false;
    if (TakeName()) return true;
    in_flight.store(false);
    return false;
  }
  /// The second half of Take.
  bool TakeName() {
    const Operation* none = nullptr;
    return holder == nullptr || holder->compare_exchange_strong(none, this);
  }
  void Release() {
    if (holder != nullptr) holder->store(nullptr, std::memory_order_release);
    in_flight.store(false, std::memory_order_release);
  }
  /// Ends the request; the operation can be taken again before its waiters wake. After a failure
  /// the watchdog may end it at the same time: whoever clears `started` does. @return false if
  /// another thread did, or nothing is started.
  bool Finish(const Status& status) {
    if (!started.exchange(false, std::memory_order_acq_rel)) return false;
    const std::shared_ptr<Work> ending = work;
    allocator = nullptr;
    Release();
    return ending->Finish(status);
  }

  Engine* engine = nullptr;
  KeyName name;
  Signature signature;
  std::vector<int64_t> rows;    // where they may differ: of each tensor, those of this rank
  std::vector<int64_t> splits;  // alltoall: see Engine::Prepare
  double prescale = 1.0;        // premul_sum: this rank's factor; the signature has 1
  // How many hold it, whether somebody has since the registry last looked, and what it counted for
  // when nobody did any more; under the registry's mutex.
  int64_t handles = 0;
  bool was_held = false;
  int64_t idle_weight = 0;
  size_t ranks = 0;  // of the process set
  bool is_of_all_ranks = false;
  uint32_t version = 0;         // of these six: how often it was defined
  uint32_t first_version = 1;   // under this name; earlier ones were of a set that has ended
  bool ended = false;           // so is this one, and the name is nobody's
  std::vector<Extent> extents;  // per tensor
  std::atomic<bool> in_flight{false};
  std::shared_ptr<std::atomic<const Operation*>> holder;  // of the name; nullptr: it has none
  std::atomic<bool> started{false};                       // the request below is complete

  // The request: per tensor.
  std::vector<const void*> in;
  std::vector<void*> out;
  std::shared_ptr<ResultAllocator> allocator;  // gives `out` when sizes are known; may be nullptr
  Vote vote;
  bool is_awaited = false;  // started without notice: whoever did so waits, or runs the engine
  std::shared_ptr<Work> work;
  std::vector<std::shared_ptr<DeviceEvent>> ready;  // CUDA: the inputs are made; the first
  size_t ready_count = 0;                           // ready_count of them
  Device* gpu = nullptr;                            // of the producers
  StreamHandle producer = nullptr;                  // the stream of the last one

  /// Of a quantized allreduce with a name, per tensor: Segment::residual, zeros at first; else
  /// empty. The plane's while it runs; gone with the description.
  Residuals residuals;

  // kStep: announcements that follow this one. Under the mutex of StepAnnouncer.
  std::deque<StepCount> later_steps;

  // The engine's.
  KeyId key = kUnknownKey;
  int32_t batches_left = 0;
  Status failure;       // of this rank alone: there is no memory for a result
  uint32_t track = 0;   // in the timeline; 0: none yet
  uint64_t flight = 0;  // its event in the flight recorder; 0: none
  int64_t submitted_ns = 0;
  int64_t decided_ns = 0;  // 0: not yet
  Operation* next = nullptr;

  /// Where rows may differ: `received` rows of tensor t come from each rank. Sets out[t], or
  /// `failure`; by the holder of the engine lock.
  void ProvideResult(size_t t, std::span<const int64_t> received);
  /// Allreduce with an allocator: likewise where this rank gave no memory for tensor t.
  void ProvideAbsent(size_t t);
  Result<void*> Allocate(size_t t, std::span<const int64_t> received, int64_t bytes);
  void SetResult(size_t t, void* memory, const Status& why);
  /// Records in `producer` how far it must have come before anything is read or written.
  /// @return InvalidArgument if it is being captured into a graph.
  Status RecordReady(DeviceEvent& event) const;
  /// The same in each producer, of which the last stays. By the thread that has taken it.
  /// @return InvalidArgument also if a producer is on another device than the rank's, missing or
  /// superfluous; Unavailable if there is no GPU to be used.
  Status RecordProducers(RankDevice& device, const Vote& vote,
                         std::span<const ProducerStream> producers);

  /// Frees what it holds, when its set has ended. By who has the lock, under the registry's
  /// mutex.
  void Empty();
};

/// An operation that this thread has claimed (OperationRegistry::Claim): released at the end of the
/// scope, unless it was handed on.
class ClaimedOperation {
 public:
  explicit ClaimedOperation(Operation& operation) : operation_(&operation) {}
  ~ClaimedOperation() {
    if (operation_ != nullptr) operation_->Release();
  }
  ClaimedOperation(const ClaimedOperation&) = delete;
  ClaimedOperation& operator=(const ClaimedOperation&) = delete;
  Operation& operator*() const { return *operation_; }
  /// Whoever has it now releases it. Before that can happen.
  void HandOn() { operation_ = nullptr; }

 private:
  Operation* operation_;
};

/// Releases what OperationRegistry::Prepare gave.
struct ReleaseOperation {
  void operator()(Operation* operation) const;
};
using HeldOperation = std::unique_ptr<Operation, ReleaseOperation>;

/// What `rank`, one of the set's `members`, reads and writes of tensor `t` if it is present. The
/// operation has passed Validate, CheckPassedRows and CheckSplits.
Extent ExtentOf(const Operation& operation, size_t t, std::span<const int32_t> members,
                int32_t rank);

/// Whether two ranges of memory share a byte; nullptr shares none.
bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes);

/// Bytes of all tensors in their own dtype, as far as this rank knows them.
int64_t TotalBytes(const Operation& operation);

}  // namespace farandole
