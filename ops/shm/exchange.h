// The shared-memory collectives: how the members of a set on one host run a batch through
// SharedSlots.
//
// A batch is divided into chunks of at most a slot. Of every chunk each member owns a shard of
// about 1/P. It packs its contribution into its slot, reduces its shard from all present members'
// slots in rank order, leaves the result in its own slot where nobody reads its contribution, and
// copies all shards' results out. Chunks are pipelined over the slots; no barrier is ever crossed.
// Batches of at most 16 KiB go one-shot: everybody reduces everything, in the same order, to the
// same bits.
//
// Variable-size collectives need one round: a slot holds one slice for each member, and each member
// reads its own slices from all slots, copying or reducing them straight into its tensor. Of n
// bytes that go in on a rank, and m that come out, it writes n to slots (allgather: once for all
// readers), reads as many as its peers wrote for it, and writes m.
//
// Idea: shared-memory reduce-scatter and allgather, as in Jain et al., "Framework for Scalable
// Intra-Node Collective Operations using Shared Memory", SC18, doi:10.1109/SC.2018.00032.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/clock.h"
#include "ops/cpu/batch.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/partition.h"
#include "ops/data_plane.h"
#include "ops/shm/memory.h"
#include "ops/shm/store_policy.h"

namespace farandole {

/// One member's side of a set's batches, one batch after the other.
///
/// Thread safety: one thread. Invariant: every member runs the same batches in the same order.
/// Lifetime: slots and kernels outlive it.
class Exchange {
 public:
  enum class State : uint8_t { kMoved, kWaiting, kDone, kFailed };

  /// @param clock    Times chunks for the chooser.
  /// @param chooser  As it says, slots are written, at first; only member 0's is heard.
  Exchange(SharedSlots slots, const CpuKernels& kernels, const Clock& clock,
           StorePolicyChooser chooser);

  /// Takes on the next batch; the last one is done. `batch` has passed CheckBatch and stays valid
  /// until Step said kDone.
  void Begin(const Batch& batch);
  /// Moves about 256 KiB, if peers let it. After kWaiting a peer's ring says when to ask again;
  /// after kFailed nothing more may run.
  State Step();
  /// After kFailed.
  const Status& failure() const { return failure_; }

 private:
  enum class Mode : uint8_t { kSharded, kOneShot, kBroadcast, kVariableSize };
  /// What is reduced and copied on before it leaves the L1 cache.
  static constexpr int64_t kInCacheBytes = 8 * 1024;
  /// Where in a slot the slice lies that all members read: an allgather's.
  static constexpr int kForAll = 0;
  /// Elements [begin, end) of a chunk or of a tensor.
  struct Range {
    int64_t begin = 0;
    int64_t end = 0;
  };

  bool Advance();
  bool AdvanceSharded();
  bool AdvanceOneShot();
  bool AdvanceBroadcast();
  bool AdvanceVariableSize();

  bool SlotIsFree();
  void PackChunk();
  void PackRange(std::byte* slot, Range range);
  void WriteSlot(std::byte* to, const Run& run);
  void ReduceShard();
  void ReduceRun(std::byte* to, int64_t at, const Run& own);
  StorePolicyChooser& chooser() { return choosers_[static_cast<size_t>(batch_->kind)]; }
  void TimeChunk();
  void RecommendStorePolicy();
  void CopyResultOut();
  void ReduceWholeBatch();
  void ForwardFromRoot();
  void UnpackRange(const std::byte* slot, Range range);

  // Variable-size collectives: exchange_variable_size.cc.
  void BeginVariableSize();
  void WriteSlices();
  void WriteSlice(int to);
  void CopyOwnSlice();
  /// An alltoall's split is known to its two members alone: whether they know the same.
  Status CheckSizes() const;
  void TakeSlices();
  void CopySlice(Slice slice, const std::byte* from);
  void ReduceOwnSlice();
  Slice Sent(int to, uint64_t chunk) const;
  Slice Received(int from, uint64_t chunk) const;
  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;

  int64_t ChunkCount(uint64_t chunk) const;
  Range ShardOf(int member, int64_t chunk_count) const;
  /// Present members' slots of `chunk`, from element `offset` on, in rank order.
  std::span<const void*> Sources(uint64_t chunk, int64_t offset);

  SharedSlots slots_;
  const CpuKernels& kernels_;
  const Clock& clock_;
  /// By OpKind: their chunks take unlike times.
  std::array<StorePolicyChooser, static_cast<size_t>(OpKind::kAlltoall) + 1> choosers_;

  Status failure_;
  const Batch* batch_ = nullptr;
  Mode mode_ = Mode::kSharded;
  DType wire_ = DType::kFloat32;
  int64_t wire_bytes_ = 4;
  ReduceSpec spec_;
  double prescale_ = 1.0;
  bool contributes_ = true;
  bool reads_input_ = false;  // the own shard is reduced straight from the tensor, not from a slot
  size_t own_source_ = 0;     // this member's place among those present
  std::vector<int> present_;  // positions that contribute, ascending
  std::vector<const void*> sources_;
  SegmentCursor pack_cursor_;
  SegmentCursor reduce_cursor_;
  SegmentCursor out_cursor_;

  int64_t chunk_elements_ = 0;  // of a batch; of one slice in variable-size collectives
  int64_t step_bytes_ = 0;      // about what a stage of a chunk moves
  Partition partition_;         // kVariableSize
  bool streams_out_ = false;    // kVariableSize: the result is written past the cache
  uint64_t first_ = 0;          // numbers of chunks, counted from the set's first batch
  uint64_t end_ = 0;
  uint64_t packed_ = 0;
  uint64_t reduced_ = 0;
  uint64_t consumed_ = 0;
  int64_t chunk_ended_ns_ = 0;      // when the last chunk of this batch was done; 0: none yet
  std::vector<std::byte> scratch_;  // values on their way to a tensor or past the cache
};

}  // namespace farandole
