#include "coordinator/engine/gradient_buckets.h"

#include <algorithm>
#include <utility>

namespace farandole {

// First the last group, from the end of the order backwards; then the others, from its beginning.
// The tensor that brings a group to `group_bytes` closes it, so a group exceeds that by less than
// its last tensor.
std::vector<std::vector<int32_t>> FormGroups(std::span<const int32_t> order,
                                             std::span<const int64_t> bytes, int64_t group_bytes) {
  auto size = [&](size_t i) { return bytes[static_cast<size_t>(order[i])]; };
  size_t tail = order.size();
  int64_t tail_bytes = 0;
  while (tail > 0 && (tail == order.size() || tail_bytes + size(tail - 1) <= group_bytes / 8)) {
    tail_bytes += size(--tail);
  }
  std::vector<std::vector<int32_t>> groups;
  int64_t filled = group_bytes;
  for (size_t i = 0; i < tail; ++i) {
    if (filled >= group_bytes) {
      groups.emplace_back();
      filled = 0;
    }
    groups.back().push_back(order[i]);
    filled += size(i);
  }
  if (tail < order.size())
    groups.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(tail), order.end());
  return groups;
}

GradientBuckets::GradientBuckets(Engine& engine, Options options,
                                 std::vector<TensorSignature> tensors)
    : engine_(engine),
      options_(std::move(options)),
      positions_(tensors.size()),
      marked_(tensors.size()),
      votes_(tensors.size()),
      skipped_(tensors.size()) {
  SetTensors(std::move(tensors));
}

void GradientBuckets::SetTensors(std::vector<TensorSignature> tensors) {
  tensors_ = std::move(tensors);
  bytes_.clear();
  for (const TensorSignature& tensor : tensors_)
    bytes_.push_back(tensor.Count() * SizeOf(tensor.dtype));
}

// The groups are kept. If each rank formed them again from its own sizes, ranks that disagree would
// have different groups and wait for each other, where they now get a Mismatch.
Status GradientBuckets::Redefine(std::vector<TensorSignature> tensors) {
  if (tensors.size() != tensors_.size()) {
    return InvalidArgument(std::to_string(tensors.size()) + " gradients redefined; expected " +
                           std::to_string(tensors_.size()));
  }
  if (ended_ || !order_.empty()) return InvalidArgument("gradients redefined within a round");
  SetTensors(std::move(tensors));
  if (groups_.empty()) return {};
  std::vector<std::vector<int32_t>> groups;
  for (const Group& group : groups_) groups.push_back(group.tensors);
  return UseGroups(groups, !grouped_);
}

// Prepares one operation per group. Singles have plain keys, so that a disagreement names the
// tensor's own key.
Status GradientBuckets::UseGroups(const std::vector<std::vector<int32_t>>& groups, bool single) {
  std::vector<Group> prepared_groups;
  std::vector<Position> positions(tensors_.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    Group group;
    group.tensors = groups[g];
    Signature signature = options_.common;
    for (size_t k = 0; k < group.tensors.size(); ++k) {
      const auto tensor = static_cast<size_t>(group.tensors[k]);
      signature.tensors.push_back(tensors_[tensor]);
      if (single) signature.tensors.back().name.clear();
      positions[tensor] = {static_cast<int32_t>(g), static_cast<int32_t>(k)};
    }
    const std::string name =
        single ? tensors_[static_cast<size_t>(groups[g].front())].name
               : "group " + std::to_string(g) + " of " + std::to_string(groups.size());
    Result<Operation*> prepared = engine_.Prepare(
        {options_.set, OpKind::kAllreduce, options_.prefix + name}, signature, &group.version);
    FARANDOLE_RETURN_IF_ERROR(prepared.status());  // the groups of before stay
    group.operation = prepared.value();
    group.in.resize(group.tensors.size());
    group.out.resize(group.tensors.size());
    prepared_groups.push_back(std::move(group));
  }
  groups_ = std::move(prepared_groups);
  positions_ = std::move(positions);
  grouped_ = !single;
  return {};
}

// At the beginning of a round. A rank that had joined does not know the order that the others have
// learned meanwhile, so after a join all ranks begin with single tensors and learn the order again.
Status GradientBuckets::PrepareGroups() {
  if (!order_.empty() || (!groups_.empty() && joins_ == engine_.joins())) return {};
  joins_ = engine_.joins();
  std::vector<std::vector<int32_t>> singles(tensors_.size());
  for (size_t k = 0; k < singles.size(); ++k) singles[k] = {static_cast<int32_t>(k)};
  return UseGroups(singles, true);
}

// A hook calls this inside the backward pass. In the first round, in which the order is learned,
// nothing starts before End; afterwards a group starts with its last tensor, unless it is the last
// group.
Status GradientBuckets::Mark(int32_t i, const void* in, void* out, GradientVote vote,
                             const ProducerStream* producer) {
  if (i < 0 || static_cast<size_t>(i) >= tensors_.size()) {
    return InvalidArgument("gradient number " + std::to_string(i) + "; expected 0 to " +
                           std::to_string(static_cast<int64_t>(tensors_.size()) - 1));
  }
  const auto tensor = static_cast<size_t>(i);
  if (ended_)
    return InvalidArgument("gradient \"" + tensors_[tensor].name +
                           "\" marked while the ended round runs");
  if (marked_[tensor]) {
    return InvalidArgument("gradient \"" + tensors_[tensor].name +
                           "\" was already sent in this round");
  }
  FARANDOLE_RETURN_IF_ERROR(PrepareGroups());
  Group& group = groups_[static_cast<size_t>(positions_[tensor].group)];
  const auto position = static_cast<size_t>(positions_[tensor].position);
  group.in[position] = in;
  group.out[position] = out;
  if (producer != nullptr && std::find(group.producers.begin(), group.producers.end(), *producer) ==
                                 group.producers.end()) {
    group.producers.push_back(*producer);
  }
  marked_[tensor] = true;
  votes_[tensor] = vote;
  order_.push_back(i);
  const bool full = ++group.marked == group.tensors.size();
  if (grouped_ && full && &group != &groups_.back()) Start(group, {});
  return {};
}

bool GradientBuckets::Marked(int32_t i) const {
  return i >= 0 && static_cast<size_t>(i) < marked_.size() && marked_[static_cast<size_t>(i)];
}

// An error is kept for the round's end and the other groups start all the same, because the other
// ranks wait for them. The version makes Claim refuse a description that another user of the name
// has replaced meanwhile.
void GradientBuckets::Start(Group& group, std::string_view failed) {
  Vote vote;
  vote.failed = failed;
  vote.step = step_;
  const int tensors = static_cast<int>(group.tensors.size());
  for (int k = 0; k < tensors; ++k) {
    const GradientVote v = votes_[static_cast<size_t>(group.tensors[static_cast<size_t>(k)])];
    if (v == GradientVote::kAbsent) SetBit(vote.absent, k, tensors);
    if (v == GradientVote::kClean) SetBit(vote.clean, k, tensors);
  }
  Result<std::shared_ptr<Work>> started = engine_.Start(*group.operation, group.in, group.out, vote,
                                                        true, group.producers, group.version);
  group.producers.clear();
  if (started.ok()) {
    group.work = started.value();
  } else if (first_error_.ok()) {
    first_error_ = started.status();
  }
}

Status GradientBuckets::AnnounceStep() {
  // The second call of a round does nothing. After a join all ranks count their steps anew, so the
  // round is announced again.
  const std::pair<int64_t, int> coming{rounds_, engine_.joins()};
  if (announced_ == coming) return {};
  announced_ = coming;
  return engine_.AnnounceStep(options_.set, options_.prefix, step_);
}

// With `failed`, groups that have not started are started as failed, which refuses them on all
// ranks once all have voted. Addresses in them may be those of an earlier round: a failed operation
// reads and writes nothing.
Status GradientBuckets::End(std::string_view failed) {
  if (ended_) return InvalidArgument("the round has already ended");
  if (failed.empty()) {
    auto unmarked = std::find(marked_.begin(), marked_.end(), false);
    if (unmarked != marked_.end()) {
      return InvalidArgument("the round ended without gradient \"" +
                             tensors_[static_cast<size_t>(unmarked - marked_.begin())].name + "\"");
    }
  }
  if (!tensors_.empty()) FARANDOLE_RETURN_IF_ERROR(PrepareGroups());
  ended_ = true;
  for (Group& group : groups_) {
    if (group.work == nullptr) Start(group, failed);
  }
  if (!grouped_ && !tensors_.empty()) StartOrder(failed);
  return first_error_;
}

// The first rank of the set reports the order in which it marked its tensors: the sum of one
// contribution, and not a broadcast, which would fail if that rank has joined. Then nobody has
// contributed, and the next round asks again. The number of tensors is the shape, so ranks with
// different numbers of gradients get a Mismatch.
void GradientBuckets::StartOrder(std::string_view failed) {
  learned_order_ = order_;
  // A failed pass has marked fewer.
  learned_order_.resize(tensors_.size());
  Signature signature;
  Result<ProcessSetInfo> set = engine_.FindSet(options_.set);
  // If the set has ended, Prepare fails with the reason.
  const bool is_first = set.ok() && set.value().ranks.front() == engine_.rank();
  signature.tensors.push_back({"", DType::kInt32, {static_cast<int64_t>(tensors_.size())}});
  Result<Operation*> prepared = engine_.Prepare(
      {options_.set, OpKind::kAllreduce, options_.prefix + "number and order"}, signature);
  Status status = prepared.status();
  if (prepared.ok()) {
    const void* in = learned_order_.data();
    void* out = learned_order_.data();
    Vote vote;
    if (!is_first) vote.absent = FullMask(1);
    vote.failed = failed;
    Result<std::shared_ptr<Work>> started =
        engine_.Start(*prepared.value(), {&in, 1}, {&out, 1}, vote);
    status = started.status();
    if (started.ok()) order_work_ = started.value();
  }
  if (!status.ok() && first_error_.ok()) first_error_ = std::move(status);
}

bool GradientBuckets::Wait(int64_t timeout_ns, Status* outcome) {
  if (!ended_) {
    *outcome = InvalidArgument("wait for a round that has not ended");
    return true;
  }
  const int64_t deadline = timeout_ns < 0 ? kNever : SteadyClock().NowNs() + timeout_ns;
  auto wait = [&](const std::shared_ptr<Work>& work) {
    if (work == nullptr || work->done()) return true;
    const int64_t left =
        deadline == kNever ? -1 : std::max<int64_t>(deadline - SteadyClock().NowNs(), 0);
    return engine_.Wait(*work, left);
  };
  for (Group& group : groups_) {
    if (!wait(group.work)) return false;
  }
  if (!wait(order_work_)) return false;
  CloseRound(outcome);
  return true;
}

// All works are done. The next round may begin after an error too, which is reported once. On a GPU
// the memory of the round is in use until the events in ends_ are complete.
void GradientBuckets::CloseRound(Status* outcome) {
  ++rounds_;
  for (Group& group : groups_) {
    if (group.work != nullptr && group.work->end() != nullptr)
      ends_.push_back({rounds_, group.work->end()});
    const bool failed = group.work == nullptr || !group.work->status().ok();
    if (group.work != nullptr && failed && first_error_.ok()) first_error_ = group.work->status();
    for (size_t k = 0; k < group.tensors.size(); ++k) {
      skipped_[static_cast<size_t>(group.tensors[k])] =
          !failed && group.work->skipped(static_cast<int>(k));
    }
    group.work = nullptr;
    group.marked = 0;
  }
  // Ranks with another number of gradients disagree about their order, and perhaps about nothing
  // else.
  if (order_work_ != nullptr && first_error_.ok()) first_error_ = order_work_->status();
  *outcome = first_error_;
  first_error_ = Status();
  ended_ = false;
  order_.clear();
  std::fill(marked_.begin(), marked_.end(), false);
  std::fill(votes_.begin(), votes_.end(), GradientVote::kPresent);
  LearnOrder();
}

// The round last waited for is at the end of ends_. Events that CompletedRounds has removed are
// complete, and nobody needs to wait for them.
Status GradientBuckets::MakeWait(const ProducerStream& stream) {
  for (auto end = ends_.rbegin(); end != ends_.rend() && end->round == rounds_; ++end) {
    FARANDOLE_RETURN_IF_ERROR(engine_.MakeWait(end->event, stream));
  }
  return {};
}

// Ends are in the order of rounds and a round may have several, so the first that is not complete
// belongs to the oldest round that still uses its memory.
Result<int64_t> GradientBuckets::CompletedRounds() {
  while (!ends_.empty()) {
    Result<bool> complete = ends_.front().event->IsComplete();
    if (!complete.ok()) return complete.status();
    if (!complete.value()) return ends_.front().round - 1;
    ends_.pop_front();
  }
  return rounds_;
}

// Forms the groups once the order is known. Every rank sees the same outcome of the operation that
// carries it, so all switch together.
void GradientBuckets::LearnOrder() {
  std::shared_ptr<Work> learned = std::move(order_work_);
  order_work_ = nullptr;
  if (learned == nullptr || !learned->status().ok() || learned->skipped(0)) return;
  Status used = UseGroups(FormGroups(learned_order_, bytes_, options_.group_bytes), false);
  if (!used.ok()) first_error_ = std::move(used);  // reported at the next round's end
}

bool GradientBuckets::InFlight() const {
  const auto pending = [](const std::shared_ptr<Work>& work) {
    return work != nullptr && !work->done();
  };
  return pending(order_work_) ||
         std::any_of(groups_.begin(), groups_.end(),
                     [&](const Group& group) { return pending(group.work); });
}

bool GradientBuckets::Skipped(int32_t i) const {
  return i >= 0 && static_cast<size_t>(i) < skipped_.size() && skipped_[static_cast<size_t>(i)];
}

}  // namespace farandole
