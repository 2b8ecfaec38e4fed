// One batch on its way through the MPI plane, as a resumable state machine.
#pragma once

#include <cstdint>

#include "ops/cpu/batch.h"
#include "ops/cpu/partition.h"
#include "ops/data_plane.h"
#include "ops/mpi/chunk_plan.h"
#include "ops/mpi/mpi_set.h"

namespace farandole {

/// Every chunk passes five stages, each in chunk order: posted (its slot is free, receives are
/// posted), packed (contributions sent), reduced (contributions received and reduced, results
/// sent), unpacked (results received and written to the user's tensors), retired (all sends
/// complete: the slot is free). A few chunks are under way at a time, so that one is packed while
/// another travels.
///
/// Variable-size collectives need one round of messages: a chunk is one slice from each member to
/// each other, packed, sent, and copied or reduced from the receiver's inbox straight into its
/// tensor; there are no results to send. An allgather sends its slice to all members directly: P -
/// 1 messages of one slice from each rank, whose network carries the whole result in.
///
/// It cannot deadlock: no call waits, receives are posted before anything is sent, and the lowest
/// chunk not yet retired on any member needs nothing but messages of chunks that have their slots.
///
/// Thread safety: the baton holder only. Reused for later batches; nothing is allocated then.
class MpiOperation final : public PlaneOperation {
 public:
  /// Attaches to `set` and its queue's end. `batch` stays valid until the end.
  void Begin(const Batch& batch, MpiSet& set);
  /// A failure or Done ends it: it leaves its set's queue.
  Progress Step() override;
  void Abandon() override;

  bool in_use() const { return set_ != nullptr; }

 private:
  /// What is packed, reduced and unpacked before it leaves the L1 cache.
  static constexpr int64_t kInCacheBytes = 8 * 1024;
  enum class Outcome : uint8_t { kNothing, kMoved };

  Progress Advance();
  Result<Outcome> Retire();
  Result<Outcome> Post();
  Result<Outcome> Pack();
  Result<Outcome> Reduce();
  Result<Outcome> Unpack();

  Status PostReceives(int64_t chunk);
  Status SendChunk(int64_t chunk);
  Status SendContributions(MpiSlot& slot, int64_t count);
  Status ReduceChunk(MpiSlot& slot, int64_t count);
  Status SendResults(MpiSlot& slot, int64_t count);
  void UnpackChunk(MpiSlot& slot, int64_t count);
  // Variable-size collectives: mpi_operation_variable_size.cc.
  void BeginVariableSize();
  Status PostSlices(int64_t chunk);
  Status SendSlices(int64_t chunk);
  bool EndsEmpty(std::span<const int64_t> splits, int member, int64_t chunk) const;
  /// Whether what came with a chunk is what was expected.
  Status CheckSlices(int64_t chunk);
  const std::byte* PackSlice(int to, int64_t chunk);
  void TakeSlices(int64_t chunk);
  void CopySlice(Slice slice, const std::byte* from);
  void ReduceOwnSlice(int64_t chunk);
  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;

  void PackElements(std::byte* to, int64_t count);
  void UnpackElements(const std::byte* from, int64_t count);
  void ReduceWholeChunk(MpiSlot& slot, int64_t count);
  void ReduceOwnShard(MpiSlot& slot, Shard shard, int64_t count);
  void ReduceRun(MpiSlot& slot, Shard shard, int64_t at, const Run& run);
  /// `own` is where this rank's contribution to the elements from `at` on lies.
  std::span<const void* const> Sources(const MpiSlot& slot, int64_t at, const void* own);
  Shard MyShard(int64_t count) const { return plan_.ShardOf(set_->my_index(), count); }
  /// The shard of a chunk that goes from the tensor through the reduction and back without passing
  /// through staging as a whole.
  Shard DirectShard(int64_t count) const {
    return plan_.ReducesOwnShard() ? MyShard(count) : Shard{};
  }
  Progress Wait();
  void End();

  const Batch* batch_ = nullptr;
  MpiSet* set_ = nullptr;
  MpiOperation* next_ = nullptr;  // in the set's queue
  bool variable_size_ = false;    // which of the two plans is the batch's
  ChunkPlan plan_;
  Partition partition_;
  int64_t chunks_ = 0;
  int64_t slice_bytes_ = 0;   // variable_size_: room for a slice in staging
  bool streams_out_ = false;  // variable_size_: the result is written past the cache
  SoloRun solo_;
  SegmentCursor pack_cursor_;
  SegmentCursor reduce_cursor_;
  SegmentCursor unpack_cursor_;
  DType travel_ = DType::kFloat32;
  int64_t element_bytes_ = 4;
  bool contributes_ = false;
  bool casts_ = false;  // contributions are rounded to another type, or scaled, before they travel
  // Chunks that have passed each stage.
  int64_t posted_ = 0;
  int64_t packed_ = 0;
  int64_t reduced_ = 0;
  int64_t unpacked_ = 0;
  int64_t retired_ = 0;
  int64_t idle_steps_ = 0;
};

}  // namespace farandole
