#include "ops/mpi/sharded.h"

namespace farandole {

/// Three cursors, since chunks in different stages stand at different elements of the same tensors.
int64_t MpiSharded::Prepare() {
  plan_.Reset(*batch_);
  contributes_ = plan_.Contributes(my_index());
  pack_cursor_ = reduce_cursor_ = unpack_cursor_ = SegmentCursor(batch_->segments, batch_->dtype);
  return plan_.chunks();
}

/// From each contributor its contribution to the own shard, and from each member that forwards it
/// the result of that member's shard.
Status MpiSharded::PostReceives(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice mine = MyShard(count);
  for (int from = 0; from < members(); ++from) {
    if (from == my_index()) continue;
    if (mine.count > 0 && plan_.Contributes(from)) {
      FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kContribution, from,
                                              ReceiveBuffer(slot, from, mine),
                                              mine.count * element_bytes_));
    }
    const Slice theirs = plan_.ShardOf(from, count);
    if (theirs.count > 0 && plan_.Forwards(from, my_index())) {
      FARANDOLE_RETURN_IF_ERROR(set_->Receive(slot, Round::kResult, from,
                                              slot.result + theirs.begin * element_bytes_,
                                              theirs.count * element_bytes_));
    }
  }
  return Status();
}

/// Packs what peers need of this rank's contribution; a shard that only this rank reduces stays in
/// the tensor until then. Starting after itself, each rank sends to another peer first.
Status MpiSharded::SendContributions(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  PackElements(slot.packed, direct.begin);
  pack_cursor_.Skip(direct.count);
  PackElements(slot.packed + after * element_bytes_, count - after);
  CountCopied((count - direct.count) * element_bytes_);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    const Slice shard = plan_.ShardOf(to, count);
    if (shard.count == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(slot, Round::kContribution, to,
                                         slot.packed + shard.begin * element_bytes_,
                                         shard.count * element_bytes_));
  }
  return Status();
}

void MpiSharded::PackElements(std::byte* to, int64_t count) {
  while (count > 0) {
    const Run run = pack_cursor_.Next(count);
    kernels().Pack(to, travel_, run.in, batch_->dtype, run.count, prescale_);
    to += run.count * element_bytes_;
    count -= run.count;
  }
}

/// ReduceShard runs also where the own shard is empty: an allreduce's cursor has to pass the chunk.
Status MpiSharded::Reduce(int64_t chunk) {
  MpiSlot& slot = set_->SlotOf(chunk);
  const int64_t count = plan_.CountOf(chunk);
  ReduceShard(slot, count);
  return MyShard(count).count > 0 ? SendResults(slot, count) : Status();
}

/// From slot.result, into which the other shards are being received meanwhile: shards do not
/// overlap.
Status MpiSharded::SendResults(MpiSlot& slot, int64_t count) {
  const Slice shard = MyShard(count);
  for (int step = 1; step < members(); ++step) {
    const int to = (my_index() + step) % members();
    if (!plan_.Forwards(my_index(), to)) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(slot, Round::kResult, to,
                                         slot.result + shard.begin * element_bytes_,
                                         shard.count * element_bytes_));
  }
  return Status();
}

/// All of the chunk but the direct shard, which the reduction has written to the tensor.
void MpiSharded::Unpack(int64_t chunk) {
  const int64_t count = plan_.CountOf(chunk);
  const std::byte* from = CompleteChunk(set_->SlotOf(chunk));
  const Slice direct = DirectShard(count);
  const int64_t after = direct.begin + direct.count;
  UnpackElements(from, direct.begin);
  unpack_cursor_.Skip(direct.count);
  UnpackElements(from + after * element_bytes_, count - after);
  CountCopied(count * element_bytes_);
}

void MpiSharded::UnpackElements(const std::byte* from, int64_t count) {
  while (count > 0) {
    const Run run = unpack_cursor_.Next(count);
    if (NeedsCopy(run)) kernels().Unpack(run.out, batch_->dtype, from, travel_, run.count);
    from += run.count * element_bytes_;
    count -= run.count;
  }
}

}  // namespace farandole
