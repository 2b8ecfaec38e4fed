#include "ops/gpu/staged/backend.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/counters.h"
#include "ops/cpu/batch.h"
#include "ops/gpu/comm_stream.h"
#include "ops/gpu/staged/slices.h"

namespace farandole {
namespace {

/// How often the device is asked whether a copy is complete.
constexpr int64_t kCopyPollNs = 50'000;

/// Room for one slice on either side.
struct StagingSlot {
  std::byte* pinned = nullptr;
  std::byte* device = nullptr;
  std::shared_ptr<DeviceEvent> is_down;  ///< The last copy to the host is complete.
  std::shared_ptr<DeviceEvent> is_up;    ///< The last use of it by the other stream is complete.
  bool open = false;                     ///< Commands were enqueued that no event covers yet.
};

/// A few slots for all process sets of a GPU, made when first wanted and used again and again: one
/// staged batch runs at a time. Copies to and from the host have a stream each, since a GPU does
/// both at once.
///
/// Thread safety: the holder of the engine lock. Lifetime: the device outlives it. Memory that
/// commands may still touch is not freed, but leaked and counted.
class StagingBuffers {
 public:
  /// @param counters  May be nullptr.
  static Result<std::unique_ptr<StagingBuffers>> Create(Device& device, Counters* counters,
                                                        int64_t slot_bytes);
  ~StagingBuffers();
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  CommStream& down() { return *down_; }  ///< From the GPU to the host.
  CommStream& up() { return *up_; }
  int64_t slot_bytes() const { return slot_bytes_; }
  /// @return ResourceExhausted if there is no memory.
  Result<StagingSlot*> Get(int index);
  /// No stream touches the slot any more.
  static Result<bool> IsIdle(const StagingSlot& slot);

 private:
  StagingBuffers(Device& device, Counters* counters, int64_t slot_bytes)
      : device_(device), counters_(counters), slot_bytes_(slot_bytes) {}

  Device& device_;
  Counters* const counters_;
  const int64_t slot_bytes_;
  std::unique_ptr<CommStream> down_, up_;
  std::array<StagingSlot, kStagingSlots> slots_;
};

Result<std::unique_ptr<StagingBuffers>> StagingBuffers::Create(Device& device, Counters* counters,
                                                               int64_t slot_bytes) {
  std::unique_ptr<StagingBuffers> buffers(new StagingBuffers(device, counters, slot_bytes));
  for (std::unique_ptr<CommStream> StagingBuffers::*one :
       {&StagingBuffers::down_, &StagingBuffers::up_}) {
    Result<std::unique_ptr<CommStream>> stream = CommStream::Create(device, counters);
    if (!stream.ok()) return stream.status();
    buffers.get()->*one = std::move(stream).value();
  }
  return buffers;
}

StagingBuffers::~StagingBuffers() {
  for (const StagingSlot& slot : slots_) {
    const Result<bool> idle = IsIdle(slot);
    if (idle.ok() && idle.value()) {
      if (slot.device != nullptr) device_.Free(slot.device);
      if (slot.pinned != nullptr) device_.FreePinned(slot.pinned);
    } else if (counters_ != nullptr) {
      counters_->Add(Counter::kQuarantinedBytes, 2 * slot_bytes_);
    }
  }
}

Result<StagingSlot*> StagingBuffers::Get(int index) {
  StagingSlot& slot = slots_[static_cast<size_t>(index)];
  const auto keep = [](std::byte*& memory, Result<void*> got) {
    if (got.ok()) memory = static_cast<std::byte*>(got.value());
    return got.status();
  };
  if (slot.pinned == nullptr) {
    FARANDOLE_RETURN_IF_ERROR(keep(slot.pinned, device_.AllocatePinned(slot_bytes_)));
  }
  if (slot.device == nullptr) {
    FARANDOLE_RETURN_IF_ERROR(keep(slot.device, device_.Allocate(slot_bytes_)));
  }
  return &slot;
}

Result<bool> StagingBuffers::IsIdle(const StagingSlot& slot) {
  if (slot.open) return false;
  for (const std::shared_ptr<DeviceEvent>& event : {slot.is_down, slot.is_up}) {
    if (event == nullptr) continue;
    const Result<bool> complete = event->IsComplete();
    if (!complete.ok() || !complete.value()) return complete;
  }
  return true;
}

/// A slice of the batch in flight, in one slot.
struct Part {
  enum class State { kFree, kDown, kReducing };
  State state = State::kFree;
  int64_t number = 0;  ///< Position in the batch.
  StagedSlice slice;
  StagingSlot* slot = nullptr;
  Segment segment;  ///< These three: the host batch.
  Batch batch;
  PlaneOperation* operation = nullptr;
};

/// Someone waits and wants to be asked again after `poll_after_ns`: the earliest time counts.
void AskAfter(Progress& progress, int64_t poll_after_ns) {
  if (progress.state != Progress::State::kWaiting || poll_after_ns == kByDoorbell) return;
  const bool earlier =
      progress.poll_after_ns == kByDoorbell || poll_after_ns < progress.poll_after_ns;
  if (earlier) progress.poll_after_ns = poll_after_ns;
}

/// Its task runs nowhere: this backend enqueues by itself and says when all is launched.
class StagedTask final : public LaunchTask {
 public:
  Status Run() override { return {}; }
};

class StagedBackend final : public GpuBackend {
 public:
  StagedBackend(HostSet& host, StagingBuffers& buffers) : host_(host), buffers_(buffers) {}
  ~StagedBackend() override { Abandon(); }

  Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) override;
  Progress Step() override;
  void Abandon() override;

 private:
  Status StepParts(Progress& progress);
  Status FillFreeParts(Progress& progress);
  Status StartDown(Part& part);
  Status CopyDown(Part& part);
  Status StepDown(Part& part, Progress& progress);
  Status StepReduction(Part& part, Progress& progress);
  Status StartReduction(Part& part);
  Status StartUp(Part& part);
  Status CopyUp(Part& part);
  Status MoveWhatStays();
  Status AwaitInputs();
  bool InputsAreThere() const;
  int64_t Bytes(int64_t count) const { return count * SizeOf(travel_); }

  HostSet& host_;
  StagingBuffers& buffers_;

  const Batch* batch_ = nullptr;  // until launched
  std::shared_ptr<StagedTask> task_;
  DType travel_ = DType::kFloat32;
  bool awaited_ = false;  // the producers are
  StagedSlices slices_;
  int64_t next_down_ = 0;
  int64_t next_reduced_ = 0;  // host batches start in order
  int64_t finished_ = 0;
  std::array<Part, kStagingSlots> parts_;
  std::vector<DeviceMove> moves_;
};

Result<std::shared_ptr<LaunchTask>> StagedBackend::Begin(const Batch& batch) {
  FARANDOLE_RETURN_IF_ERROR(slices_.Begin(batch, buffers_.slot_bytes()));
  batch_ = &batch;
  task_ = std::make_shared<StagedTask>();
  travel_ = TravelDType(batch);
  awaited_ = false;
  next_down_ = next_reduced_ = finished_ = 0;
  return std::shared_ptr<LaunchTask>(task_);
}

Progress StagedBackend::Step() {
  Progress progress = Progress::Waiting();
  Status status = awaited_ ? Status() : AwaitInputs();
  if (status.ok()) status = StepParts(progress);
  if (status.ok()) status = FillFreeParts(progress);
  if (status.ok() && finished_ == slices_.count()) {
    status = buffers_.up().Mark(task_->end);
    if (status.ok()) {
      task_->SetLaunched();
      task_ = nullptr;
      batch_ = nullptr;
      return Progress::Done();
    }
  }
  if (status.ok()) return progress;
  Abandon();
  return Progress::Failed(std::move(status));
}

// Both streams wait for the producers, also where nothing is read: what the producers' streams hold
// may still use the outputs.
Status StagedBackend::AwaitInputs() {
  awaited_ = true;
  FARANDOLE_RETURN_IF_ERROR(buffers_.down().WaitFor(batch_->ready));
  FARANDOLE_RETURN_IF_ERROR(buffers_.up().WaitFor(batch_->ready));
  if (!batch_->ready.empty()) FARANDOLE_RETURN_IF_ERROR(buffers_.up().Mark(task_->inputs));
  return MoveWhatStays();
}

Status StagedBackend::StepParts(Progress& progress) {
  for (Part& part : parts_) {
    switch (part.state) {
      case Part::State::kFree:
        break;
      case Part::State::kDown:
        FARANDOLE_RETURN_IF_ERROR(StepDown(part, progress));
        break;
      case Part::State::kReducing:
        FARANDOLE_RETURN_IF_ERROR(StepReduction(part, progress));
        break;
    }
  }
  return {};
}

Status StagedBackend::FillFreeParts(Progress& progress) {
  while (next_down_ < slices_.count()) {
    const auto at = static_cast<size_t>(next_down_ % kStagingSlots);
    Part& part = parts_[at];
    if (part.state != Part::State::kFree) return {};
    Result<StagingSlot*> slot = buffers_.Get(static_cast<int>(at));
    if (!slot.ok()) return slot.status();
    part.slot = slot.value();
    FARANDOLE_RETURN_IF_ERROR(StartDown(part));
    progress = Progress::Moved();
  }
  return {};
}

Status StagedBackend::StartDown(Part& part) {
  part.number = next_down_++;
  slices_.Next(part.slice);
  part.state = Part::State::kDown;
  if (part.slice.down.empty()) return {};
  // An earlier slice may still go up from the slot.
  part.slot->open = true;
  FARANDOLE_RETURN_IF_ERROR(buffers_.down().WaitFor(part.slot->is_up));
  FARANDOLE_RETURN_IF_ERROR(CopyDown(part));
  FARANDOLE_RETURN_IF_ERROR(buffers_.down().Mark(part.slot->is_down));
  part.slot->open = false;
  return {};
}

Status StagedBackend::CopyDown(Part& part) {
  const auto& [device, pinned] = std::tie(part.slot->device, part.slot->pinned);
  const bool scales = Reduces(batch_->kind) && batch_->prescale != 1.0;
  const bool as_it_is = batch_->dtype == travel_ && !scales;
  if (part.slice.down.size() == 1 && as_it_is) {
    const StagedRun& run = part.slice.down.front();
    return buffers_.down().Copy(pinned + Bytes(run.at), run.in, Bytes(run.count));
  }
  MoveSpec spec = BitwiseMove(travel_);
  if (!as_it_is) spec = {.from = batch_->dtype, .to = travel_, .scale = batch_->prescale};
  moves_.clear();
  for (const StagedRun& run : part.slice.down) {
    moves_.push_back({run.in, device + Bytes(run.at), run.count});
  }
  FARANDOLE_RETURN_IF_ERROR(buffers_.down().Move(moves_, spec));
  return buffers_.down().Copy(pinned, device, Bytes(part.slice.in_count));
}

// Also a slice of which nothing went down waits: an earlier one may still go up from the slot.
Status StagedBackend::StepDown(Part& part, Progress& progress) {
  if (part.number != next_reduced_) return {};
  const Result<bool> idle = StagingBuffers::IsIdle(*part.slot);
  if (!idle.ok()) return idle.status();
  if (!idle.value()) {
    AskAfter(progress, kCopyPollNs);
    progress.for_inputs = progress.for_inputs || !InputsAreThere();
    return {};
  }
  FARANDOLE_RETURN_IF_ERROR(StartReduction(part));
  progress = Progress::Moved();
  return {};
}

Status StagedBackend::StartReduction(Part& part) {
  ++next_reduced_;
  std::byte* const out = part.slot->pinned + Bytes(part.slice.out_begin);
  part.segment.in = part.slice.gives ? part.slot->pinned : nullptr;
  part.segment.out = part.slice.takes ? out : nullptr;
  part.segment.count = part.slice.count;
  part.batch = *batch_;
  part.batch.dtype = travel_;
  part.batch.wire = travel_;
  part.batch.prescale = 1.0;
  part.batch.segments = {&part.segment, 1};
  part.batch.count = part.slice.count;
  part.batch.splits = part.slice.splits;
  part.batch.sends = part.slice.sends;
  part.batch.receives = part.slice.receives;
  part.batch.device = DeviceKind::kCpu;
  part.batch.ready = {};
  Result<PlaneOperation*> started = host_.Start(part.batch);
  if (!started.ok()) return started.status();
  part.operation = started.value();
  part.state = Part::State::kReducing;
  return {};
}

Status StagedBackend::StepReduction(Part& part, Progress& progress) {
  const Progress reduced = part.operation->Step();
  switch (reduced.state) {
    case Progress::State::kWaiting:
      AskAfter(progress, reduced.poll_after_ns);
      return {};
    case Progress::State::kFailed:
      part.operation = nullptr;
      return reduced.status;
    case Progress::State::kDone:
      part.operation = nullptr;
      progress = Progress::Moved();
      return StartUp(part);
    case Progress::State::kMoved:
    case Progress::State::kLaunched:  // not said by a CPU plane
      progress = Progress::Moved();
      return {};
  }
  return {};
}

Status StagedBackend::StartUp(Part& part) {
  part.state = Part::State::kFree;
  ++finished_;
  if (part.slice.up.empty()) return {};
  part.slot->open = true;
  FARANDOLE_RETURN_IF_ERROR(CopyUp(part));
  FARANDOLE_RETURN_IF_ERROR(buffers_.up().Mark(part.slot->is_up));
  part.slot->open = false;
  return {};
}

Status StagedBackend::CopyUp(Part& part) {
  const int64_t begin = Bytes(part.slice.out_begin);
  std::byte* const device = part.slot->device + begin;
  const std::byte* const pinned = part.slot->pinned + begin;
  const bool as_it_is = batch_->dtype == travel_;
  if (part.slice.up.size() == 1 && as_it_is) {
    const StagedRun& run = part.slice.up.front();
    return buffers_.up().Copy(run.out, pinned + Bytes(run.at), Bytes(run.count));
  }
  MoveSpec spec = BitwiseMove(travel_);
  if (!as_it_is) spec = {.from = travel_, .to = batch_->dtype};
  moves_.clear();
  for (const StagedRun& run : part.slice.up) {
    moves_.push_back({device + Bytes(run.at), run.out, run.count});
  }
  FARANDOLE_RETURN_IF_ERROR(buffers_.up().Copy(device, pinned, Bytes(part.slice.out_count)));
  return buffers_.up().Move(moves_, spec);
}

Status StagedBackend::MoveWhatStays() {
  slices_.Stays(moves_);
  return buffers_.up().Move(moves_, BitwiseMove(batch_->dtype));
}

// The next call reports a failed event.
bool StagedBackend::InputsAreThere() const {
  return std::all_of(batch_->ready.begin(), batch_->ready.end(),
                     [](const std::shared_ptr<DeviceEvent>& event) {
                       const Result<bool> complete = event->IsComplete();
                       return !complete.ok() || complete.value();
                     });
}

void StagedBackend::Abandon() {
  for (Part& part : parts_) {
    if (part.operation != nullptr) part.operation->Abandon();
    part.operation = nullptr;
    part.state = Part::State::kFree;
  }
}

class Provider final : public StagedProvider {
 public:
  Provider(Counters* counters, int64_t slot_bytes) : counters_(counters), slot_bytes_(slot_bytes) {}

  Result<std::unique_ptr<GpuBackend>> Make(Device& device, HostSet& host) override {
    if (buffers_ == nullptr) {
      auto created = StagingBuffers::Create(device, counters_, slot_bytes_);
      if (!created.ok()) return created.status();
      buffers_ = std::move(created).value();
    }
    return std::unique_ptr<GpuBackend>(std::make_unique<StagedBackend>(host, *buffers_));
  }

 private:
  Counters* const counters_;
  const int64_t slot_bytes_;
  std::unique_ptr<StagingBuffers> buffers_;
};

}  // namespace

std::unique_ptr<StagedProvider> MakeStagedProvider(Counters* counters, int64_t slot_bytes) {
  return std::make_unique<Provider>(counters, slot_bytes);
}

}  // namespace farandole
