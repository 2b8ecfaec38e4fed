#include "coordinator/engine/operation_registry.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

#include "coordinator/engine/engine.h"
#include "coordinator/protocol/splits.h"
#include "coordinator/protocol/validate.h"
#include "ops/cpu/quantize.h"

namespace farandole {
namespace {

// Unnamed calls of a kind share so many keys, so a script that uses no names binds a bounded number
// of ids, however long it runs (docs/decisions.md).
constexpr uint64_t kUnnamedSlots = 256;
// Operations that nobody holds, and their tensors, kept for whoever prepares them again.
constexpr int64_t kIdle = 1024;

std::string JoinNumbers(const std::vector<int32_t>& numbers) {
  std::string text;
  for (int32_t number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

/// What cannot be added up in the order of the tree over a job's slots is refused, on all ranks.
Status CheckSlots(const KeyName& name, const Signature& signature, int slots) {
  const bool is_floating = std::ranges::any_of(signature.tensors, [](const TensorSignature& one) {
    return IsFloating(CarrierOf(one.dtype).dtype);
  });
  Collective collective = signature;
  collective.kind = name.kind;
  if (slots == 0 || !is_floating || !AddsUp(collective)) return {};
  const std::string in_job = " in a job with " + std::to_string(slots) + " slots";
  if (collective.device == DeviceKind::kCuda) {
    return Unimplemented(Describe(name) + in_job +
                         ": floats on a GPU are not added up in the order of the slots; expected "
                         "tensors in host memory");
  }
  if (collective.wire_format != WireFormat::kInt8) return {};
  return InvalidArgument(Describe(name) + in_job +
                         ": an 8-bit wire rounds sums that other ranks add up otherwise; expected "
                         "no compression");
}

}  // namespace

OperationRegistry::OperationRegistry(Engine& engine, int rank, Lifecycle& lifecycle,
                                     const ProcessSetInfo& global,
                                     std::span<DataPlane* const> planes)
    : engine_(engine),
      rank_(rank),
      size_(static_cast<int>(global.ranks.size())),
      lifecycle_(lifecycle),
      planes_(planes),
      collect_above_(kIdle) {
  sets_[kGlobalSet] = global;
}

Result<Operation*> OperationRegistry::Prepare(const KeyName& name, const Signature& signature,
                                              uint32_t* version, std::span<const int64_t> splits) {
  std::lock_guard lock(mutex_);
  Result<Operation*> prepared = PrepareLocked(name, signature, splits);
  if (prepared.ok()) Hold(*prepared.value());
  if (prepared.ok() && version != nullptr) *version = prepared.value()->version;
  return prepared;
}

// Under mutex_.
void OperationRegistry::Hold(Operation& operation) {
  ++operation.handles;
  operation.was_held = true;
  idle_.fetch_sub(std::exchange(operation.idle_weight, 0), std::memory_order_relaxed);
}

void OperationRegistry::ReleaseHandle(Operation& operation) {
  std::lock_guard lock(mutex_);
  if (--operation.handles > 0) return;
  operation.idle_weight = 1 + std::ssize(operation.in);
  idle_.fetch_add(operation.idle_weight, std::memory_order_relaxed);
}

void ReleaseOperation::operator()(Operation* operation) const {
  operation->engine->operations().ReleaseHandle(*operation);
}

// Ranks match unnamed calls by number. A call that is refused or has to wait is not counted, or all
// later calls of this rank would be matched with the wrong ones of the others.
Result<Operation*> OperationRegistry::PrepareUnnamed(uint32_t set, OpKind kind,
                                                     const Signature& signature, uint32_t* version,
                                                     std::span<const int64_t> splits) {
  std::lock_guard lock(mutex_);
  if (!sets_.contains(set)) {
    FARANDOLE_RETURN_IF_ERROR(lifecycle_.Refusal());
    return WhyGone(set, std::string(Name(kind)) + ": ");
  }
  uint64_t& count = unnamed_[{set, kind}];
  const KeyName name{set, kind, UnnamedName(kind, count % kUnnamedSlots)};
  auto holder = holders_.find({name.set, SpaceOf(name.kind), name.name});
  bool is_busy = holder != holders_.end() && holder->second->load() != nullptr;
  // Release sets the name free first.
  auto former = operations_.find(KeyView(set, kind, signature.function, name.name));
  if (former != operations_.end()) is_busy |= former->second->in_flight.load();
  if (is_busy) return static_cast<Operation*>(nullptr);
  Result<Operation*> prepared = PrepareLocked(name, signature, splits);
  if (prepared.ok()) ++count;
  if (prepared.ok()) Hold(*prepared.value());
  if (prepared.ok() && version != nullptr) *version = prepared.value()->version;
  return prepared;
}

Result<Operation*> OperationRegistry::PrepareAddSet(const std::vector<int32_t>& ranks) {
  Signature signature;
  signature.ranks = ranks;
  std::sort(signature.ranks.begin(), signature.ranks.end());
  const bool repeated =
      std::adjacent_find(signature.ranks.begin(), signature.ranks.end()) != signature.ranks.end();
  if (ranks.empty() || repeated || signature.ranks.front() < 0 || signature.ranks.back() >= size_) {
    return InvalidArgument("process set of ranks [" + JoinNumbers(ranks) +
                           "]: expected distinct ranks from 0 to " + std::to_string(size_ - 1));
  }
  return PrepareSetChange(OpKind::kAddSet, signature);
}

Result<Operation*> OperationRegistry::PrepareRemoveSet(uint32_t uid) {
  Signature signature;
  signature.ranks = {static_cast<int32_t>(uid)};
  return PrepareSetChange(OpKind::kRemoveSet, signature);
}

// The key is the number of the call and not what is asked for: short, the same few for ever, and
// ranks that ask for different things meet and get an error.
Result<Operation*> OperationRegistry::PrepareSetChange(OpKind kind, const Signature& signature) {
  Result<Operation*> prepared = PrepareUnnamed(kGlobalSet, kind, signature, nullptr, {});
  if (!prepared.ok() || prepared.value() != nullptr) return prepared;
  return ResourceExhausted(std::string(Name(kind)) + ": " + std::to_string(kUnnamedSlots) +
                           " calls are in flight on rank " + std::to_string(rank_) +
                           "; wait for the first of them");
}

// Signatures are what ranks compare. What each rank has for itself, the factor of a premul_sum and
// the rows of an allgather or alltoall, is taken out here and kept beside the signature.
Result<Operation*> OperationRegistry::PrepareLocked(const KeyName& name, const Signature& signature,
                                                    std::span<const int64_t> splits) {
  if (Reduces(name.kind) && signature.op == ReduceOp::kPreMulSum) {
    Signature agreed = signature;
    const double own = std::exchange(agreed.prescale, 1.0);
    return FindOrDefine(name, agreed, {{}, splits, own});
  }
  if (!RowsMayDiffer(name.kind)) return FindOrDefine(name, signature, {{}, splits});
  std::vector<int64_t> rows;
  const Signature agreed = WithoutRows(signature, rows);
  if (!splits.empty() || name.kind != OpKind::kAlltoall)
    return FindOrDefine(name, agreed, {rows, splits});
  FARANDOLE_RETURN_IF_ERROR(CheckSet(name));
  const Result<std::vector<int64_t>> even =
      SplitEvenly(name, rows, sets_.at(name.set).ranks.size());
  if (!even.ok()) return even.status();
  return FindOrDefine(name, agreed, {rows, even.value()});
}

// Looked up by views: an operation that is prepared again as it was allocates nothing. It may be in
// flight.
Result<Operation*> OperationRegistry::FindOrDefine(const KeyName& name, const Signature& signature,
                                                   const Own& own) {
  auto found = operations_.find(KeyView(name.set, name.kind, signature.function, name.name));
  if (found != operations_.end() && SameDescription(found->second->signature, signature) &&
      std::ranges::equal(found->second->rows, own.rows) &&
      std::ranges::equal(found->second->splits, own.splits) &&
      found->second->prescale == own.prescale) {
    return found->second.get();
  }
  KeyName called = name;
  called.function = signature.function;
  return Define(called, signature, own);
}

// A new operation has no name until its description is known to be good and the name is free. While
// it is redefined this thread has it taken, so that no start on another thread reads half of a
// description.
Result<Operation*> OperationRegistry::Define(const KeyName& name, const Signature& signature,
                                             const Own& own) {
  FARANDOLE_RETURN_IF_ERROR(lifecycle_.Refusal());
  FARANDOLE_RETURN_IF_ERROR(CheckSet(name));
  const std::vector<int32_t>& ranks = sets_.at(name.set).ranks;
  FARANDOLE_RETURN_IF_ERROR(Validate(name, signature, ranks));
  FARANDOLE_RETURN_IF_ERROR(CheckSlots(name, signature, sets_.at(name.set).slots));
  FARANDOLE_RETURN_IF_ERROR(CheckPassedRows(name, signature, own.rows));
  FARANDOLE_RETURN_IF_ERROR(CheckSplits(name, signature, own.rows, own.splits, ranks.size()));
  Result<Residuals> residuals = ResidualsFor(name, signature);
  if (!residuals.ok()) return residuals.status();
  const auto place = operations_.try_emplace({name.set, name.kind, name.function, name.name}).first;
  std::unique_ptr<Operation>& slot = place->second;
  const bool fresh = slot == nullptr;
  if (fresh) {
    try {
      slot = NewOperation(name);
    } catch (...) {
      operations_.erase(place);  // nobody expects a place without an operation
      throw;
    }
  }
  if (!(fresh ? slot->TakeName() : slot->Take())) {
    const bool is_another = slot->holder->load() != slot.get();
    // Not Release: the holder of the name is another operation, and must stay.
    if (fresh) slot->in_flight.store(false);
    if (is_another) return InFlight(*slot);
    return InvalidArgument(
        Describe(name) +
        " is in flight with another shape, dtype or options; wait for it, or use another name");
  }
  const ClaimedOperation claimed(*slot);
  try {
    Redefine(*slot, signature, own, std::move(residuals).value());
  } catch (...) {
    slot->signature = Signature();  // nobody finds half of a description
    throw;
  }
  return slot.get();
}

// Before ranks agree on anything, so that who lacks the memory is told by the call. None without a
// name, as the next such call may be about something else. calloc: pages of large tensors whose
// residuals a rank never uses, as those of other ranks' shards, take no memory.
Result<Residuals> OperationRegistry::ResidualsFor(const KeyName& name,
                                                  const Signature& signature) const {
  Residuals residuals;
  const ProcessSetInfo& set = sets_.at(name.set);
  const size_t number = set.planes.empty() ? 0 : set.planes.front();  // of DeviceKind::kCpu
  if (number >= planes_.size() || !planes_[number]->quantizes() || IsUnnamed(name))
    return residuals;
  Collective collective = signature;
  collective.kind = name.kind;
  for (const TensorSignature& tensor : signature.tensors) {
    const bool is_quantized = IsQuantized(collective, tensor.dtype, set.ranks.size());
    const auto count = is_quantized ? static_cast<size_t>(tensor.Count()) : 0;
    float* const memory =
        static_cast<float*>(count > 0 ? std::calloc(count, sizeof(float)) : nullptr);
    residuals.emplace_back(memory);
    if (memory != nullptr || count == 0) continue;
    return ResourceExhausted(Describe(name) + ": no memory for what the 8-bit wire leaves over: " +
                             std::to_string(count * sizeof(float)) + " bytes");
  }
  return residuals;
}

// A spare one if there is any; in flight, without its name. Its new description's version tells it
// from what it was. Only sets other than that of all ranks use spare ones: on that set handles are
// good without a version, and must never mean another operation.
std::unique_ptr<Operation> OperationRegistry::NewOperation(const KeyName& name) {
  std::unique_ptr<Operation> operation;
  for (size_t i = 0; i < spare_.size() && name.set != kGlobalSet; ++i) {
    // Who holds an old handle may be trying it just now.
    if (spare_[i]->in_flight.exchange(true)) continue;
    std::swap(spare_[i], spare_.back());
    operation = std::move(spare_.back());
    spare_.pop_back();
    break;
  }
  if (operation == nullptr) operation = std::make_unique<Operation>();
  operation->engine = &engine_;
  operation->name = name;
  operation->in_flight.store(true);
  auto& holder = holders_[{name.set, SpaceOf(name.kind), name.name}];
  if (holder == nullptr) holder = std::make_shared<std::atomic<const Operation*>>(nullptr);
  operation->holder = holder;
  operation->first_version = operation->version + 1;
  operation->ended = false;
  return operation;
}

// The new version makes Claim refuse handles to the former description. The vectors of addresses
// get their size here, so that a start only copies into them.
void OperationRegistry::Redefine(Operation& operation, const Signature& signature, const Own& own,
                                 Residuals residuals) {
  operation.signature = signature;
  operation.signature.kind = operation.name.kind;
  operation.rows.assign(own.rows.begin(), own.rows.end());
  operation.splits.assign(own.splits.begin(), own.splits.end());
  operation.prescale = own.prescale;
  operation.ranks = sets_.at(operation.name.set).ranks.size();
  operation.is_of_all_ranks = operation.ranks == static_cast<size_t>(size_);
  ++operation.version;
  const size_t tensors = signature.tensors.size();
  operation.in.assign(tensors, nullptr);
  operation.out.assign(tensors, nullptr);
  operation.residuals = std::move(residuals);
  operation.extents.clear();
  for (size_t t = 0; t < tensors; ++t) {
    operation.extents.push_back(ExtentOf(operation, t, sets_.at(operation.name.set).ranks, rank_));
  }
}

// The set is live and this rank is in it.
Status OperationRegistry::CheckSet(const KeyName& name) const {
  auto found = sets_.find(name.set);
  if (found == sets_.end()) return WhyGone(name.set, Describe(name) + ": ", name.name);
  const std::vector<int32_t>& ranks = found->second.ranks;
  if (std::find(ranks.begin(), ranks.end(), rank_) != ranks.end()) return {};
  return InvalidArgument(Describe(name) + ": rank " + std::to_string(rank_) +
                         " is no member of process set " + std::to_string(name.set) +
                         ", which has ranks " + JoinNumbers(ranks));
}

// Why no such set is live, for `tensor`; the message begins with `who`.
Status OperationRegistry::WhyGone(uint32_t set, const std::string& who,
                                  const std::string& tensor) const {
  const EndedSet* ended = ended_sets_.Find(set);
  if (ended != nullptr && !ended->why.ok()) {
    FailureFacts facts = ended->why.facts();
    facts.tensor = tensor;
    return {ended->why.code(), who + ended->why.message(), std::move(facts)};
  }
  return InvalidArgument(who + "process set " + std::to_string(set) +
                         (ended != nullptr   ? " was removed"
                          : set <= last_uid_ ? " has ended"
                                             : " is unknown"));
}

// Takes no mutex unless it fails. Who has taken the operation may read `ended` and `version`,
// because Define and CollectEnded take it before they change them.
Status OperationRegistry::Claim(Operation& operation, uint32_t version) {
  const bool taken = operation.Take();
  if (taken && !operation.ended && (version == 0 || version == operation.version)) return {};
  std::lock_guard lock(mutex_);
  std::optional<ClaimedOperation> claimed;
  if (taken) claimed.emplace(operation);
  return WhyNotClaimed(operation, version);
}

// Under mutex_, because the operation may be becoming another one.
Status OperationRegistry::WhyNotClaimed(const Operation& operation, uint32_t version) const {
  if (operation.ended || (version != 0 && version < operation.first_version)) {
    return Aborted("the process set of this operation has ended; prepare it in another one");
  }
  if (version == 0 || version == operation.version) return InFlight(operation);
  return InvalidArgument(Describe(operation.name) +
                         " was redefined by another thread, with another shape, dtype or "
                         "options; use another name");
}

// Why it cannot be taken. Its holder is read once: it may be through in the meantime.
Status OperationRegistry::InFlight(const Operation& operation) const {
  const Operation* const holder = operation.holder->load();
  std::string as;
  if (holder != nullptr && holder != &operation) {
    as = ", as " + CalledAs(holder->name.kind, holder->name.function);
  }
  return InvalidArgument(Describe(operation.name) + " is already in flight on rank " +
                         std::to_string(rank_) + as + "; wait for it, or use another name");
}

Result<ProcessSetInfo> OperationRegistry::SetOf(const std::vector<int32_t>& ranks) const {
  std::vector<int32_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  std::lock_guard lock(mutex_);
  for (const auto& [uid, set] : sets_) {
    if (set.ranks == sorted) return set;
  }
  return InvalidArgument("there is no process set of ranks [" + JoinNumbers(sorted) + "]");
}

Result<ProcessSetInfo> OperationRegistry::FindSet(uint32_t uid) const {
  std::lock_guard lock(mutex_);
  FARANDOLE_RETURN_IF_ERROR(lifecycle_.Refusal());
  auto found = sets_.find(uid);
  if (found == sets_.end()) return WhyGone(uid, "");
  return found->second;
}

// Called by the holder of the engine lock and by the watchdog. An operation that a caller is still
// filling in (not `started`) is left out: the step that takes it from the queue ends it, or the
// next call of this function.
void OperationRegistry::FailInFlight(const Status& status) {
  std::lock_guard lock(mutex_);
  for (auto& entry : operations_) {
    (void)entry.second->Finish(status);  // false: another thread ends it
  }
  for (auto& operation : ending_) {
    (void)operation->Finish(status);
  }
  lifecycle_.EndJoin(status);
  lifecycle_.EndLeave(status);
}

void OperationRegistry::Bind(Operation& operation) {
  if (by_key_.size() <= operation.key) by_key_.resize(operation.key + 1, nullptr);
  Operation*& bound = by_key_[operation.key];
  // The key may be released while it is this one's alone, so the former one asks for it again.
  if (bound != nullptr && bound != &operation) bound->key = Operation::kUnknownKey;
  bound = &operation;
}

void OperationRegistry::Release(KeyId key) {
  Operation* operation = Find(key);
  if (operation == nullptr) return;
  operation->key = Operation::kUnknownKey;  // of one that was submitted after its set had ended
  by_key_[key] = nullptr;
}

void OperationRegistry::AddSet(const ProcessSetInfo& set) {
  std::lock_guard lock(mutex_);
  sets_[set.uid] = set;
  last_uid_ = std::max(last_uid_, set.uid);
}

// From here on the set's names are refused. Operations in flight stay in by_key_ until their keys
// are released, because the negotiation has to end them, and in ending_ until CollectEnded, because
// decided batches still use them.
void OperationRegistry::EndSet(uint32_t set, const Status& why) {
  std::lock_guard lock(mutex_);
  sets_.erase(set);
  ended_sets_.Add({set, 0, why});
  if (set == kGlobalSet) return;  // its operations are refused by name
  const auto begin = operations_.lower_bound(KeyView(set, OpKind{}, "", ""));
  auto end = begin;
  for (; end != operations_.end() && std::get<0>(end->first) == set; ++end) {
    // Its key is about to be another's, and several kinds may share it.
    end->second->key = Operation::kUnknownKey;
    ending_.push_back(std::move(end->second));
  }
  operations_.erase(begin, end);
  // Operations share the ownership of their holder, so those in flight can still release it.
  holders_.erase(holders_.lower_bound({set, OpKind{}, ""}),
                 holders_.lower_bound({set + 1, OpKind{}, ""}));
  std::erase_if(unnamed_, [set](const auto& count) { return count.first.first == set; });
  has_ending_ = !ending_.empty();
}

// Called in every iteration of the engine loop.
void OperationRegistry::Collect(const Executor& executor) {
  if (has_ending_) CollectEnded(executor);
  if (idle_.load(std::memory_order_relaxed) > collect_above_) CollectIdle(executor);
}

// An operation may become another set's when no batch of its own set is left, since a launched
// batch refers to operations that are done, and when nobody has claimed it.
void OperationRegistry::CollectEnded(const Executor& executor) {
  std::lock_guard lock(mutex_);
  std::erase_if(ending_, [&](std::unique_ptr<Operation>& operation) {
    if (executor.Knows(operation->name.set) || operation->in_flight.exchange(true)) return false;
    operation->Empty();
    operation->in_flight.store(false);
    spare_.push_back(std::move(operation));
    return true;
  });
  has_ending_ = !ending_.empty();
}

// The negotiation forgets their keys and frees their ids once it finds no operation bound to
// them (EngineLoop::Holds).
void OperationRegistry::CollectIdle(const Executor& executor) {
  std::lock_guard lock(mutex_);
  std::erase_if(operations_, [&](auto& entry) { return IsCollected(*entry.second, executor); });
  std::erase_if(spare_, [&](auto& operation) { return IsCollected(*operation, executor); });
  // Operations share the ownership of their holder.
  std::erase_if(holders_, [](const auto& entry) { return entry.second.use_count() == 1; });
  const int64_t left = idle_.load(std::memory_order_relaxed);
  collect_above_ = left + std::max(kIdle, left / 4);
}

bool OperationRegistry::IsCollected(Operation& operation, const Executor& executor) {
  if (operation.handles > 0 || std::exchange(operation.was_held, false)) return false;
  if (executor.Uses(operation) || operation.in_flight.exchange(true)) return false;
  if (operation.key != Operation::kUnknownKey) by_key_[operation.key] = nullptr;
  idle_.fetch_sub(operation.idle_weight, std::memory_order_relaxed);
  return true;
}

void OperationRegistry::ResetUnnamed() {
  std::lock_guard lock(mutex_);
  unnamed_.clear();
}

OperationRegistry::TableSizes OperationRegistry::Sizes() const {
  std::lock_guard lock(mutex_);
  return {sets_.size(), operations_.size(), ending_.size() + spare_.size(), unnamed_.size()};
}

}  // namespace farandole
