// What the collectives of all CPU planes have in common: the queue of a process set, what follows
// from a batch, and the slices of a variable-size one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/counters.h"
#include "core/doorbell.h"
#include "core/status.h"
#include "ops/cpu/batch.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/partition.h"
#include "ops/data_plane.h"

namespace farandole {

class CpuCollective;

/// A process set of a plane on one rank. Its batches run one after the other.
struct CpuSet {
  /// @param counts  May be nullptr.
  CpuSet(uint32_t set, std::span<const int> members_ranks, int index, const CpuKernels& cpu,
         Counters* counts = nullptr)
      : uid(set),
        ranks(members_ranks.begin(), members_ranks.end()),
        my_index(index),
        kernels(cpu),
        counters(counts) {}
  virtual ~CpuSet() = default;
  CpuSet(const CpuSet&) = delete;
  CpuSet& operator=(const CpuSet&) = delete;

  int members() const { return static_cast<int>(ranks.size()); }
  void Count(Counter counter, int64_t n) const {
    if (counters != nullptr) counters->Add(counter, n);
  }
  /// Of a batch that may not start or go on.
  Status Broken() const {
    return Aborted("an earlier batch of process set " + std::to_string(uid) +
                   " failed or was abandoned");
  }

  const uint32_t uid;
  const std::vector<int> ranks;
  const int my_index;
  const CpuKernels& kernels;
  Counters* const counters;
  /// Of this rank, rung when a batch ends and the next one may run; nullptr: the engine asks again.
  Doorbell* bell = nullptr;
  std::vector<CpuCollective*> queue;  ///< Batches started and not ended; the first one runs.
  /// By a failure or an Abandon, after which members disagree about what comes next; for good.
  bool is_broken = false;
};

/// The sets of one plane. Thread safety: none.
template <class Set>
class CpuSets {
 public:
  Set* Find(uint32_t uid) const {
    const auto found = sets_.find(uid);
    return found == sets_.end() ? nullptr : found->second.get();
  }
  /// The set of a batch that may start. @return As DataPlane::Start.
  Result<Set*> For(const Batch& batch) const {
    Set* const set = Find(batch.set);
    const std::string which = " process set " + std::to_string(batch.set);
    if (set == nullptr) return Internal("batch for unknown" + which);
    if (batch.my_index != set->my_index || batch.ranks.size() != set->ranks.size()) {
      return Internal("batch names other members than" + which);
    }
    if (set->is_broken) return set->Broken();
    FARANDOLE_RETURN_IF_ERROR(CheckBatch(batch));
    return set;
  }
  void Add(std::unique_ptr<Set> set) { sets_[set->uid] = std::move(set); }
  void Remove(uint32_t uid) { sets_.erase(uid); }
  auto begin() const { return sets_.begin(); }
  auto end() const { return sets_.end(); }

 private:
  std::map<uint32_t, std::unique_ptr<Set>> sets_;  // by uid, and so in the order added
};

/// One batch of a set, from its place in the queue to its end. A subclass runs it; that of a set
/// with one member runs here.
///
/// Thread safety: the holder of the engine lock only. Reused for later batches, also of other sets;
/// nothing is allocated then. Lifetime: until the end in `set.queue`, afterwards in `pool`.
class CpuCollective : public PlaneOperation {
 public:
  using Pool = ReusePool<CpuCollective>;

  /// Queues a checked batch, which stays valid until the end. @return This.
  PlaneOperation* Enqueue(const Batch& batch, CpuSet& set, Pool& pool);
  Progress Step() final;
  void Abandon() override;

 protected:
  /// What is packed, reduced and unpacked before it leaves the L1 cache.
  static constexpr int64_t kInCacheBytes = 8 * 1024;
  /// Where nothing rings, the engine asks again after so long.
  static constexpr int64_t kGentlePollNs = 50'000;

  /// With the first step, when the batches before have ended.
  virtual void Begin() = 0;
  /// Works about as long as one chunk takes. Done or Failed ends the batch.
  virtual Progress Advance() = 0;
  /// After a failure or an Abandon: releases what is still in use.
  virtual void Cancel() {}

  int my_index() const { return set_->my_index; }
  int members() const { return set_->members(); }
  const CpuKernels& kernels() const { return set_->kernels; }
  /// Present members' contributions, in rank order, which `spec_` counts on: that of `member` is at
  /// `where(member)`.
  template <class Where>
  std::span<const void* const> Sources(Where where) {
    sources_.clear();
    for (const int member : present_) sources_.push_back(where(member));
    return sources_;
  }
  /// Reduces straight into the tensor, or, where its type is not that of the wire, through
  /// `scratch`.
  void ReduceInto(std::byte* out, std::byte* scratch, std::span<const void* const> sources,
                  int64_t count) const;

  CpuSet* set_ = nullptr;  // nullptr: not in use

  // Of the batch.
  const Batch* batch_ = nullptr;
  DType wire_ = DType::kFloat32;
  int64_t wire_bytes_ = 4;  // of an element
  ReduceSpec spec_;
  double prescale_ = 1.0;
  bool casts_ = false;        // contributions are rounded to another type, or scaled
  bool contributes_ = false;  // this member does
  std::vector<int> present_;  // indices of members that contribute, ascending
  Status failure_;            // if set, Advance has failed, whatever it returns

 private:
  void Describe();
  void Break();
  void Leave();

  Pool* pool_ = nullptr;
  bool has_begun_ = false;
  SoloRun solo_;
  std::vector<const void*> sources_;
  std::vector<uint8_t> merges_;  // of spec_
};

/// The slices of a variable-size collective, and the tensors of this rank that they are part of.
///
/// Thread safety: none. Lifetime: from one Begin to the next the batch outlives it.
class SliceCopier : public Partition {
 public:
  /// As Partition::Reset, but keeps the batch.
  void Begin(const Batch& batch, int64_t slice_elements);

  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;
  bool TakesResult() const { return batch_->segments[0].out != nullptr; }
  /// Copies to `slice` of the output, unless this rank drops it. @return The bytes copied.
  int64_t Copy(const CpuKernels& kernels, Slice slice, const std::byte* from) const;
  /// What this rank sends itself with a chunk, from tensor to tensor. @return As Copy.
  int64_t CopyOwn(const CpuKernels& kernels, int64_t chunk) const;

 private:
  const Batch* batch_ = nullptr;
  bool streams_ = false;  // the result is written past the cache
};

/// Of a receiver whose split, of `expected` elements, is not what `from` sends: `sent`, say "16" or
/// "at least 16", bytes.
Status UnlikeSplits(const Batch& batch, int from, const std::string& sent);

}  // namespace farandole
