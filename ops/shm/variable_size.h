// What allgather, reducescatter and alltoall through shared slots have in common: one slice for
// each pair of members, in one round.
//
// A slot holds one slice for each member, and each member copies or reduces its own slices from all
// slots straight into its tensor; there is no second stage. Of n bytes that go in on a rank, and m
// that come out, it writes n to slots (allgather: once for all readers), reads as many as its peers
// wrote for it, and writes m.
#pragma once

#include "ops/cpu/partition.h"
#include "ops/shm/collective.h"

namespace farandole {

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
