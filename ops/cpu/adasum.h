// Adasum: an allreduce that adds what is orthogonal and averages what is parallel.
//
//   adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
//
// The factor of a vector that is zero is 1. More than two are combined in pairs along a binary
// tree over the ranks that contribute, in rank order; an odd one out passes to the next level.
// Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021,
// arXiv:2006.02924. The tree there halves vectors between pairs of ranks, which takes a power of
// two; here every rank combines its shard of all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/status.h"
#include "ops/cpu/batch.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/partition.h"
#include "ops/data_plane.h"

namespace farandole {

/// Runs one batch as collectives of a CPU plane, one after the other:
///
///   alltoall    each rank gets its shard of every contribution
///   allreduce   for each level of the tree: the scalar products of its pairs, summed over shards
///   allgather   of the shards of the result
///
/// A tensor is a vector of its own, and so is each segment of a batch. Its shards are 1/size of it,
/// so that a result does not depend on what else is in the batch. All ranks send about as many
/// bytes as in an allreduce, whether they contribute or not.
///
/// Result contract, beyond that of `class DataPlane`: contributions are scaled by `prescale` and
/// rounded to `wire`; scalar products are taken in double; vectors between the levels are float
/// (double for a float64 wire); the last one is multiplied by `postscale` and rounded once to
/// `wire`. Where a single rank contributes its contribution is the result, as in a sum. NaN or an
/// infinity anywhere makes the whole tensor NaN; a square that overflows double (float64 alone)
/// may.
///
/// Memory: about as much as the batch, twice that where tensors are packed, and four times where
/// they are widened too. Buffers of up to kKeptBytes are kept for the next batch.
/// Thread safety: the holder of the engine lock only. Invariant: between Begin and the end no other
/// batch of the set is started on the plane. Lifetime: reused for one batch after the other.
class AdasumAllreduce final : public PlaneOperation {
 public:
  static constexpr int64_t kKeptBytes = int64_t{256} << 20;

  explicit AdasumAllreduce(const CpuKernels& kernels = BestCpuKernels()) : kernels_(kernels) {}

  /// `plane` has the batch's set; it and `batch`, an allreduce by kAdasum, stay valid until the
  /// end.
  /// @return What the plane's Start returns; ResourceExhausted if there is no memory;
  /// InvalidArgument for a dtype that is no float.
  Status Begin(DataPlane& plane, const Batch& batch);
  Progress Step() override;
  void Abandon() override;

 private:
  enum class Phase : uint8_t {
    kPack,      // contributions, as shards end to end
    kScatter,   // alltoall
    kWiden,     // to float
    kMultiply,  // pairs of a level: scalar products on this shard
    kAddUp,     // allreduce
    kCombine,   // pairs of a level
    kNarrow,    // the result, to the wire type
    kGather,    // allgather
    kUnpack,
    kDone
  };
  /// Some elements of one segment that lie in one shard.
  struct Block {
    int64_t outer = 0;  // of what is walked: a member, a contribution or a pair
    size_t segment = 0;
    Slice slice;     // of the segment
    int64_t at = 0;  // in the shard
  };
  /// Memory without initial values.
  class Buffer {
   public:
    Status Reserve(int64_t bytes);
    void Trim();  // to kKeptBytes, or nothing
    std::byte* data() const { return memory_.get(); }

   private:
    std::unique_ptr<std::byte[]> memory_;
    int64_t bytes_ = 0;
  };

  Status Reserve();
  /// Enters the phase after this one. @return Errors of starting a collective.
  Status NextPhase();
  void WalkAgain(int64_t outers);
  bool NextBlock(Block* block);
  /// About a chunk of the phase's work. @return whether the phase is complete.
  bool WorkOnBlocks();
  void WorkOn(const Block& block);
  Status StartScatter();
  Status Start(OpKind kind, const void* in, void* out, int64_t count, DType dtype);
  void End();

  Slice ShardOf(int64_t count, int64_t member) const;
  int64_t ShardElements() const { return shards_[static_cast<size_t>(batch_->my_index)]; }
  std::byte* Packed(int64_t member, int64_t at) const;
  std::byte* Received(int64_t contribution, int64_t at) const;
  std::byte* Value(int64_t contribution, int64_t at) const;
  ScalarProducts& ProductsOf(const Block& block);
  int64_t Pairs() const;

  const CpuKernels& kernels_;
  DataPlane* plane_ = nullptr;
  const Batch* batch_ = nullptr;
  InnerBatch inner_;  // the collective of this phase, if it is one
  Phase phase_ = Phase::kDone;

  DType values_dtype_ = DType::kFloat32;  // between the levels
  bool widens_ = false;                   // it is not the wire type
  bool reads_input_ = false;              // shards lie end to end in the tensor: nothing is packed
  bool writes_output_ = false;            // likewise, nothing is unpacked
  bool takes_result_ = false;
  int64_t contributions_ = 0;
  int64_t stride_ = 1;           // contributions i and i + stride_ are a pair of this level
  std::vector<int64_t> shards_;  // elements, by member
  std::vector<int64_t> starts_;  // where each begins in packed_, likewise
  std::vector<ScalarProducts> products_;  // by pair and segment
  Buffer packed_;                         // all shards of this rank's tensors, in the wire type
  Buffer received_;                       // this rank's shard of every contribution, end to end
  Buffer widened_;                        // likewise, where widens_

  // Of the walk over the segments.
  int64_t outers_ = 0;
  Block next_;
  int64_t done_ = 0;  // elements of the segment's slice

  // Of the inner collective.
  std::vector<int64_t> sends_;
  std::vector<int64_t> receives_;
};

}  // namespace farandole
