#include "coordinator/gradients/gradient_round.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
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

namespace {

constexpr const char* kWrapCount = "number of wrapped optimizers";

/// Results of one group in memory that is asked for by the number of the gradient.
class GroupResults final : public ResultAllocator {
 public:
  GroupResults(std::shared_ptr<ResultAllocator> results, std::vector<int32_t> tensors)
      : results_(std::move(results)), tensors_(std::move(tensors)) {}
  Result<void*> Allocate(size_t tensor, std::span<const int64_t> rows, int64_t bytes) override {
    return results_->Allocate(static_cast<size_t>(tensors_[tensor]), rows, bytes);
  }
  bool IsInStreamOrder() const override { return results_->IsInStreamOrder(); }

 private:
  const std::shared_ptr<ResultAllocator> results_;
  const std::vector<int32_t> tensors_;
};

/// Whether each number below its length comes once.
bool IsOrder(std::span<const int32_t> order) {
  std::vector<bool> seen(order.size(), false);
  for (const int32_t i : order) {
    if (i < 0 || static_cast<size_t>(i) >= seen.size() || seen[static_cast<size_t>(i)])
      return false;
    seen[static_cast<size_t>(i)] = true;
  }
  return true;
}

}  // namespace

GradientRound::GradientRound(Engine& engine, Options options, std::vector<TensorSignature> tensors,
                             std::vector<std::string> labels, WrapComparison* wraps,
                             std::shared_ptr<ResultAllocator> results)
    : options_(std::move(options)), results_(std::move(results)) {
  for (TensorSignature& tensor : tensors) gradients_.push_back({std::move(tensor)});
  Bind(engine, wraps, std::move(labels));
}

void GradientRound::Bind(Engine& engine, WrapComparison* wraps, std::vector<std::string> labels) {
  now_ = std::make_unique<EngineState>();
  now_->engine = &engine;
  now_->wraps = wraps;
  now_->prefix = options_.prefix;
  now_->joins = engine.lifecycle().joins();
  if (options_.tuner) options_.tuner.emplace(options_.group_bytes);  // not ended: it begins again
  stepped_ = succeeded_;  // else this rank would count a step that who has just come does not
  if (!options_.prefix.empty() || wraps == nullptr) return;
  if (labels.empty())
    for (const Gradient& gradient : gradients_)
      labels.push_back(gradient.tensor.name + " " + Describe(gradient.tensor));
  now_->number = wraps->Add(options_.set, labels);
  now_->is_compared = false;
  now_->prefix = GradientPrefix(now_->number);
}

Status GradientRound::Unbind() {
  if (InFlight()) return InvalidArgument("gradients are in flight");
  if (is_bound()) ResetRound();
  window_passes_ = 0;
  is_window_full_ = false;
  now_ = nullptr;
  return {};
}

Status GradientRound::Rebind(Engine& engine, WrapComparison* wraps, uint32_t set,
                             std::vector<std::string> labels) {
  FARANDOLE_RETURN_IF_ERROR(Unbind());
  options_.set = set;
  Bind(engine, wraps, std::move(labels));
  return {};
}

// The groups are kept. If each rank formed them again from its own sizes, ranks that disagree would
// have different groups and wait for each other, where they now get a Mismatch.
Status GradientRound::Redefine(std::vector<TensorSignature> tensors, DeviceKind device) {
  if (tensors.size() != gradients_.size()) {
    return InvalidArgument(std::to_string(tensors.size()) + " gradients redefined; expected " +
                           std::to_string(gradients_.size()));
  }
  if (round_.is_ended || !round_.order.empty())
    return InvalidArgument("gradients redefined within a round");
  options_.common.device = device;
  for (size_t i = 0; i < tensors.size(); ++i) gradients_[i].tensor = std::move(tensors[i]);
  if (now_->groups.empty()) return {};
  std::vector<std::vector<int32_t>> groups;
  for (const Group& group : now_->groups) groups.push_back(group.tensors);
  return UseGroups(std::move(groups), now_->has_order);
}

Status GradientRound::Add(std::vector<TensorSignature> tensors) {
  if (round_.is_ended) return InvalidArgument("gradients added while the ended round runs");
  std::vector<int32_t> last =
      now_->groups.empty() ? std::vector<int32_t>() : now_->groups.back().tensors;
  for (TensorSignature& tensor : tensors) {
    last.push_back(static_cast<int32_t>(gradients_.size()));
    gradients_.push_back({std::move(tensor)});
  }
  has_unreduced_ = true;
  if (now_->groups.empty()) return {};
  Group& group = now_->groups.back();
  Result<Group> extended = Prepare(std::move(last), now_->groups.size() - 1, now_->groups.size());
  FARANDOLE_RETURN_IF_ERROR(extended.status());
  for (size_t k = 0; k < group.tensors.size(); ++k) {
    extended.value().in[k] = group.in[k];
    extended.value().out[k] = group.out[k];
  }
  extended.value().marked = group.marked;
  extended.value().producers = std::move(group.producers);
  group = std::move(extended).value();
  return {};
}

Result<GradientRound::Group> GradientRound::Prepare(std::vector<int32_t> tensors, size_t number,
                                                    size_t count) {
  Group group;
  group.tensors = std::move(tensors);
  Signature signature = options_.common;
  for (size_t k = 0; k < group.tensors.size(); ++k) {
    Gradient& gradient = gradients_[static_cast<size_t>(group.tensors[k])];
    signature.tensors.push_back(gradient.tensor);
    gradient.group = static_cast<int32_t>(number);
    gradient.position = static_cast<int32_t>(k);
  }
  // Without elements, it tells by who contributes it that a flag is raised.
  if (number + 1 == count && options_.has_flag)
    signature.tensors.push_back({"flag", DType::kFloat32, {0}});
  const std::string name = "group " + std::to_string(number) + " of " + std::to_string(count);
  Result<Operation*> prepared = now_->engine->operations().Prepare(
      {options_.set, OpKind::kAllreduce, now_->prefix + name}, signature, &group.version);
  FARANDOLE_RETURN_IF_ERROR(prepared.status());
  group.operation.reset(prepared.value());
  group.in.resize(signature.tensors.size());
  group.out.resize(signature.tensors.size());
  if (results_ != nullptr) group.results = std::make_shared<GroupResults>(results_, group.tensors);
  return group;
}

Status GradientRound::UseGroups(std::vector<std::vector<int32_t>> groups, bool has_order) {
  std::vector<Group> prepared_groups;
  for (size_t g = 0; g < groups.size(); ++g) {
    Result<Group> prepared = Prepare(std::move(groups[g]), g, groups.size());
    FARANDOLE_RETURN_IF_ERROR(prepared.status());  // a final error: no round follows
    prepared_groups.push_back(std::move(prepared).value());
  }
  now_->groups = std::move(prepared_groups);
  now_->has_order = has_order;
  return {};
}

// At the beginning of a round, before anything is marked. A rank that had joined does not know the
// order that the others have learned meanwhile, so after a join all ranks begin with one group and
// learn the order again.
Status GradientRound::PrepareGroups() {
  if (!now_->groups.empty() &&
      (now_->joins == now_->engine->lifecycle().joins() || !round_.order.empty()))
    return {};
  if (now_->joins != now_->engine->lifecycle().joins()) {
    now_->joins = now_->engine->lifecycle().joins();
    const StepCount before = now_->step;
    CountStepsAnew();
    now_->step.passes = before.passes;
    now_->step.no_sync_passes = before.no_sync_passes;
  }
  std::vector<int32_t> all(gradients_.size());
  std::iota(all.begin(), all.end(), 0);
  return UseGroups({std::move(all)}, false);
}

void GradientRound::CountPass(bool is_no_sync) {
  ++now_->step.passes;
  now_->step.no_sync_passes += is_no_sync ? 1 : 0;
  is_window_full_ = !is_no_sync && ++window_passes_ >= options_.passes;
}

void GradientRound::NoteFailure(std::string_view why) {
  if (!failure_.empty()) return;
  is_interrupted_ = why.empty();
  failure_ = is_interrupted_ ? "the wait for the other ranks was interrupted" : why;
}

void GradientRound::Forget() {
  window_passes_ = 0;
  failure_.clear();
  is_interrupted_ = false;
}

void GradientRound::CountStepsAnew() { now_->step = StepCount{.step = 1}; }

Status GradientRound::Stepped() {
  if (stepped_ == succeeded_) return {};
  stepped_ = succeeded_;
  now_->step = {now_->step.step + 1, 0, 0, now_->step.passes, now_->step.no_sync_passes};
  return Announce();
}

// The second call of a round does nothing. After a join all ranks count their steps anew, so the
// round is announced again.
Status GradientRound::Announce() {
  FARANDOLE_RETURN_IF_ERROR(PrepareGroups());
  const std::pair<int64_t, int> coming{rounds_, now_->joins};
  if (now_->announced == coming) return {};
  now_->announced = coming;
  return now_->engine->AnnounceStep(options_.set, now_->prefix, now_->step);
}

// Ranks that wrapped other optimizers than this one part before they announce a step.
Status GradientRound::Open() {
  if (round_.is_ended) return InvalidArgument("a round was opened while the ended one runs");
  if (round_.is_open) return {};
  round_.is_open = true;
  failure_.clear();
  is_interrupted_ = false;
  return now_->is_compared ? Announce() : Status();
}

Result<int32_t> GradientRound::Accumulated(int32_t i) {
  Gradient& gradient = gradients_.at(static_cast<size_t>(i));
  has_unreduced_ = true;
  if (!round_.is_open) return kNoRound;
  if (++gradient.accumulations == 1) round_.arrival.push_back(i);
  if (!options_.overlaps) return kNone;
  const bool was_due = round_.due == i;
  const int32_t due = round_.due >= 0 && !was_due ? std::exchange(round_.due, kNone) : kNone;
  if (was_due || gradient.accumulations == gradient.expected) {
    round_.due = i;
    gradient.expected = gradient.accumulations;
  } else if (gradient.expected > 0 && gradient.accumulations > gradient.expected) {
    const int times = std::exchange(gradient.expected, gradient.accumulations);
    return InvalidArgument("the gradient of \"" + gradient.tensor.name +
                           "\" was accumulated again after it was sent: " + std::to_string(times) +
                           " times in earlier backward passes, more often now");
  }
  return due;
}

int32_t GradientRound::NextUnmarked() const {
  for (const int32_t i : round_.arrival)
    if (!gradients_[static_cast<size_t>(i)].is_marked) return i;
  const auto next = std::ranges::find(gradients_, false, &Gradient::is_marked);
  return next == gradients_.end() ? -1 : static_cast<int32_t>(next - gradients_.begin());
}

Status GradientRound::CheckNumber(int32_t i) const {
  if (Has(i)) return {};
  return InvalidArgument("gradient number " + std::to_string(i) + "; expected 0 to " +
                         std::to_string(static_cast<int64_t>(gradients_.size()) - 1));
}

// A hook calls this inside the backward pass. In the first round, in which the order is learned,
// nothing starts before End; afterwards a group starts with its last tensor, unless it is the last
// group.
Status GradientRound::Mark(int32_t i, const void* in, void* out, GradientVote vote,
                           const ProducerStream* producer) {
  FARANDOLE_RETURN_IF_ERROR(CheckNumber(i));
  Gradient& gradient = gradients_[static_cast<size_t>(i)];
  if (round_.is_ended || gradient.is_marked) {
    return InvalidArgument("gradient \"" + gradient.tensor.name +
                           (round_.is_ended ? "\" marked while the ended round runs"
                                            : "\" was already sent in this round"));
  }
  FARANDOLE_RETURN_IF_ERROR(Open());
  FARANDOLE_RETURN_IF_ERROR(PrepareGroups());
  Group& group = now_->groups[static_cast<size_t>(gradient.group)];
  const auto position = static_cast<size_t>(gradient.position);
  group.in[position] = in;
  group.out[position] = out;
  if (producer != nullptr && std::ranges::find(group.producers, *producer) == group.producers.end())
    group.producers.push_back(*producer);
  const bool is_news = gradient.accumulations > 0 && vote == GradientVote::kClean;
  gradient.is_marked = true;
  gradient.vote = is_news ? GradientVote::kPresent : vote;
  round_.order.push_back(i);
  const bool is_full = ++group.marked == group.tensors.size();
  if (is_full && &group != &now_->groups.back()) Start(group, {});
  return {};
}

bool GradientRound::Marked(int32_t i) const {
  return Has(i) && gradients_[static_cast<size_t>(i)].is_marked;
}

void GradientRound::NoteError(const Status& error) {
  if (now_->first_error.ok()) now_->first_error = error;
}

Vote GradientRound::VoteOf(const Group& group, std::string_view failed) const {
  Vote vote;
  vote.failed = failed;
  vote.step = now_->step;
  const auto tensors = static_cast<int>(group.in.size());
  for (size_t k = 0; k < group.tensors.size(); ++k) {
    const GradientVote one = gradients_[static_cast<size_t>(group.tensors[k])].vote;
    if (one == GradientVote::kAbsent) SetBit(vote.absent, static_cast<int>(k), tensors);
    if (one == GradientVote::kClean) SetBit(vote.clean, static_cast<int>(k), tensors);
  }
  if (group.in.size() > group.tensors.size() && !round_.is_flag_raised)
    SetBit(vote.absent, tensors - 1, tensors);
  return vote;
}

// An error is kept for the round's end and the other groups start all the same, because the other
// ranks wait for them. The version makes Claim refuse a description that another user of the name
// has replaced meanwhile.
void GradientRound::Start(Group& group, std::string_view failed) {
  const bool fills_cores = now_->engine->fills_cores();  // until a GPU is in use
  Result<std::shared_ptr<Work>> started = Submit(group, VoteOf(group, failed), !fills_cores);
  if (!started.ok()) {
    NoteError(started.status());
    // Without its memory, so that the other ranks do not wait for it.
    started = Submit(group, VoteOf(group, started.status().message()), !fills_cores);
  }
  group.producers.clear();
  if (started.ok()) group.work = started.value();
  if (fills_cores) now_->engine->RunBriefly();
}

bool GradientRound::LacksMemory(const Group& group) const {
  for (size_t k = 0; k < group.tensors.size(); ++k) {
    const Gradient& gradient = gradients_[static_cast<size_t>(group.tensors[k])];
    if (gradient.vote == GradientVote::kAbsent && group.out[k] == nullptr) return true;
  }
  return false;
}

// The thread that executes decisions allocates results, and its current stream is the device's
// default one: the last producer, behind which the operation waits for such memory.
Result<std::shared_ptr<Work>> GradientRound::Submit(Group& group, const Vote& vote, bool notifies) {
  FARANDOLE_RETURN_IF_ERROR(now_->engine->operations().Claim(*group.operation, group.version));
  ClaimedOperation claimed(*group.operation);
  const bool allocates = group.results != nullptr && LacksMemory(group);
  if (allocates && !group.producers.empty() && group.producers.back().stream != nullptr)
    group.producers.push_back({group.producers.back().device, nullptr});
  return now_->engine->StartClaimed(claimed, group.in, group.out, vote, notifies, group.producers,
                                    allocates ? group.results : nullptr);
}

bool GradientRound::Compare(int64_t timeout_ns, Status* outcome) {
  if (!now_->is_compared) {
    if (!now_->wraps->Wait(options_.set, now_->number, timeout_ns, outcome)) return false;
    now_->is_compared = outcome->ok();
    if (outcome->code() == Code::kMismatch) {
      NoteFailure(outcome->message());
      window_passes_ = 0;
      ResetRound();
      CountStepsAnew();
    }
    return true;
  }
  *outcome = Status();
  return true;
}

// With `failed`, groups that have not started are started as failed, which refuses them on all
// ranks once all have voted. Addresses in them may be those of an earlier round: a failed operation
// reads and writes nothing.
Status GradientRound::End(std::string_view failed) {
  if (round_.is_ended) return InvalidArgument("the round has already ended");
  if (failed.empty()) {
    if (!now_->is_compared)
      return InvalidArgument("the round ended before the wraps were compared");
    FARANDOLE_RETURN_IF_ERROR(Open());
    const auto unmarked = std::ranges::find(gradients_, false, &Gradient::is_marked);
    if (unmarked != gradients_.end())
      return InvalidArgument("the round ended without gradient \"" + unmarked->tensor.name + "\"");
  }
  if (!failed.empty()) {
    Forget();
    NoteFailure(failed);
  }
  NoteError(Announce());
  window_passes_ = 0;
  round_.is_open = false;
  round_.is_ended = true;
  for (Group& group : now_->groups) {
    if (group.work == nullptr) Start(group, failed);
  }
  if (IsOrderDue()) StartOrder(failed);
  return now_->first_error;
}

// If the set has ended, none is.
bool GradientRound::IsFirstRank() const {
  const Result<ProcessSetInfo> set = now_->engine->operations().FindSet(options_.set);
  return set.ok() && set.value().ranks.front() == now_->engine->rank();
}

// Only the first rank's tuner counts: it is asked nowhere else, as sizes that others found would
// not be used.
void GradientRound::ChooseGroups() {
  round_.learned_groups = {options_.group_bytes, kNever};
  if (!IsTuning() || !IsFirstRank()) return;
  const int64_t bytes = options_.tuner->Next();
  constexpr auto kRounds = static_cast<int64_t>(GroupTuner::kRounds);
  round_.learned_groups = {bytes, options_.tuner->is_done() ? kNever : kRounds - 1};
}

void GradientRound::StartOrder(std::string_view failed) {
  round_.learned_order = round_.order;
  round_.learned_order.resize(gradients_.size());  // a failed pass has marked fewer
  round_.learned_bytes.clear();
  for (const Gradient& gradient : gradients_)
    round_.learned_bytes.push_back(gradient.tensor.Bytes());
  ChooseGroups();
  Result<std::shared_ptr<Work>> started = SubmitOrder(failed);
  if (started.ok()) {
    round_.order_work = started.value();
  } else {
    NoteError(started.status());
  }
}

// The first rank of the set reports the order in which it marked its tensors, their sizes, and that
// of groups: the sum of one contribution, and not a broadcast, which would fail if that rank has
// joined. Then nobody has contributed, and the next round asks again.
Result<std::shared_ptr<Work>> GradientRound::SubmitOrder(std::string_view failed) {
  Signature signature;
  const auto count = static_cast<int64_t>(gradients_.size());
  signature.tensors.push_back({"order", DType::kInt32, {count}});
  signature.tensors.push_back({"bytes", DType::kInt64, {count}});
  signature.tensors.push_back({"groups", DType::kInt64, {2}});
  // Without elements: its shape is compared.
  const int64_t wraps = now_->number < 0 ? 0 : now_->wraps->count(options_.set);
  signature.tensors.push_back({kWrapCount, DType::kInt32, {0, wraps}});
  Result<Operation*> prepared = now_->engine->operations().Prepare(
      {options_.set, OpKind::kAllreduce, now_->prefix + "number and order"}, signature);
  FARANDOLE_RETURN_IF_ERROR(prepared.status());
  const HeldOperation held(prepared.value());
  const std::array<void*, 4> out = {round_.learned_order.data(), round_.learned_bytes.data(),
                                    round_.learned_groups.data(), nullptr};
  const std::array<const void*, 4> in = {out[0], out[1], out[2], nullptr};
  Vote vote;
  if (!IsFirstRank()) vote.absent = FullMask(4);
  vote.failed = failed;
  return now_->engine->Start(*prepared.value(), in, out, vote);
}

bool GradientRound::Wait(int64_t timeout_ns, Status* outcome) {
  if (!round_.is_ended) {
    *outcome = InvalidArgument("wait for a round that has not ended");
    return true;
  }
  const int64_t deadline_ns = DeadlineIn(timeout_ns);
  for (const Group& group : now_->groups) {
    if (!WaitUntil(*now_->engine, group.work, deadline_ns)) return false;
  }
  if (!WaitUntil(*now_->engine, round_.order_work, deadline_ns)) return false;
  CloseRound(outcome);
  return true;
}

// On a GPU the memory of the round is in use until the events in now_->ends are complete.
void GradientRound::CloseGroup(Group& group) {
  const bool failed = group.work == nullptr || !group.work->status().ok();
  if (group.work != nullptr) {
    if (group.work->end() != nullptr) now_->ends.push_back({rounds_, group.work->end()});
    if (failed) NoteError(group.work->status());
  }
  for (size_t k = 0; k < group.tensors.size(); ++k) {
    gradients_[static_cast<size_t>(group.tensors[k])].is_skipped =
        group.work != nullptr && group.work->skipped(static_cast<int>(k));
  }
  if (group.in.size() > group.tensors.size())
    is_flag_up_ = !failed && !group.work->skipped(static_cast<int>(group.tensors.size()));
}

// All works are done. The next round may begin after an error too, which is reported once. Ranks
// with another number of gradients disagree about their order, and perhaps about nothing else.
void GradientRound::CloseRound(Status* outcome) {
  ++rounds_;
  if (now_->rounds_to_order > 0 && now_->rounds_to_order != kNever) --now_->rounds_to_order;
  for (Group& group : now_->groups) CloseGroup(group);
  if (round_.order_work != nullptr) NoteError(round_.order_work->status());
  *outcome = std::exchange(now_->first_error, Status());
  // Also of a round that has failed on this rank alone: all ranks count the same steps.
  if (options_.set == kGlobalSet) now_->engine->EndStep(now_->joins);
  if (outcome->code() == Code::kMismatch &&
      outcome->message().find(kWrapCount) != std::string::npos)
    *outcome = Status(outcome->code(), outcome->message() + kWrapAlike, outcome->facts());
  if (IsTuning()) {
    const int64_t now_ns = now_->engine->clock().NowNs();
    const int64_t before_ns = std::exchange(now_->closed_ns, now_ns);
    if (outcome->ok() && before_ns > 0) options_.tuner->AddStep(now_ns - before_ns);
  }
  if (outcome->ok()) {
    ++succeeded_;
    has_unreduced_ = false;
    for (Gradient& gradient : gradients_)
      gradient.expected = std::max(gradient.expected, gradient.accumulations);
  } else {
    NoteFailure(outcome->message());
    CountStepsAnew();
  }
  LearnOrder();
  ResetRound();
}

void GradientRound::ResetRound() {
  for (Group& group : now_->groups) {
    group.work = nullptr;
    group.marked = 0;
    group.producers.clear();
  }
  for (Gradient& gradient : gradients_) {
    gradient.accumulations = 0;
    gradient.is_marked = false;
    gradient.vote = GradientVote::kPresent;
  }
  round_.order_work = nullptr;
  round_.order.clear();
  round_.arrival.clear();
  round_.due = kNone;
  round_.is_open = round_.is_ended = round_.is_flag_raised = false;
}

// Forms the groups once the order is known. Every rank sees the same outcome of the operation that
// carries it, and the same tensors that nobody contributed, so all switch together, also where a
// result found no memory on one of them. Sizes are the first rank's too: ranks that disagree about
// theirs would form different groups, and wait for each other where they now get a Mismatch. Those
// tensors, such as frozen parameters, would make the tail that backward cannot hide longer: they
// come last.
void GradientRound::LearnOrder() {
  if (round_.order_work == nullptr || !round_.order_work->status().ok() ||
      round_.order_work->skipped(0))
    return;
  if (!IsOrder(round_.learned_order)) {
    return NoteError(Internal("the first rank of process set " + std::to_string(options_.set) +
                              " sent an order of gradients that does not have each of them once"));
  }
  const int64_t group_bytes = round_.learned_groups[0];
  now_->rounds_to_order = round_.learned_groups[1];
  if (now_->rounds_to_order == kNever && now_->engine->size() > 1) KeepTuned(group_bytes);
  const auto is_idle = [&](int32_t i) { return gradients_[static_cast<size_t>(i)].is_skipped; };
  std::vector<int32_t> idle;
  std::ranges::copy_if(round_.learned_order, std::back_inserter(idle), is_idle);
  std::erase_if(round_.learned_order, is_idle);
  std::vector<std::vector<int32_t>> groups =
      FormGroups(round_.learned_order, round_.learned_bytes, group_bytes);
  if (groups.empty()) groups.emplace_back();
  groups.back().insert(groups.back().end(), idle.begin(), idle.end());
  NoteError(UseGroups(std::move(groups), true));  // reported at the next round's end
}

// Who comes first in another generation goes on with what was found, and does not begin again. The
// line is a warning, as others are not shown unless asked for; this one was, by the setting.
void GradientRound::KeepTuned(int64_t group_bytes) {
  options_.group_bytes = group_bytes;
  const std::optional<GroupTuner> tuner = std::exchange(options_.tuner, std::nullopt);
  if (!tuner || !tuner->is_done()) return;
  Log& log = now_->engine->log();
  log.Write(LogLevel::kWarning, "autotuning has ended: " + tuner->Describe());
  if (options_.tuning_file.empty()) return;
  std::ofstream file(options_.tuning_file);
  file << tuner->Report() << std::flush;
  if (!file)
    log.Write(LogLevel::kError, "FARANDOLE_AUTOTUNE_LOG=\"" + options_.tuning_file +
                                    "\" cannot be written: " + std::strerror(errno));
}

// The round last waited for is at the end of now_->ends. Events that CompletedRounds has removed
// are complete, and nobody needs to wait for them.
Status GradientRound::MakeWait(const ProducerStream& stream) {
  for (auto end = now_->ends.rbegin(); end != now_->ends.rend() && end->round == rounds_; ++end) {
    FARANDOLE_RETURN_IF_ERROR(now_->engine->MakeWait(end->event, stream));
  }
  return {};
}

// Ends are in the order of rounds and a round may have several, so the first that is not complete
// belongs to the oldest round that still uses its memory.
Result<int64_t> GradientRound::CompletedRounds() {
  while (!now_->ends.empty()) {
    Result<bool> complete = now_->ends.front().event->IsComplete();
    if (!complete.ok()) return complete.status();
    if (!complete.value()) return now_->ends.front().round - 1;
    now_->ends.pop_front();
  }
  return rounds_;
}

bool GradientRound::InFlight() const {
  if (!is_bound()) return false;
  const auto is_pending = [](const std::shared_ptr<Work>& work) {
    return work != nullptr && !work->done();
  };
  return is_pending(round_.order_work) ||
         std::ranges::any_of(now_->groups,
                             [&](const Group& group) { return is_pending(group.work); });
}

bool GradientRound::Skipped(int32_t i) const {
  return Has(i) && gradients_[static_cast<size_t>(i)].is_skipped;
}

}  // namespace farandole
