// Alltoall over messages.
#include <string>

#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// Each rank sends every other one its split, a slice per chunk. A split is known to its two ranks
/// alone. Its last message is the first that is not full, be it empty, so that every message is
/// expected by its receiver, which sees from the length if the two disagree.
class P2pAlltoall final : public P2pVariableSize {
 protected:
  void BeforeSends(int64_t chunk) override { CopyOwnSlice(chunk); }
  bool SendsTo(int to, int64_t chunk) const override {
    return P2pVariableSize::SendsTo(to, chunk) || EndsEmpty(batch_->sends, to, chunk);
  }
  bool ReceivesFrom(int from, int64_t chunk) const override {
    return P2pVariableSize::ReceivesFrom(from, chunk) || EndsEmpty(batch_->receives, from, chunk);
  }
  Status Reduce(int64_t chunk) override;

 private:
  /// Whether an empty message ends the split: its slices so far were full.
  bool EndsEmpty(std::span<const int64_t> splits, int member, int64_t chunk) const {
    return splits[static_cast<size_t>(member)] == chunk * (slice_bytes_ / wire_bytes_);
  }
  Status CheckLengths(int64_t chunk) const;
};

Status P2pAlltoall::Reduce(int64_t chunk) {
  FARANDOLE_RETURN_IF_ERROR(CheckLengths(chunk));
  CopyReceived(chunk);
  return Status();
}

/// Compares the lengths of the messages with the splits that this rank expects.
Status P2pAlltoall::CheckLengths(int64_t chunk) const {
  for (int from = 0; from < members(); ++from) {
    if (from == my_index() || !ReceivesFrom(from, chunk)) continue;
    const int64_t received = set().BytesFrom(from);
    if (received == slices_.Received(from, chunk).count * wire_bytes_) continue;
    const std::string sent = std::to_string(chunk * slice_bytes_ + received);
    return UnlikeSplits(*batch_, from, received == slice_bytes_ ? "at least " + sent : sent);
  }
  return Status();
}

}  // namespace

std::unique_ptr<P2pCollective> MakeP2pAlltoall() { return std::make_unique<P2pAlltoall>(); }

}  // namespace farandole
