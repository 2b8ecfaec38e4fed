// Allreduce over messages; small ones: small_gather.cc.
#include <algorithm>

#include "ops/cpu/quantize.h"
#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// Scatters contributions to the owners of shards, reduces, gathers the results: 2 (P-1)/P of the
/// data leaves each rank.
/// Source of scatter + allgather: Rabenseifner, "Optimization of collective reduction operations",
/// ICCS 2004, doi:10.1007/978-3-540-24685-5_1.
class P2pAllreduce : public P2pSharded {
 protected:
  std::byte* ReceiveBuffer(const P2pSlot& slot, int from, Slice) const override {
    return Inbox(slot, from);
  }
  void ReduceShard(P2pSlot& slot, int64_t count) override;
  Slice DirectShard(int64_t count) const override { return MyShard(count); }
  const std::byte* CompleteChunk(const P2pSlot& slot) const override { return slot.result; }

 private:
  void ReduceRun(P2pSlot& slot, Slice shard, int64_t at, const Run& run);
};

/// kInCacheBytes at a time.
void P2pAllreduce::ReduceShard(P2pSlot& slot, int64_t count) {
  const Slice shard = MyShard(count);
  const int64_t end = shard.begin + shard.count;
  reduce_cursor_.Skip(shard.begin);
  for (int64_t at = shard.begin; at < end;) {
    const Run run = reduce_cursor_.Next(std::min(kInCacheBytes / wire_bytes_, end - at));
    ReduceRun(slot, shard, at, run);
    at += run.count;
  }
  reduce_cursor_.Skip(count - end);
}

/// Elements of the own shard from `at` on: from the tensor to the result that is sent, and back to
/// the tensor, while they are in the cache.
void P2pAllreduce::ReduceRun(P2pSlot& slot, Slice shard, int64_t at, const Run& run) {
  const void* own = run.in;
  if (contributes_ && casts_) {
    std::byte* const packed = slot.packed + at * wire_bytes_;
    kernels().Pack(packed, wire_, run.in, batch_->dtype, run.count, prescale_);
    own = packed;
  }
  std::byte* const result = slot.result + at * wire_bytes_;
  kernels().Reduce(result, Sources(slot, at - shard.begin, own), run.count, spec_);
  if (run.out != nullptr) {
    kernels().Unpack(run.out, batch_->dtype, result, wire_, run.count);
  }
}

/// The same, quantized: ops/cpu/quantize.h. Shards begin with a block, so that the messages of a
/// chunk lie end to end.
class P2pQuantized final : public P2pAllreduce {
 protected:
  void ReduceShard(P2pSlot& slot, int64_t count) override;
  int64_t BytesOf(int64_t count) const override { return QuantizedBytes(count); }
  void PackElements(SegmentCursor& cursor, std::byte* to, int64_t count) override {
    QuantizeRuns(kernels(), *batch_, cursor, to, count);
  }
  void UnpackElements(SegmentCursor& cursor, const std::byte* from, int64_t count) override {
    DequantizeRuns(kernels(), *batch_, cursor, from, count);
  }
};

void P2pQuantized::ReduceShard(P2pSlot& slot, int64_t count) {
  const Slice shard = MyShard(count);
  const auto sources = CpuCollective::Sources([&](int member) -> const void* {
    return member == my_index() ? nullptr : Inbox(slot, member);
  });
  reduce_cursor_.Skip(shard.begin);
  ReduceQuantized(kernels(), *batch_, reduce_cursor_, sources,
                  slot.result + QuantizedBytes(shard.begin), shard.count);
  reduce_cursor_.Skip(count - shard.begin - shard.count);
}

}  // namespace

std::unique_ptr<P2pCollective> MakeP2pQuantized() { return std::make_unique<P2pQuantized>(); }
std::unique_ptr<P2pCollective> MakeP2pAllreduce() { return std::make_unique<P2pAllreduce>(); }

}  // namespace farandole
