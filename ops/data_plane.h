// A data plane moves and reduces bulk data: the interface all backends (shm, mpi, cuda, ...)
// implement.
//
// A plane is a resumable state machine driven by the engine: Start, then Step until done. No call
// blocks, and no call works longer than about one chunk (256 KiB), because the same thread relays
// the control tree. core/borrowed_memory.h protects users' tensors from a library that blocks
// anyway.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/collective.h"
#include "core/slots.h"
#include "core/status.h"
#include "core/transport.h"
#include "core/types.h"
#include "ops/agreement.h"

namespace farandole {

class DeviceEvent;  // ops/device.h

/// One tensor of a batch, contiguous, `count` elements. Memory is borrowed from Start until done or
/// Abandon. What `in`, `out` and `count` are for allgather, reducescatter and alltoall: see
/// Batch::splits.
struct Segment {
  const void* in =
      nullptr;  ///< nullptr: this rank is in the batch's absent set and contributes nothing.
  void* out = nullptr;  ///< May equal `in`. nullptr: this rank drops the result (it joined).
  int64_t count = 0;
  /// Of a quantized allreduce (ops/cpu/quantize.h), `count` elements: what this rank's roundings
  /// have left over so far. nullptr: what they leave is lost.
  float* residual = nullptr;
};

/// Everything the members of a set must agree on to run one collective; equal on all of them except
/// `segments`' pointers, `my_index`, `sends`, `receives` and the `prescale` of a sum or, between
/// hosts, of an average. All ops for
/// allreduce and reducescatter but kPreMulSum, which arrives as a sum, and kAdasum, which arrives
/// as the collectives it is composed of (ops/cpu/adasum.h); the other kinds ignore op, factors and
/// wire.
struct Batch : Collective {
  int64_t number = 0;  ///< Decision number: ascending per set.
  int32_t index = 0;   ///< Which batch of that decision, from 0.
  /// The next batch of the decision comes as soon as this one is started: a GPU may launch the two
  /// together. Alike on all members.
  bool is_followed = false;
  uint32_t set = 0;               ///< Uid of the process set.
  std::span<const int> ranks;     ///< Members, as AddSet had them.
  int my_index = 0;               ///< Index of this rank in `ranks`.
  DType dtype = DType::kFloat32;  ///< One that can be reduced: the others arrive as CarrierOf.
  DType wire = DType::kFloat32;   ///< Element type while travelling; see WireDType.
  int root_index = 0;             ///< Broadcast: index of the root in `ranks`.
  std::span<const int> absent;    ///< Indices in `ranks` that contribute nothing, ascending.
  /// Sums and averages of floats in a job with slots, on the CPU, in the set of all ranks: the
  /// slots whose sum each member contributes, by index; the order of the sum follows. Empty: rank
  /// order.
  std::span<const SlotRange> slots;
  int64_t divisor = 0;  ///< Of an average; 0: the number of `ranks`.
  std::span<const Segment> segments;
  int64_t count = 0;  ///< Sum of the segments' counts.
  /// Allgather and reducescatter, which have one segment: elements of each member's split, by
  /// index; they add up to `count`. Allgather: `in` is this member's split (an absent one's is
  /// empty), `out` all splits end to end. Reducescatter: `in` is all splits end to end, `out` this
  /// member's split of the result.
  std::span<const int64_t> splits;
  /// Alltoall, which has one segment and nobody absent: elements this rank sends to, and receives
  /// from, each member, by index; they lie end to end in `in` and in `out`. `count` is the
  /// largest of all that any member sends to any, itself included, alike on all of them.
  std::span<const int64_t> sends;
  std::span<const int64_t> receives;
  /// CUDA: inputs may be read once these events are complete. Borrowed until launched.
  std::span<const std::shared_ptr<DeviceEvent>> ready;
};

/// At most so many process sets live at a time, the set of all ranks included, and the uids of
/// those that do differ modulo it: a plane may number what it has for each set (message tags, say)
/// by that. MPI guarantees 32,768 tags, and a set takes two.
inline constexpr uint32_t kMaxLiveSets = 16'383;

/// What a Step did and when to call the next.
struct Progress {
  /// kLaunched: returned at most once, by planes whose work continues in a stream: `end()` is the
  /// event of its completion. Step is called until it returns kDone.
  enum class State : uint8_t { kMoved, kWaiting, kLaunched, kDone, kFailed };
  State state = State::kWaiting;
  /// kWaiting only: kByDoorbell, or ask again after this many ns.
  int64_t poll_after_ns = kByDoorbell;
  /// kWaiting only: waits for this rank's own inputs, which does not count as a stall.
  bool for_inputs = false;
  Status status;  ///< kFailed only.

  static Progress Moved() { return {State::kMoved, 0, false, {}}; }
  static Progress Waiting(int64_t poll_after_ns = kByDoorbell) {
    return {State::kWaiting, poll_after_ns, false, {}};
  }
  static Progress WaitingForInputs(int64_t poll_after_ns) {
    return {State::kWaiting, poll_after_ns, true, {}};
  }
  static Progress Launched() { return {State::kLaunched, 0, false, {}}; }
  static Progress Done() { return {State::kDone, 0, false, {}}; }
  static Progress Failed(Status s) { return {State::kFailed, 0, false, std::move(s)}; }
};

/// One batch in flight. Owned by its plane; invalid after Step returned kDone or kFailed, or after
/// Abandon.
class PlaneOperation {
 public:
  virtual ~PlaneOperation() = default;
  virtual Progress Step() = 0;
  /// Once launched: the event after which neither inputs nor outputs are accessed and the result
  /// is final.
  virtual std::shared_ptr<DeviceEvent> end() const { return nullptr; }
  /// Cancels the operation. Never blocks; user memory is not accessed afterwards, and library
  /// buffers that a third party may still write to are never freed or reused (quarantined): also
  /// those that users got for their tensors (SharedMemory::Allocate).
  virtual void Abandon() = 0;
};

/// Result contract (the same on every CPU plane, bitwise equal on all ranks and independent of
/// packing and timing): every contribution, the own one included, is scaled by `prescale` and
/// rounded to `wire`; the sum is taken in float (double for float64) in rank order, integers in 64
/// bits; average divides by ranks.size() (absent ones count); then `postscale`; the result is
/// rounded once to `wire`. With one member nothing is rounded. Sums of integers wrap; integer
/// averages are exact, then truncate toward zero. Bool has no sum and no average, floats have no
/// bitwise ops (IsDefined). A reducescatter
/// gives each member its split of what an allreduce would give, bit by bit. Broadcast, allgather
/// and alltoall copy elements as they are: they round to no wire type. A plane between processes
/// rounds a quantized allreduce otherwise: see ops/cpu/quantize.h. Of a variable-size
/// collective (allgather, reducescatter, alltoall) `in` and `out` do not overlap. The details of
/// casts, factors, NaN and wrapping are those of `class CpuKernels`.
///
/// An allreduce of floats in a set that spans hosts, some of which have several members, differs in
/// one point: contributions are reduced within each host, in rank order, and rounded to `wire`;
/// then the hosts' results, in the order of the hosts' lowest ranks, and then comes `postscale`. An
/// average is that of the hosts' averages (absent ranks count); where hosts have unequal numbers of
/// members, each is first multiplied by that of its host, relative to the mean of all hosts, and
/// rounded to `wire`. A reducescatter in such a set takes rank order all the same.
///
/// With `Batch::slots` the sum takes the order of the tree over the slots instead of rank order
/// (core/slots.h), in sets that span hosts too, and an average is that sum divided once. So if
/// members contribute the sums of their slots, each evaluated in the same tree and rounded neither
/// by the dtype nor by `wire` (float32 and float64 as they are), their sum has the same bits for
/// any number of members. A 16-bit float is a contribution that has been rounded: bits then depend
/// on where the tree is cut. The 8-bit wire has no such order; OperationRegistry refuses it.
///
/// Thread safety: everything from the thread that holds the engine lock. Invariants: batches of one
/// set are started in decision order; those of different sets run side by side. No allocation in
/// steady state. Lifetime: outlives its operations.
class DataPlane {
 public:
  virtual ~DataPlane() = default;
  virtual const char* name() const = 0;
  /// Whether it uses Segment::residual, of any set of several members.
  virtual bool quantizes() const { return false; }
  /// Prepares what batches of the set need (slots, buffers). Called in the same order on all
  /// members. `ranks`: the members' global ranks, the same on all of them, in the order in which
  /// contributions are reduced: ascending, except between hosts (ops/hierarchical/plane.h).
  virtual Status AddSet(uint32_t set, std::span<const int> ranks, int my_index) = 0;
  /// Called when no batch of the set is in flight on this rank; other members may still run some,
  /// also when the next set is added.
  virtual void RemoveSet(uint32_t set) = 0;
  /// `batch` and what it points to stay valid until the operation ends.
  /// May be called while earlier batches of the set run. Which rank contributes and which takes the
  /// result is up to `absent` and the segments' pointers; all members step until done.
  /// @return InvalidArgument or Unimplemented for a batch the plane cannot run, alike on all
  /// members as far as they agree on it (CPU planes: CheckBatch); Internal for an unknown set;
  /// ResourceExhausted if a buffer cannot be had; Aborted after an Abandon in the same set.
  virtual Result<PlaneOperation*> Start(const Batch& batch) = 0;
  /// How the members of the set agree without votes; nullptr: they do not. As long as the set.
  virtual Agreement* AgreementOf(uint32_t /*set*/) { return nullptr; }
};

}  // namespace farandole
