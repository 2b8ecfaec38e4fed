#include "coordinator/engine/executor.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

/// One plane may serve several kinds of devices.
bool IsRepeated(std::span<DataPlane* const> planes, size_t kind) {
  const auto at = planes.begin() + static_cast<std::ptrdiff_t>(kind);
  return std::find(planes.begin(), at, *at) != at;
}

/// After a final error.
Status MemoryReleased() { return Aborted("the borrowed tensors were released"); }

/// To a plane a premul_sum is a sum; `operation` is nullptr on a rank that joined. The signature
/// has 1.0 in the place of a factor that is each rank's own, so it comes from the operation.
void UseOwnPrescale(Batch& batch, const Operation* operation) {
  batch.op = ReduceOp::kSum;
  if (operation != nullptr) batch.prescale = operation->prescale;
}

// While a batch runs, Step is wanted at least this often, even if nothing rings. CountActiveTime
// can only tell a process that was stopped from peers that are silent if iterations of the engine
// loop are frequent otherwise.
constexpr int64_t kPeriodNs = kNsPerSecond;

// CountActiveTime counts a gap as two periods at most. With an eighth of the shortest deadline, one
// gap uses up no more than a quarter of it.
int64_t PeriodOf(const Executor::Options& options) {
  const int64_t shortest =
      *std::min_element(options.progress_timeout_ns.begin(), options.progress_timeout_ns.end());
  return std::min(kPeriodNs, shortest / 8);
}

}  // namespace

Executor::Executor(Options options, std::vector<DataPlane*> planes, Counters& counters,
                   ExecutorEvents& events, BorrowedMemory& memory)
    : options_(options),
      planes_(std::move(planes)),
      counters_(counters),
      events_(events),
      memory_(memory),
      period_ns_(PeriodOf(options)) {}

Status Executor::AddSet(const ProcessSetInfo& info) {
  auto me = std::find(info.ranks.begin(), info.ranks.end(), options_.rank);
  if (me == info.ranks.end()) return {};
  auto set = std::make_unique<Set>();
  set->ranks.assign(info.ranks.begin(), info.ranks.end());
  if (info.slots > 0) set->slots = SlotRanges(info.slots, static_cast<int>(set->ranks.size()));
  set->my_index = static_cast<int>(me - info.ranks.begin());
  for (size_t kind = 0; kind < set->planes.size(); ++kind) {
    const size_t number = kind < info.planes.size() ? info.planes[kind] : 0;
    if (number >= planes_.size()) {
      return Internal("process set " + std::to_string(info.uid) + " wants data plane number " +
                      std::to_string(number) + " of " + std::to_string(planes_.size()));
    }
    set->planes[kind] = planes_[number];
    if (IsRepeated(set->planes, kind)) continue;
    FARANDOLE_RETURN_IF_ERROR(planes_[number]->AddSet(info.uid, set->ranks, set->my_index));
  }
  sets_[info.uid] = std::move(set);
  return {};
}

// Decided batches still run after RemoveSet and Left (docs/protocol.md), so the planes keep the set
// until its last batch has finished.
void Executor::EndSet(uint32_t uid) {
  if (Set* set = FindSet(uid)) {
    set->ended = true;
    DropIfEnded(uid);
  }
}

// Frees the Set: Running::set must not be used afterwards.
void Executor::DropIfEnded(uint32_t uid) {
  Set* set = FindSet(uid);
  if (set == nullptr || !set->ended || set->running > 0) return;
  for (size_t kind = 0; kind < set->planes.size(); ++kind) {
    if (!IsRepeated(set->planes, kind)) set->planes[kind]->RemoveSet(uid);
  }
  sets_.erase(uid);
}

Executor::Set* Executor::FindSet(uint32_t uid) {
  auto found = sets_.find(uid);
  return found == sets_.end() ? nullptr : found->second.get();
}

Agreement* Executor::AgreementOf(uint32_t uid) {
  Set* const set = FindSet(uid);
  const auto cpu = static_cast<size_t>(DeviceKind::kCpu);
  return set == nullptr ? nullptr : set->planes[cpu]->AgreementOf(uid);
}

// Batches are only queued here; Step starts them in this order. FormBatches is a pure function of
// the decision, so all members start the same batches in the same order, on which planes rely to
// match messages.
Status Executor::Execute(const WorkDecision& work, int64_t now_ns) {
  Set* set = FindSet(work.set);
  if (set == nullptr) return Internal("work for unknown process set " + std::to_string(work.set));
  CountActiveTime(now_ns);
  std::span<const BatchPlan> plans = work.plans;
  if (plans.empty()) {
    size_t count = 0;
    FormBatches(work, options_.fusion_threshold_bytes[static_cast<size_t>(work.device())], plans_,
                &count);
    plans = std::span(plans_).first(count);
  }
  FARANDOLE_RETURN_IF_ERROR(ClaimOperations(work, plans, now_ns));
  if (set->running == 0) set->moved_ns.fill(active_ns_);
  for (size_t i = 0; i < plans.size(); ++i) {
    if (pool_.empty()) pool_.push_back(std::make_unique<Running>());
    std::unique_ptr<Running> run = std::move(pool_.back());
    pool_.pop_back();
    run->batch.index = static_cast<int32_t>(i);
    FARANDOLE_RETURN_IF_ERROR(Fill(*run, work, plans[i], *set));
    run->batch.is_followed =
        i + 1 < plans.size() && CanBeJoined(work, plans[i]) && CanBeJoined(work, plans[i + 1]);
    counters_.Add(Counter::kBatches);
    counters_.Add(Counter::kTensors, static_cast<int64_t>(plans[i].entries.size()));
    // TakeSizes counts the bytes of an alltoall.
    if (run->sizes.is_known) CountBytes(run->batch, plans[i].bytes);
    running_.push_back(std::move(run));
    ++set->running;
  }
  // Comes last: once an operation is done, its owner may start it again at once on another thread.
  // No batch refers to these.
  for (Operation* operation : decided_) {
    if (operation != nullptr && operation->batches_left == 0) events_.OnOperationDone(*operation);
  }
  return {};
}

void Executor::CountBytes(const Batch& batch, int64_t bytes) {
  counters_.Add(Counter::kBatchBytes, bytes);
  if (batch.wire != batch.dtype) bytes = bytes / SizeOf(batch.dtype) * SizeOf(batch.wire);
  counters_.Add(Counter::kWireBytes, bytes);
}

// One collective on its plane, which waits for no exchange of sizes before it starts.
bool Executor::CanBeJoined(const WorkDecision& work, const BatchPlan& plan) {
  const auto key = static_cast<size_t>(plan.entries.front().key);
  const Signature& signature = *work.keys[key].signature;
  return signature.kind == OpKind::kAllreduce && signature.op != ReduceOp::kAdasum;
}

// What gives the memory is the user's, and borrowed like tensors: nobody may call it any more once
// the operation has been given up.
Status Executor::ProvideResults(Operation& operation, const DecidedKey& key) {
  const AcquiredMemory acquired(memory_);
  if (!acquired.is_held()) return MemoryReleased();
  const size_t tensors = key.signature->tensors.size();
  const size_t ranks = key.rows.size() / tensors;
  for (size_t t = 0; t < tensors; ++t) {
    if (key.signature->kind == OpKind::kAllgather) {
      operation.ProvideResult(t, OfTensor(key.rows, t, ranks));
    } else if (key.signature->kind == OpKind::kAllreduce &&
               !TestBit(*key.skipped, static_cast<int>(t))) {
      operation.ProvideAbsent(t);
    }
  }
  return {};
}

// Looks up this rank's operations and counts in how many batches each takes part.
Status Executor::ClaimOperations(const WorkDecision& work, std::span<const BatchPlan> plans,
                                 int64_t now_ns) {
  decided_.clear();
  for (const DecidedKey& key : work.keys) {
    Operation* operation = key.mine ? events_.FindOperation(key.key) : nullptr;
    if (operation != nullptr) {
      operation->decided_ns = now_ns;
      operation->batches_left = 0;
      operation->work->SetSkipped(*key.skipped);
    }
    decided_.push_back(operation);
    // Before Fill, which copies the addresses of the results into the segments.
    if (operation != nullptr &&
        (key.signature->kind == OpKind::kAllgather || operation->allocator != nullptr)) {
      FARANDOLE_RETURN_IF_ERROR(ProvideResults(*operation, key));
    }
  }
  for (const BatchPlan& plan : plans) {
    int32_t last = -1;
    for (const BatchEntry& entry : plan.entries) {
      // FormBatches goes through the keys in order, so the tensors of a key that share a batch
      // stand next to one another in it.
      if (entry.key == last) continue;
      last = entry.key;
      Operation* operation = decided_[static_cast<size_t>(entry.key)];
      if (operation != nullptr) ++operation->batches_left;
    }
  }
  return {};
}

// The batch consists of spans into `run` and `set`, and the plane uses them until the operation
// ends: neither may be moved or filled again before. The first entry speaks for all others of its
// batch, which FormBatches has found compatible with it.
Status Executor::Fill(Running& run, const WorkDecision& work, const BatchPlan& plan, Set& set) {
  const BatchEntry& first = plan.entries.front();
  const DecidedKey& key = work.keys[static_cast<size_t>(first.key)];
  const Signature& signature = *key.signature;
  Batch& batch = run.batch;
  batch.number = work.number;
  batch.set = work.set;
  batch.ranks = set.ranks;
  batch.my_index = set.my_index;
  static_cast<Collective&>(batch) = signature;
  const Carrier carrier = CarrierOf(signature.tensors[static_cast<size_t>(first.tensor)].dtype);
  batch.dtype = carrier.dtype;
  run.width = carrier.count;
  batch.wire = WireDType(batch.dtype, signature.wire_format);
  if (batch.op == ReduceOp::kPreMulSum)
    UseOwnPrescale(batch, decided_[static_cast<size_t>(first.key)]);
  batch.slots = {};
  if (AddsUp(batch) && IsFloating(batch.dtype)) batch.slots = set.slots;
  batch.root_index = 0;
  if (batch.kind == OpKind::kBroadcast) {
    batch.root_index = static_cast<int>(PositionOf(signature.root, set.ranks));
  }
  run.absent.clear();
  for (int32_t rank : plan.absent) {
    run.absent.push_back(static_cast<int>(PositionOf(rank, set.ranks)));
  }
  run.set = &set;
  run.tensor = static_cast<size_t>(first.tensor);
  run.plane = set.planes[static_cast<size_t>(signature.device)];
  run.operation = nullptr;
  run.launched = run.credited = false;
  run.began_ns = 0;
  FARANDOLE_RETURN_IF_ERROR(AddSegments(
      run, work, plan, std::binary_search(run.absent.begin(), run.absent.end(), set.my_index)));
  if (IsVariableSize(batch.kind)) FARANDOLE_RETURN_IF_ERROR(AddCounts(run, key));
  run.sizes.is_known = batch.kind != OpKind::kAlltoall;
  // Spans come after the last insertion, since vectors that grow move.
  batch.absent = run.absent;
  batch.segments = run.segments;
  run.ready.clear();
  for (const Operation* operation : run.operations) {
    for (size_t i = 0; i < operation->ready_count; ++i) {
      run.ready.push_back(operation->ready[i]);
    }
  }
  batch.ready = run.ready;
  return {};
}

// A rank that joined has no operation: it takes part with null pointers. One that voted absent
// contributes nothing but receives the result.
Status Executor::AddSegments(Running& run, const WorkDecision& work, const BatchPlan& plan,
                             bool absent_here) {
  run.segments.clear();
  run.operations.clear();
  run.batch.count = 0;
  int32_t last = -1;
  for (const BatchEntry& entry : plan.entries) {
    const auto tensor = static_cast<size_t>(entry.tensor);
    Operation* operation = decided_[static_cast<size_t>(entry.key)];
    Segment segment;
    const Signature& signature = *work.keys[static_cast<size_t>(entry.key)].signature;
    segment.count = signature.tensors[tensor].Count() * run.width;
    if (operation != nullptr) {
      segment.in = absent_here ? nullptr : operation->in[tensor];
      segment.out = operation->out[tensor];
      if (tensor < operation->residuals.size())
        segment.residual = operation->residuals[tensor].get();
      if (entry.key != last) run.operations.push_back(operation);
    }
    last = entry.key;
    run.batch.count += segment.count;
    run.segments.push_back(segment);
  }
  return {};
}

// How the one tensor of a variable-size collective is divided, in elements.
Status Executor::AddCounts(Running& run, const DecidedKey& key) {
  const Signature& signature = *key.signature;
  run.counts.clear();
  run.sends.clear();
  run.receives.clear();
  if (signature.kind == OpKind::kAllgather || signature.kind == OpKind::kReducescatter) {
    // A signature has 0 rows for an allgather, so the counts from AddSegments are corrected.
    CountsOf(signature, key.rows, run.tensor, run.set->ranks.size(), run.counts);
    for (int64_t& count : run.counts) count *= run.width;
    run.batch.count = std::reduce(run.counts.begin(), run.counts.end());
    run.segments.front().count = run.batch.count;
  }
  run.batch.splits = run.counts;
  if (signature.kind != OpKind::kAlltoall) return {};
  // Rank 0 refuses an alltoall from which a rank is absent, so this is a broken protocol.
  if (run.operations.empty()) return Internal(Describe(*key.name) + ": decided for a joined rank");
  FillSizes(run);
  return {};
}

// Each rank sends each other one two numbers: the rows for it, and the most rows that it sends to
// anyone. From the second ones all ranks compute the same maximum, which Batch::count must be.
void Executor::FillSizes(Running& run) {
  SizeExchange& sizes = run.sizes;
  const size_t ranks = run.set->ranks.size();
  const auto splits = OfTensor(run.operations.front()->splits, run.tensor, ranks);
  const int64_t most = *std::ranges::max_element(splits);
  sizes.sent.clear();
  for (const int64_t rows : splits) sizes.sent.insert(sizes.sent.end(), {rows, most});
  sizes.received.assign(2 * ranks, 0);
  sizes.counts.assign(ranks, 2);
  sizes.segment = {sizes.sent.data(), sizes.received.data(), 2};
  sizes.batch = Batch();
  sizes.batch.kind = OpKind::kAlltoall;
  sizes.batch.number = run.batch.number;
  sizes.batch.index = run.batch.index;
  sizes.batch.set = run.batch.set;
  sizes.batch.ranks = run.batch.ranks;
  sizes.batch.my_index = run.batch.my_index;
  sizes.batch.dtype = sizes.batch.wire = DType::kInt64;
  sizes.batch.segments = {&sizes.segment, 1};
  sizes.batch.count = 2;
  sizes.batch.sends = sizes.batch.receives = sizes.counts;
}

// Numbers of other ranks are checked before they size anything. The maximum is equal on all ranks,
// so all agree on whether a payload follows. A rank without memory for its result takes part all
// the same and drops it, because the others may have begun.
Result<bool> Executor::TakeSizes(Running& run) {
  Operation& operation = *run.operations.front();
  const size_t ranks = run.set->ranks.size();
  const int64_t row = RowCount(operation.signature.tensors[run.tensor]) * run.width;
  const auto splits = OfTensor(operation.splits, run.tensor, ranks);
  std::vector<int64_t>& rows = run.sizes.counts;  // from each rank
  int64_t most = 0;
  for (size_t p = 0; p < ranks; ++p) {
    rows[p] = run.sizes.received[2 * p];
    most = std::max(most, run.sizes.received[2 * p + 1]);
  }
  for (const std::span<const int64_t> sizes : {std::span<const int64_t>(rows), {&most, 1}}) {
    const Status possible =
        CheckSum(operation.name, operation.signature.tensors[run.tensor], sizes);
    if (!possible.ok()) return Internal("sizes from other ranks: " + possible.message());
  }
  for (size_t p = 0; p < ranks; ++p) {
    run.sends.push_back(splits[p] * row);
    run.receives.push_back(rows[p] * row);
  }
  operation.ProvideResult(run.tensor, rows);
  run.batch.sends = run.sends;
  run.batch.receives = run.receives;
  run.batch.count = run.segments.front().count = most * row;
  run.segments.front().out = operation.out[run.tensor];
  run.sizes.is_known = true;
  CountBytes(run.batch, std::reduce(run.sends.begin(), run.sends.end()) * SizeOf(run.batch.dtype));
  return run.batch.count == 0;
}

// A gap of more than two periods is none of the peers' fault: this process did not run.
void Executor::CountActiveTime(int64_t now_ns) {
  if (!Idle()) active_ns_ += std::clamp<int64_t>(now_ns - now_ns_, 0, 2 * period_ns_);
  now_ns_ = now_ns;
}

// The memory is acquired for each batch and not for the whole iteration, so a watchdog that revokes
// it waits for about one chunk. An error of a plane is final and ends everything.
Executor::StepResult Executor::Step(int64_t now_ns) {
  CountActiveTime(now_ns);
  StepResult result;
  for (size_t i = 0; i < running_.size() && result.status.ok();) {
    if (Advance(*running_[i], &result)) {
      Finish(i);
    } else if (result.status.ok()) {
      ++i;
    }
  }
  if (!result.status.ok()) AbandonAll();
  return result;
}

// @return whether it is done; `result->status` says whether it failed.
bool Executor::Advance(Running& run, StepResult* result) {
  const AcquiredMemory acquired(memory_);
  result->status = acquired.is_held() ? StartIfNew(run) : MemoryReleased();
  return result->status.ok() && StepOne(run, result);
}

// Sizes are exchanged on the set's CPU plane, wherever the tensors are.
DataPlane& Executor::PlaneOf(const Running& run) {
  return run.sizes.is_known ? *run.plane : *run.set->planes[static_cast<size_t>(DeviceKind::kCpu)];
}

// In decision order, also for batches that are several collectives to their plane: members must
// start the collectives of a set in one order, so that no other starts between those of one batch.
Status Executor::StartIfNew(Running& run) {
  const bool waits = run.set->starting != nullptr && run.set->starting != &run;
  if (run.operation != nullptr || waits) return {};
  if (run.began_ns == 0) run.began_ns = events_.now_ns();
  run.started_ns = active_ns_;
  run.set->starting = run.sizes.is_known && !IsAdasum(run.batch) ? nullptr : &run;
  Result<PlaneOperation*> started = Start(run);
  if (started.ok()) run.operation = started.value();
  return started.status();
}

Result<PlaneOperation*> Executor::Start(Running& run) {
  if (!run.sizes.is_known) return PlaneOf(run).Start(run.sizes.batch);
  if (!IsAdasum(run.batch)) return PlaneOf(run).Start(run.batch);
  std::unique_ptr<AdasumAllreduce>& adasum = run.set->adasum;  // one at a time
  if (adasum == nullptr) adasum = std::make_unique<AdasumAllreduce>();
  FARANDOLE_RETURN_IF_ERROR(adasum->Begin(PlaneOf(run), run.batch));
  return adasum.get();
}

// The batches of a set have one deadline together: one that moves shows that the peers run, and
// those after it may only be waiting for it. But what moves in host memory does not show that the
// peers' GPUs do. To wait for this rank's own inputs is progress in this sense, since no peer is at
// fault.
bool Executor::StepOne(Running& run, StepResult* result) {
  if (run.operation == nullptr) return false;  // behind a batch that has yet to start another
  const Progress progress = run.operation->Step();
  if (progress.state == Progress::State::kFailed) {
    run.operation = nullptr;
    // After kFailed the operation is the plane's again; AbandonAll must not touch it.
    result->status = progress.status;
    return false;
  }
  if (progress.state == Progress::State::kWaiting) {
    if (progress.for_inputs) NoteProgress(run);
    if (active_ns_ > DeadlineOf(run)) {
      result->status = DescribeTimeout(run);
    } else if (progress.poll_after_ns != kByDoorbell &&
               (result->poll_after_ns == kByDoorbell ||
                progress.poll_after_ns < result->poll_after_ns)) {
      result->poll_after_ns = progress.poll_after_ns;
    }
    return false;
  }
  result->moved = true;
  NoteProgress(run);
  if (progress.state == Progress::State::kLaunched) Launch(run);
  if (progress.state != Progress::State::kDone || run.sizes.is_known) {
    return progress.state == Progress::State::kDone;
  }
  // The size exchange is complete. The payload starts in the next iteration, before any later batch
  // of the set.
  run.operation = nullptr;
  const Result<bool> is_empty = TakeSizes(run);
  result->status = is_empty.status();
  return is_empty.ok() && is_empty.value();
}

// The operations are done as far as the host is concerned: streams can wait for the end. Their
// count ends here, and Finish leaves them alone.
void Executor::Launch(Running& run) {
  run.launched = true;
  run.device_bytes = run.batch.count * SizeOf(run.batch.dtype);
  events_.OnBatchEnds();
  for (Operation* operation : run.operations) {
    operation->work->SetEnd(run.operation->end());
    if (--operation->batches_left == 0) events_.OnOperationDone(*operation);
  }
  CreditLaunched();
}

// The host runs ahead of the GPU: what is launched makes room for the next decision, up to a bound
// of bytes that the device has yet to reduce, so that a rank whose GPU is slow still holds the
// others back. In order, since batches of one device end in order.
void Executor::CreditLaunched() {
  int64_t bytes = 0;
  for (size_t i = 0; i < running_.size(); ++i) {
    if (!running_[i]->launched) continue;
    bytes += running_[i]->device_bytes;
    if (bytes > options_.launched_bytes) return;
    Credit(*running_[i]);
  }
}

void Executor::Credit(Running& run) {
  if (run.credited) return;
  run.credited = true;
  events_.OnBatchDone(run.batch, run.began_ns);
}

// The operations of a launched batch were done in Launch and may be in flight again by now, so they
// are not touched. Callers are woken first, and then rank 0 may free its window.
void Executor::Finish(size_t position) {
  std::unique_ptr<Running> run = std::move(running_[position]);
  if (run->set->starting == run.get()) run->set->starting = nullptr;
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(position));
  if (!run->launched) events_.OnBatchEnds();
  for (Operation* operation : run->operations) {
    if (run->launched) break;
    if (--operation->batches_left == 0) events_.OnOperationDone(*operation);
  }
  --run->set->running;
  Credit(*run);
  if (run->launched) CreditLaunched();
  DropIfEnded(run->batch.set);
  pool_.push_back(std::move(run));
}

DeviceKind Executor::DeviceOf(const Running& run) {
  return run.sizes.is_known ? run.batch.device : DeviceKind::kCpu;
}

void Executor::NoteProgress(const Running& run) {
  run.set->moved_ns[static_cast<size_t>(DeviceKind::kCpu)] = active_ns_;
  run.set->moved_ns[static_cast<size_t>(DeviceOf(run))] = active_ns_;
}

bool Executor::Uses(const Operation& operation) const {
  return std::ranges::any_of(running_, [&](const std::unique_ptr<Running>& run) {
    return std::ranges::find(run->operations, &operation) != run->operations.end();
  });
}

// In lived time. Of a batch on a GPU after some in host memory alone it counts from its start.
int64_t Executor::DeadlineOf(const Running& run) const {
  const int64_t moved_ns = run.set->moved_ns[static_cast<size_t>(DeviceOf(run))];
  return std::max(moved_ns, run.started_ns) + TimeoutOf(run);
}

int64_t Executor::TimeoutOf(const Running& run) const {
  return options_.progress_timeout_ns[static_cast<size_t>(DeviceOf(run))];
}

Status Executor::DescribeTimeout(const Running& run) const {
  std::string text = std::string(Name(run.batch.kind)) + " batch ";
  if (run.batch.number > 0)  // else agreed on without votes
    text += std::to_string(run.batch.number) + "." + std::to_string(run.batch.index) + " ";
  text += "of " + std::to_string(run.segments.size()) + " tensors";
  const bool on_gpu = run.sizes.is_known && run.batch.device == DeviceKind::kCuda;
  FailureFacts facts;
  if (!run.operations.empty()) facts.tensor = run.operations.front()->name.name;
  if (!run.operations.empty()) text += " (first \"" + facts.tensor + "\")";
  text = "rank " + std::to_string(options_.rank) + ": " + text + " on process set " +
         std::to_string(run.batch.set) + " made no progress for " +
         std::to_string(TimeoutOf(run) / kNsPerMs) + " ms on the " + PlaneOf(run).name() +
         " plane; a peer has stopped or its link is down" +
         (on_gpu ? ", or its GPU is this far behind" : "");
  return {Code::kTimeout, std::move(text), std::move(facts)};
}

// In lived time, as deadlines are. The 1 is there because StepOne wants more than the timeout to
// have passed.
int64_t Executor::NextStepNs() const {
  if (Idle()) return -1;
  int64_t wait_ns = period_ns_;
  for (const std::unique_ptr<Running>& run : running_) {
    if (run->operation == nullptr) continue;  // one that has started is before it
    wait_ns = std::min(wait_ns, DeadlineOf(*run) + 1 - active_ns_);
  }
  return std::max<int64_t>(wait_ns, 0);
}

// After a final error. When the planes touch no memory any more, OperationRegistry::FailInFlight
// ends the operations, which releases the borrowed tensors.
void Executor::AbandonAll() {
  for (std::unique_ptr<Running>& run : running_) {
    if (run->operation != nullptr) run->operation->Abandon();
    --run->set->running;
    run->set->starting = nullptr;
    pool_.push_back(std::move(run));
  }
  running_.clear();
}

}  // namespace farandole
