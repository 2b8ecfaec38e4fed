// The collectives of the MPI plane: one batch as a resumable state machine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "ops/cpu/batch.h"
#include "ops/cpu/partition.h"
#include "ops/data_plane.h"
#include "ops/mpi/staging.h"

namespace farandole {

/// Every chunk passes five stages, each in chunk order: posted (its slot is free, receives are
/// posted), packed (contributions sent), reduced (contributions received and reduced, results
/// sent), unpacked (results received and written to the user's tensors), retired (all sends
/// complete: the slot is free). A few chunks are in flight at a time, so that one is packed while
/// another travels. A subclass says what is sent, received and reduced.
///
/// It cannot deadlock: no call waits, receives are posted before anything is sent, and the lowest
/// chunk not yet retired on any member needs nothing but messages of chunks that have their slots.
///
/// Thread safety: the holder of the engine lock only. Reused for later batches; nothing is
/// allocated then.
class MpiCollective : public PlaneOperation {
 public:
  /// Attaches to `set` and its queue's end. `batch` stays valid until the end.
  void Begin(const Batch& batch, MpiSet& set);
  /// A failure or Done ends it: it leaves its set's queue.
  Progress Step() final;
  void Abandon() final;

  bool in_use() const { return set_ != nullptr; }

 protected:
  /// What is packed, reduced and unpacked before it leaves the L1 cache.
  static constexpr int64_t kInCacheBytes = 8 * 1024;

  /// Divides the batch. @return The number of chunks.
  virtual int64_t Prepare() = 0;
  /// Posts all receives of a chunk.
  virtual Status PostReceives(int64_t chunk) = 0;
  /// Packs and sends this member's contribution; not called if it has none.
  virtual Status SendContributions(int64_t chunk) = 0;
  /// All contributions are received: reduces or copies them, and sends results.
  virtual Status Reduce(int64_t chunk) = 0;
  /// All results are received: writes them to the tensors.
  virtual void Unpack(int64_t chunk) = 0;

  int my_index() const { return set_->my_index(); }
  int members() const { return set_->members(); }
  const CpuKernels& kernels() const { return *set_->bulk().kernels; }
  void CountCopied(int64_t bytes) const { set_->bulk().Count(Counter::kBytesCopied, bytes); }
  /// Where contributions from `member` are received.
  std::byte* Inbox(const MpiSlot& slot, int member) const {
    return slot.inbox + member * set_->inbox_bytes();
  }
  /// Present members' contributions from element `at` of the inboxes on, in rank order; this rank's
  /// own lies at `own`.
  std::span<const void* const> Sources(const MpiSlot& slot, int64_t at, const void* own);
  ReduceSpec Reduction() const { return {travel_, batch_->op, members(), batch_->postscale}; }

  const Batch* batch_ = nullptr;
  MpiSet* set_ = nullptr;
  DType travel_ = DType::kFloat32;  // element type in messages
  int64_t element_bytes_ = 4;       // its size
  double prescale_ = 1.0;
  bool contributes_ = false;
  bool casts_ = false;  // contributions are rounded to another type, or scaled, before they travel

 private:
  enum class Outcome : uint8_t { kNothing, kMoved };

  Progress Advance();
  Result<Outcome> RetireStage();
  Result<Outcome> PostStage();
  Result<Outcome> PackStage();
  Result<Outcome> ReduceStage();
  Result<Outcome> UnpackStage();
  Progress Wait();
  void End();

  MpiCollective* next_ = nullptr;  // in the set's queue
  SoloRun solo_;                   // of a set with one member
  int64_t chunks_ = 0;
  // Chunks that have passed each stage.
  int64_t posted_ = 0;
  int64_t packed_ = 0;
  int64_t reduced_ = 0;
  int64_t unpacked_ = 0;
  int64_t retired_ = 0;
  int64_t idle_steps_ = 0;
};

std::unique_ptr<MpiCollective> MakeMpiAllreduce();      // allreduce.cc
std::unique_ptr<MpiCollective> MakeMpiBroadcast();      // broadcast.cc
std::unique_ptr<MpiCollective> MakeMpiAllgather();      // allgather.cc
std::unique_ptr<MpiCollective> MakeMpiReducescatter();  // reducescatter.cc
std::unique_ptr<MpiCollective> MakeMpiAlltoall();       // alltoall.cc

}  // namespace farandole
