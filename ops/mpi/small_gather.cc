// Small allreduces and allgathers over MPI.
#include "ops/mpi/collective.h"

namespace farandole {
namespace {

/// Brings all contributions to all members in a few rounds (GatherPlan), a chunk each to the base
/// class, which send no more messages than rounds; then every member reduces them in rank order, or
/// copies them, so that the bits are those of larger batches.
///
/// Of all slots the first one's staging is used: rounds receive one after the other into its
/// inboxes, which have room for all contributions, and send what lies there. What is being sent is
/// never written: later rounds receive behind it.
class MpiSmallGather final : public MpiCollective {
 public:
  MpiSmallGather() { in_rounds_ = true; }

 protected:
  int64_t Prepare() override;
  Status PostReceives(int64_t round) override;
  Status SendContributions(int64_t round) override;
  Status Reduce(int64_t round) override;
  void Unpack(int64_t) override {}

 private:
  std::byte* Gathered(int64_t begin) { return set_->SlotOf(0).inbox + begin; }
  int64_t CountOf(int member) const { return plan_.BlockOf(member).count / element_bytes_; }
  void ReduceAll();
  void CopyAll();

  GatherPlan plan_;
};

int64_t MpiSmallGather::Prepare() {
  plan_.Reset(*batch_);
  contributes_ = true;  // an absent member, too, passes on what it has received
  return plan_.rounds();
}

Status MpiSmallGather::PostReceives(int64_t round) {
  for (int port = 0; port < plan_.ports(); ++port) {
    const GatherPlan::Message message = plan_.Received(round, port);
    if (message.bytes == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Receive(set_->SlotOf(round), Round::kContribution, message.peer,
                                            Gathered(message.begin), message.bytes));
  }
  return Status();
}

Status MpiSmallGather::SendContributions(int64_t round) {
  if (round == 0) {
    SegmentCursor cursor(batch_->segments, batch_->dtype);
    const int64_t count = CountOf(my_index());
    PackElements(cursor, Gathered(0), count);
    CountCopied(count * element_bytes_);
  }
  for (int port = 0; port < plan_.ports(); ++port) {
    const GatherPlan::Message message = plan_.Sent(round, port);
    if (message.bytes == 0) continue;
    FARANDOLE_RETURN_IF_ERROR(set_->Send(set_->SlotOf(round), Round::kContribution, message.peer,
                                         Gathered(message.begin), message.bytes));
  }
  return Status();
}

Status MpiSmallGather::Reduce(int64_t round) {
  if (round + 1 < plan_.rounds()) return Status();
  batch_->kind == OpKind::kAllreduce ? ReduceAll() : CopyAll();
  CountCopied(batch_->count * element_bytes_);
  return Status();
}

void MpiSmallGather::ReduceAll() {
  const std::span<const void*> sources = set_->sources();
  size_t present = 0;
  for (int member = 0; member < members(); ++member) {
    const Slice block = plan_.BlockOf(member);
    if (block.count > 0) sources[present++] = Gathered(block.begin);
  }
  std::byte* const result = set_->SlotOf(0).result;
  kernels().Reduce(result, sources.first(present), batch_->count, Reduction());
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  UnpackElements(cursor, result, batch_->count);
}

void MpiSmallGather::CopyAll() {
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  for (int member = 0; member < members(); ++member) {
    UnpackElements(cursor, Gathered(plan_.BlockOf(member).begin), CountOf(member));
  }
}

}  // namespace

std::unique_ptr<MpiCollective> MakeMpiSmallGather() { return std::make_unique<MpiSmallGather>(); }

}  // namespace farandole
