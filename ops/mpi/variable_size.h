// What allgather, reducescatter and alltoall over MPI have in common: one round of messages.
//
// A chunk is one slice from each member to each other (Partition), packed, sent, and copied or
// reduced from the receiver's inbox straight into its tensor; there are no results to send.
#pragma once

#include <cstdint>

#include "ops/cpu/partition.h"
#include "ops/mpi/collective.h"

namespace farandole {

/// Thread safety and lifetime: as MpiCollective.
class MpiVariableSize : public MpiCollective {
 protected:
  /// Before slices of a chunk are sent: what is done once for all receivers.
  virtual void BeforeSends(int64_t chunk) = 0;
  /// The packed slice for `to`.
  virtual const std::byte* Packed(int to, int64_t chunk) { return PackSlice(to, chunk); }
  /// Whether there is a message with the chunk; alike on both ends.
  virtual bool SendsTo(int to, int64_t chunk) const { return partition_.Sent(to, chunk).count > 0; }
  virtual bool ReceivesFrom(int from, int64_t chunk) const {
    return partition_.Received(from, chunk).count > 0;
  }

  /// Packs the slice for `to` to its position in staging.
  const std::byte* PackSlice(int to, int64_t chunk);
  std::byte* PackedSlice(int to, int64_t chunk) const {
    return set_->SlotOf(chunk).packed + to * slice_bytes_;
  }
  /// Copies what this rank sends itself from tensor to tensor.
  void CopyOwnSlice(int64_t chunk);
  /// Copies what others sent with the chunk to the output.
  void CopyReceived(int64_t chunk);
  const std::byte* In(int64_t element) const;
  std::byte* Out(int64_t element) const;

  Partition partition_;
  int64_t slice_bytes_ = 0;  // room for a slice in staging

 private:
  int64_t Prepare() final;
  Status PostReceives(int64_t chunk) final;
  Status SendContributions(int64_t chunk) final;
  void Unpack(int64_t) final {}

  void CopySlice(Slice slice, const std::byte* from);

  bool streams_out_ = false;  // the result is written past the cache
};

}  // namespace farandole
