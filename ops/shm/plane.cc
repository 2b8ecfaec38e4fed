#include "ops/shm/plane.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "ops/shm/collective.h"

namespace farandole {
namespace {

/// By OpKind; CheckBatch refuses later kinds.
constexpr SharedMemoryFactory* kFactories[] = {
    MakeSharedMemoryAllreduce, MakeSharedMemoryBroadcast, MakeSharedMemoryAllgather,
    MakeSharedMemoryReducescatter, MakeSharedMemoryAlltoall};
constexpr size_t kKinds = std::size(kFactories);
static_assert(kKinds == static_cast<size_t>(OpKind::kAlltoall) + 1);

}  // namespace

struct SharedMemoryPlane::Set {
  // Global ranks, ascending, and this rank's position among them.
  std::vector<int> ranks;
  int my_index = 0;
  // These three: only with more than one member.
  std::shared_ptr<std::byte> memory;
  std::unique_ptr<SharedMemoryMember> member;
  std::array<std::unique_ptr<SharedMemoryCollective>, kKinds> collectives;  // by OpKind
  std::vector<Operation*> queue;  // started and not ended; the first one runs
  bool broken = false;            // by a failure or an Abandon; for good
};

class SharedMemoryPlane::Operation final : public PlaneOperation {
 public:
  explicit Operation(SharedMemoryPlane& plane) : plane_(plane) {}

  void Reset(Set& set, const Batch& batch) {
    set_ = &set;
    batch_ = &batch;
    collective_ = set.collectives[static_cast<size_t>(batch.kind)].get();
    begun_ = false;
  }
  Progress Step() override;
  void Abandon() override;
  Set& set() const { return *set_; }

 private:
  void Begin();

  SharedMemoryPlane& plane_;
  Set* set_ = nullptr;
  const Batch* batch_ = nullptr;
  SharedMemoryCollective* collective_ = nullptr;  // of the set; nullptr: the set has one member
  bool begun_ = false;
  SoloRun solo_;
};

/// With the first step and not with Start: chunk numbers continue those of the batch before, and
/// the collectives of a set keep the state of one batch at a time.
void SharedMemoryPlane::Operation::Begin() {
  begun_ = true;
  if (collective_ != nullptr) {
    collective_->Begin(*batch_);
  } else {
    solo_ = SoloRun(*batch_);
  }
}

/// Batches of a set run one after the other: only the first one in the queue advances. A failure or
/// an Abandon breaks the set, because its members no longer agree on chunk numbers.
Progress SharedMemoryPlane::Operation::Step() {
  if (set_->broken) {
    plane_.Finish(this);
    return Progress::Failed(Aborted("an earlier batch of this process set was abandoned"));
  }
  // By doorbell: Finish rings when the batch before ends.
  if (set_->queue.front() != this) return Progress::Waiting();
  if (!begun_) Begin();
  using State = SharedMemoryCollective::State;
  const State state = collective_ != nullptr        ? collective_->Step()
                      : solo_.Step(plane_.kernels_) ? State::kDone
                                                    : State::kMoved;
  if (state == State::kMoved) return Progress::Moved();
  if (state == State::kWaiting) return Progress::Waiting();
  Progress end = Progress::Done();
  if (state == State::kFailed) {
    set_->broken = true;
    end = Progress::Failed(collective_->failure());
  }
  plane_.Finish(this);
  return end;
}

void SharedMemoryPlane::Operation::Abandon() {
  // Peers go on reading this rank's slots, which is harmless; of its tensors they touch only those
  // in buffers.
  const size_t bytes = plane_.memory_->QuarantineBuffers();
  if (plane_.counters_ != nullptr) {
    plane_.counters_->Add(Counter::kQuarantinedBytes, static_cast<int64_t>(bytes));
  }
  set_->broken = true;
  plane_.Finish(this);
}

SharedMemoryPlane::SharedMemoryPlane(std::shared_ptr<SlotMemory> memory, int rank,
                                     const CpuKernels& kernels, Counters* counters)
    : memory_(std::move(memory)), rank_(rank), kernels_(kernels), counters_(counters) {}

SharedMemoryPlane::~SharedMemoryPlane() = default;

Status SharedMemoryPlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  if (sets_.contains(set)) {
    return InvalidArgument("process set " + std::to_string(set) + " was already added");
  }
  if (my_index < 0 || static_cast<size_t>(my_index) >= ranks.size() ||
      ranks[static_cast<size_t>(my_index)] != rank_) {
    return InvalidArgument("rank " + std::to_string(rank_) + " is not at position " +
                           std::to_string(my_index) + " of process set " + std::to_string(set));
  }
  auto fresh = std::make_unique<Set>();
  fresh->ranks.assign(ranks.begin(), ranks.end());
  fresh->my_index = my_index;
  if (ranks.size() > 1) {
    Result<std::shared_ptr<std::byte>> memory = memory_->Join(set, ranks, my_index);
    if (!memory.ok()) return memory.status();
    fresh->memory = memory.value();
    std::vector<Doorbell*> bells;
    for (const int rank : ranks) bells.push_back(memory_->bell(rank));
    fresh->member = std::make_unique<SharedMemoryMember>(
        SharedSlots(fresh->memory.get(), memory_->LayoutOf(ranks.size()), my_index,
                    std::move(bells)),
        *memory_, kernels_, SteadyClock(), counters_);
    const StorePolicyChooser chooser(memory_->options().store_policy);
    // Peers may read the hint at once; fresh memory holds kCached.
    if (my_index == 0) fresh->member->slots.RecommendStorePolicy(chooser.policy());
    for (size_t kind = 0; kind < kKinds; ++kind) {
      fresh->collectives[kind] = kFactories[kind](*fresh->member, chooser);
    }
  }
  sets_.emplace(set, std::move(fresh));
  return {};
}

void SharedMemoryPlane::RemoveSet(uint32_t set) { sets_.erase(set); }

Result<PlaneOperation*> SharedMemoryPlane::Start(const Batch& batch) {
  const auto found = sets_.find(batch.set);
  if (found == sets_.end()) {
    return Internal("batch for unknown process set " + std::to_string(batch.set));
  }
  Set& set = *found->second;
  if (batch.my_index != set.my_index || batch.ranks.size() != set.ranks.size()) {
    return Internal("batch names other members than process set " + std::to_string(batch.set));
  }
  if (set.broken) return Aborted("an earlier batch of this process set was abandoned");
  FARANDOLE_RETURN_IF_ERROR(CheckBatch(batch));
  Operation* operation = operations_.Take(*this);
  operation->Reset(set, batch);
  set.queue.push_back(operation);
  return operation;
}

/// Ends an operation. The next one of its set may have returned kWaiting before: ring, so that it
/// is stepped again.
void SharedMemoryPlane::Finish(Operation* operation) {
  std::vector<Operation*>& queue = operation->set().queue;
  queue.erase(std::find(queue.begin(), queue.end(), operation));
  if (!queue.empty()) memory_->bell(rank_)->Ring();
  operations_.Return(operation);
}

}  // namespace farandole
