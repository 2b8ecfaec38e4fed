// Small allreduces and allgathers over messages.
#include "ops/p2p/collective.h"

namespace farandole {
namespace {

/// Brings all contributions to all members in a few rounds (GatherPlan), a chunk each to the base
/// class, which send no more messages than rounds; then every member reduces them in rank order, or
/// copies them, so that the bits are those of larger batches.
///
/// Of all slots the first one's staging is used: rounds receive one after the other into its
/// inboxes, which have room for all contributions, and send what lies there. What is being sent is
/// never written: later rounds receive behind it.
class P2pSmallGather final : public P2pCollective {
 public:
  P2pSmallGather() { in_rounds_ = true; }

 protected:
  int64_t Prepare() override;
  Status PostReceives(int64_t round) override;
  Status SendContributions(int64_t round) override;
  Status Reduce(int64_t round) override;
  void Unpack(int64_t) override {}

 private:
  std::byte* Gathered(int64_t begin) { return set().SlotOf(0).inbox + begin; }
  int64_t CountOf(int member) const { return plan_.BlockOf(member).count / wire_bytes_; }
  void ReduceAll();
  void CopyAll();

  GatherPlan plan_;
};

int64_t P2pSmallGather::Prepare() {
  plan_.Reset(*batch_);
  contributes_ = true;  // an absent member, too, passes on what it has received
  return plan_.rounds();
}

Status P2pSmallGather::PostReceives(int64_t round) {
  for (int port = 0; port < plan_.ports(); ++port) {
    const GatherPlan::Message message = plan_.Received(round, port);
    if (message.bytes == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Receive(set().SlotOf(round), Round::kContribution, message.peer,
                                            Gathered(message.begin), message.bytes));
  }
  return Status();
}

Status P2pSmallGather::SendContributions(int64_t round) {
  if (round == 0) {
    SegmentCursor cursor(batch_->segments, batch_->dtype);
    const int64_t count = CountOf(my_index());
    PackRuns(kernels(), *batch_, cursor, Gathered(0), count);
    CountCopied(count * wire_bytes_);
  }
  for (int port = 0; port < plan_.ports(); ++port) {
    const GatherPlan::Message message = plan_.Sent(round, port);
    if (message.bytes == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set().Send(set().SlotOf(round), Round::kContribution, message.peer,
                                         Gathered(message.begin), message.bytes));
  }
  return Status();
}

Status P2pSmallGather::Reduce(int64_t round) {
  if (round + 1 < plan_.rounds()) return Status();
  batch_->kind == OpKind::kAllreduce ? ReduceAll() : CopyAll();
  CountCopied(batch_->count * wire_bytes_);
  return Status();
}

void P2pSmallGather::ReduceAll() {
  const auto where = [this](int member) { return Gathered(plan_.BlockOf(member).begin); };
  std::byte* const result = set().SlotOf(0).result;
  kernels().Reduce(result, CpuCollective::Sources(where), batch_->count, spec_);
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  UnpackRuns(kernels(), *batch_, cursor, result, batch_->count);
}

void P2pSmallGather::CopyAll() {
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  for (int member = 0; member < members(); ++member) {
    UnpackRuns(kernels(), *batch_, cursor, Gathered(plan_.BlockOf(member).begin), CountOf(member));
  }
}

}  // namespace

std::unique_ptr<P2pCollective> MakeP2pSmallGather() { return std::make_unique<P2pSmallGather>(); }

}  // namespace farandole
