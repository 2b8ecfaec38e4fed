// Broadcast over messages.
#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// The root sends each other member one shard of a chunk, which that member sends to the others, so
/// that the data leaves the root once (van de Geijn's scatter and allgather). A tiny one goes from
/// the root to every member directly. Nothing is reduced: a contribution is received where the
/// result is sent from.
class P2pBroadcast final : public P2pSharded {
 protected:
  std::byte* ReceiveBuffer(const P2pSlot& slot, int, Slice shard) const override {
    return slot.result + shard.begin * wire_bytes_;
  }
  void ReduceShard(P2pSlot&, int64_t) override {}
  Slice DirectShard(int64_t) const override { return {}; }
  const std::byte* CompleteChunk(const P2pSlot& slot) const override {
    return contributes_ ? slot.packed : slot.result;
  }
};

}  // namespace

std::unique_ptr<P2pCollective> MakeP2pBroadcast() { return std::make_unique<P2pBroadcast>(); }

}  // namespace farandole
