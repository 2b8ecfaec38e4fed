// Allgather over messages.
#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// Each rank packs a slice of its split once and sends it to all others directly: P - 1 messages,
/// and the network of each rank carries the whole result in.
class P2pAllgather final : public P2pVariableSize {
 protected:
  void BeforeSends(int64_t chunk) override {
    CopyOwnSlice(chunk);
    (void)PackSlice(kForAll, chunk);  // Packed returns where it is
  }
  const std::byte* Packed(int, int64_t chunk) override { return PackedSlice(kForAll, chunk); }
  Status Reduce(int64_t chunk) override {
    CopyReceived(chunk);
    return Status();
  }

 private:
  /// Index in staging of the slice that all members get. Partition gives the same one to each.
  static constexpr int kForAll = 0;
};

}  // namespace

std::unique_ptr<P2pCollective> MakeP2pAllgather() { return std::make_unique<P2pAllgather>(); }

}  // namespace farandole
