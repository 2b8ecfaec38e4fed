// The engine's calls for users: preparing, starting, sets, join and leave.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "coordinator/engine/engine.h"
#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

constexpr uint64_t kUnnamedSlots = 256;

std::string JoinNumbers(const std::vector<int32_t>& numbers) {
  std::string text;
  for (int32_t number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a);
  const auto second = reinterpret_cast<uintptr_t>(b);
  return a != nullptr && b != nullptr && first < second + static_cast<uintptr_t>(b_bytes) &&
         second < first + static_cast<uintptr_t>(a_bytes);
}

// Memory to read from is there for whatever this rank contributes, and lies apart from the result
// where tensors are cut.
Status CheckMemory(const Operation& operation, std::span<const void* const> in,
                   std::span<void* const> out, const Vote& vote) {
  if (!vote.failed.empty()) return {};
  const bool is_variable_size = IsVariableSize(operation.name.kind);
  const auto refuse = [&](size_t i, const char* why) {
    return InvalidArgument(Describe(operation.name) + ": tensor " + std::to_string(i) + why);
  };
  for (size_t i = 0; i < in.size(); ++i) {
    const Extent bytes = operation.extents[i];
    if (bytes.in == 0 || TestBit(vote.absent, static_cast<int>(i))) continue;
    if (in[i] == nullptr) {
      return refuse(i, " has no input; expected an address, or the vote absent");
    }
    if (is_variable_size && Overlap(in[i], bytes.in, out[i], bytes.out)) {
      return refuse(i, " has its output in the memory of its input; expected them apart");
    }
  }
  return {};
}

}  // namespace

Status Engine::final_error() const {
  std::lock_guard lock(registry_);
  return final_error_;
}

// Why nothing can be started any more, or OK. Under registry_.
Status Engine::Refusal() const {
  if (!final_error_.ok()) return final_error_;
  if (leaving_) return Aborted("farandole has been shut down on rank " + std::to_string(rank()));
  return {};
}

// The set is live and this rank is in it.
Status Engine::CheckSet(const KeyName& name) const {
  auto found = sets_.find(name.set);
  if (found != sets_.end()) {
    const std::vector<int32_t>& ranks = found->second.ranks;
    if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) {
      return InvalidArgument(Describe(name) + ": rank " + std::to_string(rank()) +
                             " is no member of process set " + std::to_string(name.set) +
                             ", which has ranks " + JoinNumbers(ranks));
    }
    return {};
  }
  return WhyGone(name.set, Describe(name) + ": ");
}

// Why no such set is live; `who` begins the message where this rank is at fault. Under registry_.
Status Engine::WhyGone(uint32_t set, const std::string& who) const {
  const EndedSet* ended = ended_sets_.Find(set);
  if (ended != nullptr && !ended->why.ok()) return ended->why;
  return InvalidArgument(who + "process set " + std::to_string(set) +
                         (ended != nullptr   ? " was removed"
                          : set <= last_uid_ ? " has ended"
                                             : " is unknown"));
}

Result<Operation*> Engine::Prepare(const KeyName& name, const Signature& signature,
                                   uint32_t* version, std::span<const int64_t> splits) {
  std::lock_guard lock(registry_);
  Result<Operation*> prepared = PrepareLocked(name, signature, splits);
  if (prepared.ok() && version != nullptr) *version = prepared.value()->version;
  return prepared;
}

// Why it cannot be taken. Its holder is read once: it may be through in the meantime. Under
// registry_.
Status Engine::InFlight(const Operation& operation) const {
  const Operation* const holder = operation.holder->load();
  std::string as;
  if (holder != nullptr && holder != &operation) {
    as = ", as " + CalledAs(holder->name.kind, holder->name.function);
  }
  return InvalidArgument(Describe(operation.name) + " is already in flight on rank " +
                         std::to_string(rank()) + as + "; wait for it, or use another name");
}

Result<Operation*> Engine::PrepareLocked(KeyName name, const Signature& signature,
                                         std::span<const int64_t> splits) {
  name.function = signature.function;
  auto found = operations_.find({name.set, name.kind, name.function, name.name});
  if (found != operations_.end() && SameDescription(found->second->signature, signature) &&
      std::ranges::equal(found->second->splits, splits)) {
    return found->second.get();
  }
  FARANDOLE_RETURN_IF_ERROR(Refusal());
  FARANDOLE_RETURN_IF_ERROR(CheckSet(name));
  const std::vector<int32_t>& ranks = sets_.at(name.set).ranks;
  FARANDOLE_RETURN_IF_ERROR(Validate(name, signature, ranks));
  FARANDOLE_RETURN_IF_ERROR(CheckSplits(name, signature, splits, ranks, rank()));
  std::unique_ptr<Operation>& slot = operations_[{name.set, name.kind, name.function, name.name}];
  const bool fresh = slot == nullptr;
  if (fresh) slot = NewOperation(name);
  if (!(fresh ? slot->TakeName() : slot->Take())) {
    const bool is_another = slot->holder->load() != slot.get();
    if (fresh) slot->in_flight.store(false);
    if (is_another) return InFlight(*slot);
    return InvalidArgument(
        Describe(name) +
        " is in flight with another shape, dtype or parameters; wait for it, or use another name");
  }
  Redefine(*slot, signature, splits);
  slot->GiveBack();
  return slot.get();
}

// One that is nobody's if there is any; in flight, without its name. Its new description's version
// tells it from what it was. Under registry_.
std::unique_ptr<Operation> Engine::NewOperation(const KeyName& name) {
  std::unique_ptr<Operation> operation;
  for (size_t i = 0; i < spare_operations_.size() && name.set != kGlobalSet; ++i) {
    // Who holds an old handle may be trying it just now.
    if (spare_operations_[i]->in_flight.exchange(true)) continue;
    std::swap(spare_operations_[i], spare_operations_.back());
    operation = std::move(spare_operations_.back());
    spare_operations_.pop_back();
    break;
  }
  if (operation == nullptr) operation = std::make_unique<Operation>();
  operation->engine = this;
  operation->name = name;
  operation->in_flight.store(true);
  auto& holder = holders_[{name.set, SpaceOf(name.kind), name.name}];
  if (holder == nullptr) holder = std::make_shared<std::atomic<const Operation*>>(nullptr);
  operation->holder = holder;
  operation->first_version = operation->version + 1;
  operation->ended = false;
  return operation;
}

void Engine::Redefine(Operation& operation, const Signature& signature,
                      std::span<const int64_t> splits) {
  operation.signature = signature;
  operation.signature.kind = operation.name.kind;
  operation.splits.assign(splits.begin(), splits.end());
  ++operation.version;
  const size_t members = signature.members.size();
  operation.in.assign(members, nullptr);
  operation.out.assign(members, nullptr);
  operation.extents.clear();
  for (size_t m = 0; m < members; ++m) {
    operation.extents.push_back(ExtentOf(operation, m, sets_.at(operation.name.set).ranks, rank()));
  }
}

Result<Operation*> Engine::PrepareUnnamed(uint32_t set, OpKind kind, const Signature& signature,
                                          uint32_t* version, std::span<const int64_t> splits) {
  std::lock_guard lock(registry_);
  if (!sets_.contains(set)) {
    FARANDOLE_RETURN_IF_ERROR(Refusal());
    return WhyGone(set, std::string(Name(kind)) + ": ");
  }
  uint64_t& count = unnamed_[{set, kind}];
  const KeyName name{set, kind,
                     std::string(Name(kind)) + ".noname." + std::to_string(count % kUnnamedSlots)};
  auto holder = holders_.find({name.set, SpaceOf(name.kind), name.name});
  if (holder != holders_.end() && holder->second->load() != nullptr)
    return static_cast<Operation*>(nullptr);
  Result<Operation*> prepared = PrepareLocked(name, signature, splits);
  if (prepared.ok()) ++count;
  if (prepared.ok() && version != nullptr) *version = prepared.value()->version;
  return prepared;
}

Status Engine::Claim(Operation& operation, uint32_t version) {
  const bool taken = operation.Take();
  if (taken && !operation.ended && (version == 0 || version == operation.version)) return {};
  std::lock_guard lock(registry_);
  const Status why = WhyNotClaimed(operation, version);
  if (taken) operation.GiveBack();
  return why;
}

// Under registry_, because the operation may be becoming another one.
Status Engine::WhyNotClaimed(const Operation& operation, uint32_t version) const {
  if (operation.ended || (version != 0 && version < operation.first_version)) {
    return Aborted("the process set of this operation has ended; prepare it in another one");
  }
  if (version == 0 || version == operation.version) return InFlight(operation);
  return InvalidArgument(Describe(operation.name) +
                         " was redefined by another thread, with another shape, dtype or "
                         "parameters; use another name");
}

Result<std::shared_ptr<Work>> Engine::Start(Operation& operation, std::span<const void* const> in,
                                            std::span<void* const> out, const Vote& vote,
                                            bool quiet, std::span<const ProducerStream> producers,
                                            uint32_t version) {
  FARANDOLE_RETURN_IF_ERROR(Claim(operation, version));
  return StartClaimed(operation, in, out, vote, quiet, producers);
}

Result<std::shared_ptr<Work>> Engine::StartClaimed(Operation& operation,
                                                   std::span<const void* const> in,
                                                   std::span<void* const> out, const Vote& vote,
                                                   bool quiet,
                                                   std::span<const ProducerStream> producers) {
  Status checked = CheckMemory(operation, in, out, vote);
  if (checked.ok() && (failed_.load() || shut_down_.load())) {
    std::lock_guard lock(registry_);
    checked = Refusal();
  }
  if (checked.ok()) checked = RecordReady(operation, vote, producers);
  if (!checked.ok()) {
    operation.GiveBack();
    return checked;
  }
  std::copy(in.begin(), in.end(), operation.in.begin());
  std::copy(out.begin(), out.end(), operation.out.begin());
  operation.vote = vote;
  operation.work = std::make_shared<Work>();
  std::shared_ptr<Work> work = operation.work;
  const int64_t bytes = TotalBytes(operation.signature);
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  operation.started.store(true);
  submissions_.Push(&operation);
  held_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  if (quiet) return work;
  const bool large = bytes >= options_.linger_bytes;
  if (!rung_.exchange(true) || large) parts_.doorbell->Ring();
  return work;
}

Status Engine::AnnounceStep(uint32_t set, const std::string& prefix, const StepCount& step) {
  uint32_t version = 0;
  Result<Operation*> prepared = Prepare({set, OpKind::kStep, prefix}, Signature(), &version);
  FARANDOLE_RETURN_IF_ERROR(prepared.status());
  Operation& operation = *prepared.value();
  std::lock_guard lock(announcements_);
  if (operation.in_flight.load() || !operation.later_steps.empty()) {
    operation.later_steps.push_back(step);
    return {};
  }
  return StartStep(operation, step, version);
}

Status Engine::StartStep(Operation& operation, const StepCount& step, uint32_t version) {
  Vote vote;
  vote.step = step;
  return Start(operation, {}, {}, vote, false, {}, version).status();
}

// After the end of one announcement: either its successor is seen here, or AnnounceStep sees that
// none is in flight.
void Engine::StartLaterStep(Operation& operation) {
  std::lock_guard lock(announcements_);
  if (operation.later_steps.empty()) return;
  const StepCount step = operation.later_steps.front();
  operation.later_steps.pop_front();
  // Fails only after a final error, which is reported to whoever asks next.
  (void)StartStep(operation, step, operation.version);
}

// The key is the number of the call and not what is asked for: short, the same few for ever, and
// ranks that ask for different things meet and are told.
Result<std::shared_ptr<Work>> Engine::StartControl(OpKind kind, const Signature& signature) {
  Result<Operation*> operation = PrepareUnnamed(kGlobalSet, kind, signature);
  if (!operation.ok()) return operation.status();
  if (operation.value() == nullptr) {
    return ResourceExhausted(std::string(Name(kind)) + ": " + std::to_string(kUnnamedSlots) +
                             " calls are in flight on rank " + std::to_string(rank()) +
                             "; wait for the first of them");
  }
  return Start(*operation.value(), {}, {});
}

Result<std::shared_ptr<Work>> Engine::AddSet(const std::vector<int32_t>& ranks) {
  Signature signature;
  signature.ranks = ranks;
  std::sort(signature.ranks.begin(), signature.ranks.end());
  const bool repeated =
      std::adjacent_find(signature.ranks.begin(), signature.ranks.end()) != signature.ranks.end();
  if (ranks.empty() || repeated || signature.ranks.front() < 0 ||
      signature.ranks.back() >= size()) {
    return InvalidArgument("process set of ranks [" + JoinNumbers(ranks) +
                           "]: expected distinct ranks from 0 to " + std::to_string(size() - 1));
  }
  return StartControl(OpKind::kAddSet, signature);
}

Result<std::shared_ptr<Work>> Engine::RemoveSet(uint32_t uid) {
  Signature signature;
  signature.ranks = {static_cast<int32_t>(uid)};
  return StartControl(OpKind::kRemoveSet, signature);
}

Result<ProcessSetInfo> Engine::SetOf(const std::vector<int32_t>& ranks) const {
  std::vector<int32_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  std::lock_guard lock(registry_);
  for (const auto& [uid, set] : sets_) {
    if (set.ranks == sorted) return set;
  }
  return InvalidArgument("there is no process set of ranks [" + JoinNumbers(sorted) + "]");
}

Result<ProcessSetInfo> Engine::FindSet(uint32_t uid) const {
  std::lock_guard lock(registry_);
  FARANDOLE_RETURN_IF_ERROR(Refusal());
  auto found = sets_.find(uid);
  if (found == sets_.end()) return WhyGone(uid, "");
  return found->second;
}

Engine::TableSizes Engine::Sizes() const {
  std::lock_guard lock(registry_);
  return {negotiation_.Sizes(), sets_.size(), operations_.size(),
          ending_operations_.size() + spare_operations_.size(), unnamed_.size()};
}

Result<std::shared_ptr<Work>> Engine::Join() {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(registry_);
    FARANDOLE_RETURN_IF_ERROR(Refusal());
    if (joining_ && !joining_->done()) return joining_;
    joining_ = work = std::make_shared<Work>();
  }
  PushMembership(join_);
  return work;
}

std::shared_ptr<Work> Engine::Leave() {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(registry_);
    if (leaving_) return leaving_;
    leaving_ = work = std::make_shared<Work>();
    if (!final_error_.ok()) (void)work->Finish(final_error_);
  }
  if (!work->done()) PushMembership(leave_);
  return work;
}

// Through the queue, so that a caller need not wait for the engine, which may be inside a library.
void Engine::PushMembership(Operation& change) {
  if (!change.in_flight.exchange(true)) submissions_.Push(&change);
  urgent_.store(true);
  parts_.doorbell->Ring();
}

}  // namespace farandole
