// The shared-memory collectives: how the members of a set on one host run a batch through
// SharedSlots.
//
// Allreduce and broadcast divide a batch into chunks of at most a slot; allgather, reducescatter
// and alltoall into chunks of one slice for each pair of members. Chunks are pipelined over the
// slots: each member packs, reduces and consumes them in order, and three flags per member (Stage)
// count how far it is. There is no barrier. An allreduce of tensors that lie in buffers of all
// members needs no slots (allreduce.cc).
//
// Idea: shared-memory reduce-scatter and allgather, as in Jain et al., "Framework for Scalable
// Intra-Node Collective Operations using Shared Memory", SC18, doi:10.1109/SC.2018.00032.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/counters.h"
#include "ops/cpu/batch.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/partition.h"
#include "ops/data_plane.h"
#include "ops/shm/memory.h"
#include "ops/shm/store_policy.h"

namespace farandole {

/// What the collectives of one member of a set share. One of them runs at a time.
struct SharedMemoryMember {
  SharedMemoryMember(SharedSlots shared_slots, const SlotMemory& slot_memory,
                     const CpuKernels& cpu_kernels, const Clock& steady, Counters* counts);

  SharedSlots slots;
  const SlotMemory& memory;  ///< Knows what lies in buffers.
  const CpuKernels& kernels;
  const Clock& clock;              ///< Times chunks for the choosers.
  Counters* const counters;        ///< May be nullptr.
  uint64_t chunks = 0;             ///< Chunks of all batches so far: the number of the next one.
  std::vector<std::byte> scratch;  ///< kOneShotBytes: values between slots and tensors.

  /// Scratch space, and the most that an allreduce reduces without shards.
  static constexpr int64_t kOneShotBytes = 16 * 1024;
};

/// One kind of collective of one member, one batch after the other. A subclass says how a batch is
/// divided into chunks and what each stage of a chunk does.
///
/// Thread safety: one thread. Invariant: every member runs the same batches in the same order.
/// Lifetime: `member` outlives it.
class SharedMemoryCollective {
 public:
  enum class State : uint8_t { kMoved, kWaiting, kDone, kFailed };

  /// @param chooser  The store policy of this kind's chunks; only that of member 0 is used.
  SharedMemoryCollective(SharedMemoryMember& member, StorePolicyChooser chooser);
  virtual ~SharedMemoryCollective() = default;
  SharedMemoryCollective(const SharedMemoryCollective&) = delete;
  SharedMemoryCollective& operator=(const SharedMemoryCollective&) = delete;

  /// Starts the next batch; the previous one is complete. `batch` has passed CheckBatch and stays
  /// valid until Step returned kDone.
  void Begin(const Batch& batch);
  /// Moves about 256 KiB, as far as peers allow. After kWaiting a peer's ring says when to call it
  /// again; after kFailed nothing more may run.
  State Step();
  /// After kFailed.
  const Status& failure() const { return failure_; }

 protected:
  /// What is reduced and copied on before it leaves the L1 cache.
  static constexpr int64_t kInCacheBytes = 8 * 1024;

  /// Sets what depends on the kind: chunk_elements_, step_bytes_. @return The number of chunks.
  virtual int64_t Prepare() = 0;
  /// Runs one stage of one chunk, if peers allow, and publishes it. May set failure_.
  /// @return Whether there was one.
  virtual bool Advance() = 0;

  // Fixed-size collectives, whose batches are chunks of chunk_elements_ end to end.
  int64_t PrepareWholeSlots();
  int64_t ChunkCount(uint64_t chunk) const;
  /// Copies a slice of a slot to the tensors, from out_cursor_ on.
  void UnpackSlice(const std::byte* slot, Slice slice);

  int my_index() const { return slots_.my_index(); }
  int members() const { return slots_.layout().members; }
  bool SlotIsFree();
  bool StreamsSlots() const { return slots_.store_policy() == StorePolicy::kStreamed; }
  /// Casts and scales a run of the tensor into a slot, through the cache or past it.
  void WriteSlot(std::byte* to, const Run& run, bool streamed);
  /// Present members' slots of `chunk`, from element `offset` on, in rank order. With `own`, this
  /// member's contribution is read from there.
  std::span<const void* const> Sources(uint64_t chunk, int64_t offset, const std::byte* own);
  /// Member 0, after each full chunk it consumed: measures it for the chooser.
  void TimeChunk();

  SharedMemoryMember& member_;
  SharedSlots& slots_;
  const CpuKernels& kernels_;
  Status failure_;

  // Of the batch.
  const Batch* batch_ = nullptr;
  DType wire_ = DType::kFloat32;
  int64_t wire_bytes_ = 4;
  ReduceSpec spec_;
  double prescale_ = 1.0;
  bool contributes_ = true;
  bool reads_input_ = false;  // the own shard is reduced straight from the tensor, not from a slot
  std::vector<int> present_;  // positions that contribute, ascending
  std::vector<const void*> sources_;  // of a reduction: room for all members
  SegmentCursor pack_cursor_;
  SegmentCursor out_cursor_;
  int64_t chunk_elements_ = 0;  // most elements of a chunk; variable-size: of a slice
  int64_t step_bytes_ = 0;      // about what a stage of a chunk moves
  // Numbers of chunks, counted from the set's first batch: where the batch begins and ends, and
  // how many this member has packed, reduced and consumed.
  uint64_t first_ = 0;
  uint64_t end_ = 0;
  uint64_t packed_ = 0;
  uint64_t reduced_ = 0;
  uint64_t consumed_ = 0;

 private:
  void RecommendStorePolicy();

  StorePolicyChooser chooser_;
  size_t own_source_ = 0;       // this member's index in present_
  int64_t chunk_ended_ns_ = 0;  // when the last chunk of this batch was consumed; 0: none yet
};

using SharedMemoryFactory = std::unique_ptr<SharedMemoryCollective>(SharedMemoryMember& member,
                                                                    StorePolicyChooser chooser);
SharedMemoryFactory MakeSharedMemoryAllreduce;      // allreduce.cc
SharedMemoryFactory MakeSharedMemoryBroadcast;      // broadcast.cc
SharedMemoryFactory MakeSharedMemoryAllgather;      // allgather.cc
SharedMemoryFactory MakeSharedMemoryReducescatter;  // reducescatter.cc
SharedMemoryFactory MakeSharedMemoryAlltoall;       // alltoall.cc

/// What allgather, reducescatter and alltoall through shared slots have in common: one slice for
/// each pair of members, in one round.
///
/// A slot holds one slice for each member, and each member copies or reduces its own slices from
/// all slots straight into its tensor; there is no second stage. Of n bytes that go in on a rank,
/// and m that come out, it writes n to slots (allgather: once for all readers), reads as many as
/// its peers wrote for it, and writes m.
///
/// Thread safety, invariant and lifetime: as SharedMemoryCollective.
class SharedMemoryVariableSize : public SharedMemoryCollective {
 public:
  using SharedMemoryCollective::SharedMemoryCollective;

 protected:
  /// Writes what this member sends with chunk packed_ to its slot.
  virtual void Pack() = 0;
  /// Before the first chunk is consumed: whether the members agree on what they send each other.
  virtual Status CheckSizes() const { return {}; }
  /// Copies or reduces what this member receives with chunk consumed_ into its tensor.
  virtual void Consume() = 0;

  int64_t Prepare() final;
  bool Advance() final;

  /// Copies slice `to` of chunk packed_ to its position in the own slot.
  void WriteSlice(int to);
  /// Copies what this member sends itself from tensor to tensor.
  void CopyOwnSlice();
  /// Copies to `slice` of the output.
  void CopySlice(Slice slice, const std::byte* from);
  Slice Sent(int to, uint64_t chunk) const;
  Slice Received(int from, uint64_t chunk) const;
  /// Slice number `index` in `member`'s slot of `chunk`.
  const std::byte* SliceInSlot(int member, uint64_t chunk, int index) const;
  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;

 private:
  Partition partition_;
  bool streams_out_ = false;  // the result is written past the cache
};

}  // namespace farandole
