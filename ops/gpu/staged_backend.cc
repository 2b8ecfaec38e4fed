#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/counters.h"
#include "ops/cpu/batch.h"
#include "ops/gpu/backend.h"
#include "ops/gpu/comm_stream.h"

namespace farandole {
namespace {

/// How often the device is asked whether a copy is complete.
constexpr int64_t kCopyPollNs = 50'000;

/// Memory on one side of a slot.
struct StagingMemory {
  std::byte* data = nullptr;
  int64_t size_bytes = 0;
};

/// Room for one slice, or a whole batch, on either side.
struct StagingSlot {
  StagingMemory pinned, device;
  std::shared_ptr<DeviceEvent> d2h_end, h2d_end;  ///< Of the last copies from it and to it.
  bool open = false;  ///< Commands were enqueued that no event covers yet.
};

}  // namespace

/// Copies to and from the host have a stream each, since a GPU does both at once.
///
/// Thread safety: the holder of the engine lock. Lifetime: the device outlives it. Memory that
/// commands may still touch is not freed, but leaked and counted.
class StagingBuffers {
 public:
  StagingBuffers(Device& device, Counters* counters, int64_t slot_bytes)
      : device_(device), counters_(counters), slot_bytes_(slot_bytes) {}
  ~StagingBuffers();
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  int64_t slot_bytes() const { return slot_bytes_; }
  /// The slot, with at least that much on either side.
  /// @return ResourceExhausted if there is no memory.
  Result<StagingSlot*> Get(int64_t number, int64_t pinned_bytes, int64_t device_bytes);
  /// No stream touches the slot any more.
  static Result<bool> IsIdle(const StagingSlot& slot);

  std::unique_ptr<CommStream> d2h, h2d;

 private:
  Status Grow(StagingMemory& memory, int64_t size_bytes, Result<void*> (Device::*allocate)(int64_t),
              std::vector<void*>& all);

  Device& device_;
  Counters* const counters_;
  const int64_t slot_bytes_;
  std::array<StagingSlot, kStagingSlots> slots_;
  std::vector<void*> pinned_, device_memory_;  // all there is, what was replaced included
  int64_t size_bytes_ = 0;                     // of it
};

Result<std::shared_ptr<StagingBuffers>> MakeStagingBuffers(Device& device, Counters* counters,
                                                           int64_t slot_bytes) {
  auto buffers = std::make_shared<StagingBuffers>(device, counters, slot_bytes);
  for (std::unique_ptr<CommStream>* one : {&buffers->d2h, &buffers->h2d}) {
    Result<std::unique_ptr<CommStream>> stream = CommStream::Create(device, counters);
    if (!stream.ok()) return stream.status();
    *one = std::move(stream).value();
  }
  return buffers;
}

StagingBuffers::~StagingBuffers() {
  const bool idle = std::all_of(slots_.begin(), slots_.end(), [](const StagingSlot& slot) {
    const Result<bool> answer = IsIdle(slot);
    return answer.ok() && answer.value();
  });
  if (!idle) {
    if (counters_ != nullptr) counters_->Add(Counter::kQuarantinedBytes, size_bytes_);
    return;
  }
  for (void* memory : device_memory_) device_.Free(memory);
  for (void* memory : pinned_) device_.FreePinned(memory);
}

// What is replaced is kept to the end, because to free memory waits for the whole device. The size
// doubles at least, so that all of it is no more than what replaced it.
Status StagingBuffers::Grow(StagingMemory& memory, int64_t size_bytes,
                            Result<void*> (Device::*allocate)(int64_t), std::vector<void*>& all) {
  if (size_bytes <= memory.size_bytes) return {};
  const int64_t wanted = std::max(size_bytes, 2 * memory.size_bytes);
  Result<void*> got = (device_.*allocate)(wanted);
  if (!got.ok()) return got.status();
  all.push_back(got.value());
  size_bytes_ += wanted;
  memory = {static_cast<std::byte*>(got.value()), wanted};
  return {};
}

Result<StagingSlot*> StagingBuffers::Get(int64_t number, int64_t pinned_bytes,
                                         int64_t device_bytes) {
  StagingSlot& slot = slots_[static_cast<size_t>(number % kStagingSlots)];
  FARANDOLE_RETURN_IF_ERROR(Grow(slot.pinned, pinned_bytes, &Device::AllocatePinned, pinned_));
  FARANDOLE_RETURN_IF_ERROR(Grow(slot.device, device_bytes, &Device::Allocate, device_memory_));
  return &slot;
}

Result<bool> StagingBuffers::IsIdle(const StagingSlot& slot) {
  if (slot.open) return false;
  for (const std::shared_ptr<DeviceEvent>& event : {slot.d2h_end, slot.h2d_end}) {
    if (event == nullptr) continue;
    const Result<bool> complete = event->IsComplete();
    if (!complete.ok() || !complete.value()) return complete;
  }
  return true;
}

namespace {

/// A slice of the batch in flight, or all of it, in one slot. Inputs lie at the slot's begin,
/// results in the same place, or behind them where the batch is staged whole.
struct Part {
  enum class State { kFree, kD2h, kReducing };
  State state = State::kFree;
  int64_t number = 0;    ///< Position in the batch.
  SegmentCursor cursor;  ///< At its first element; not of a whole batch.
  int64_t in_count = 0, out_count = 0;
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

class StagedBackend final : public GpuBackend {
 public:
  StagedBackend(HostSet& host, std::shared_ptr<StagingBuffers> buffers)
      : host_(host), buffers_(std::move(buffers)) {}
  ~StagedBackend() override { Abandon(); }

  Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) override;
  Progress Step() override;
  void Abandon() override;

 private:
  Status StepParts(Progress& progress);
  Status FillFreeParts(Progress& progress);
  Status StartD2h(Part& part);
  Status CopyToHost(const Part& part);
  Status StepD2h(Part& part, Progress& progress);
  Status StartReduction(Part& part);
  Status StepReduction(Part& part, Progress& progress);
  Status StartH2d(Part& part);
  Status CopyToDevice(const Part& part);
  Status AwaitInputs();
  bool InputsAreThere() const;
  void ReadRuns(const Part& part, int64_t count);
  int64_t Bytes(int64_t count) const { return count * SizeOf(wire_); }
  bool is_whole() const { return IsVariableSize(batch_->kind); }

  HostSet& host_;
  const std::shared_ptr<StagingBuffers> buffers_;

  const Batch* batch_ = nullptr;  // until launched
  std::shared_ptr<LaunchTask> task_;
  DType wire_ = DType::kFloat32;
  bool casts_in_ = false, casts_out_ = false;  // else bytes are copied
  bool produces_ = false, consumes_ = false;   // the host batch has an input, and an output
  bool awaited_ = false;                       // the producers are
  int64_t in_count_ = 0, out_count_ = 0;       // of each part
  SegmentCursor cursor_;                       // at the next slice
  int64_t parts_count_ = 0;
  int64_t next_d2h_ = 0;
  int64_t next_reduced_ = 0;  // host batches start in order
  int64_t finished_ = 0;
  std::array<Part, kStagingSlots> parts_;
  std::vector<Run> runs_;
  std::vector<CastItem> items_;
};

Result<std::shared_ptr<LaunchTask>> StagedBackend::Begin(const Batch& batch) {
  batch_ = &batch;
  task_ = std::make_shared<LaunchTask>();
  wire_ = WireOf(batch);
  casts_out_ = batch.dtype != wire_;
  casts_in_ = casts_out_ || PrescaleOf(batch) != 1.0;
  awaited_ = false;
  next_d2h_ = next_reduced_ = finished_ = 0;
  const auto is_wanted = [](const Segment& one) { return one.out != nullptr; };
  const Segment* const whole = is_whole() ? &batch.segments.front() : nullptr;
  produces_ = Contributes(batch, batch.my_index) && (whole == nullptr || whole->in != nullptr);
  consumes_ = (produces_ && whole == nullptr) ||
              std::any_of(batch.segments.begin(), batch.segments.end(), is_wanted);
  cursor_ = SegmentCursor(batch.segments, batch.dtype);
  in_count_ = out_count_ = buffers_->slot_bytes() / SizeOf(wire_);
  parts_count_ = (batch.count + in_count_ - 1) / in_count_;
  if (whole != nullptr) {
    in_count_ = produces_ ? InputCount(batch, *whole) : 0;
    out_count_ = consumes_ ? OutputCount(batch, *whole) : 0;
    parts_count_ = batch.count > 0 ? 1 : 0;
  }
  return task_;
}

Progress StagedBackend::Step() {
  Progress progress = Progress::Waiting();
  Status status = awaited_ ? Status() : AwaitInputs();
  if (status.ok()) status = StepParts(progress);
  if (status.ok()) status = FillFreeParts(progress);
  if (status.ok() && finished_ == parts_count_) {
    status = buffers_->h2d->Record(task_->end);
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
  FARANDOLE_RETURN_IF_ERROR(buffers_->d2h->WaitFor(batch_->ready));
  FARANDOLE_RETURN_IF_ERROR(buffers_->h2d->WaitFor(batch_->ready));
  return batch_->ready.empty() ? Status() : buffers_->h2d->Record(task_->inputs);
}

Status StagedBackend::StepParts(Progress& progress) {
  for (Part& part : parts_) {
    if (part.state == Part::State::kFree) continue;
    const bool reducing = part.state == Part::State::kReducing;
    FARANDOLE_RETURN_IF_ERROR(reducing ? StepReduction(part, progress) : StepD2h(part, progress));
  }
  return {};
}

Status StagedBackend::FillFreeParts(Progress& progress) {
  while (next_d2h_ < parts_count_) {
    Part& part = parts_[static_cast<size_t>(next_d2h_ % kStagingSlots)];
    if (part.state != Part::State::kFree) return {};
    const int64_t bytes = is_whole() ? Bytes(in_count_ + out_count_) : buffers_->slot_bytes();
    const bool uses_device = !is_whole() || casts_in_ || casts_out_;
    Result<StagingSlot*> slot = buffers_->Get(next_d2h_, bytes, uses_device ? bytes : 0);
    if (!slot.ok()) return slot.status();
    part.slot = slot.value();
    FARANDOLE_RETURN_IF_ERROR(StartD2h(part));
    progress = Progress::Moved();
  }
  return {};
}

Status StagedBackend::StartD2h(Part& part) {
  part.number = next_d2h_++;
  part.state = Part::State::kD2h;
  part.cursor = cursor_;
  part.in_count = in_count_;
  part.out_count = out_count_;
  if (!is_whole()) {
    part.in_count = std::min(in_count_, batch_->count - part.number * in_count_);
    part.out_count = part.in_count;
    cursor_.Skip(part.in_count);
  }
  if (!produces_ || part.in_count == 0) return {};
  // Results of an earlier slice may still be copied from the slot.
  part.slot->open = true;
  FARANDOLE_RETURN_IF_ERROR(buffers_->d2h->WaitFor(part.slot->h2d_end));
  FARANDOLE_RETURN_IF_ERROR(CopyToHost(part));
  FARANDOLE_RETURN_IF_ERROR(buffers_->d2h->Record(part.slot->d2h_end));
  part.slot->open = false;
  return {};
}

// A batch that is staged whole has one segment, whose input and output differ in size.
void StagedBackend::ReadRuns(const Part& part, int64_t count) {
  runs_.clear();
  if (is_whole()) {
    const Segment& only = batch_->segments.front();
    return runs_.push_back(
        {static_cast<const std::byte*>(only.in), static_cast<std::byte*>(only.out), count});
  }
  SegmentCursor cursor = part.cursor;
  for (; count > 0; count -= runs_.back().count) runs_.push_back(cursor.Next(count));
}

Status StagedBackend::CopyToHost(const Part& part) {
  const StagingSlot& slot = *part.slot;
  CommStream& stream = *buffers_->d2h;
  ReadRuns(part, part.in_count);
  if (runs_.size() == 1 && !casts_in_) {
    return stream.Copy(slot.pinned.data, runs_.front().in, Bytes(part.in_count));
  }
  CastSpec spec = BitwiseCopy(wire_);
  if (casts_in_) spec = {.from = batch_->dtype, .to = wire_, .scale = batch_->prescale};
  items_.clear();
  std::byte* to = slot.device.data;
  for (const Run& run : runs_) {
    items_.push_back({run.in, to, run.count});
    to += Bytes(run.count);
  }
  FARANDOLE_RETURN_IF_ERROR(stream.Cast(items_, spec));
  return stream.Copy(slot.pinned.data, slot.device.data, Bytes(part.in_count));
}

// Also a slice of which nothing is copied to the host waits: an earlier one's results may still be
// copied from the slot.
Status StagedBackend::StepD2h(Part& part, Progress& progress) {
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
  std::byte* const pinned = part.slot->pinned.data;
  part.batch = *batch_;
  part.batch.dtype = wire_;
  part.batch.wire = wire_;
  part.batch.wire_format = WireFormat::kSame;  // a slot has no residuals
  part.batch.prescale = 1.0;
  if (!is_whole()) part.batch.count = part.in_count;
  part.segment.in = produces_ ? pinned : nullptr;
  part.segment.out = consumes_ ? pinned + (is_whole() ? Bytes(part.in_count) : 0) : nullptr;
  part.segment.count = part.batch.count;
  part.batch.segments = {&part.segment, 1};
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
      return StartH2d(part);
    case Progress::State::kMoved:
    case Progress::State::kLaunched:  // not said by a CPU plane
      progress = Progress::Moved();
      return {};
  }
  return {};
}

Status StagedBackend::StartH2d(Part& part) {
  part.state = Part::State::kFree;
  ++finished_;
  if (!consumes_ || part.out_count == 0) return {};
  part.slot->open = true;
  FARANDOLE_RETURN_IF_ERROR(CopyToDevice(part));
  FARANDOLE_RETURN_IF_ERROR(buffers_->h2d->Record(part.slot->h2d_end));
  part.slot->open = false;
  return {};
}

// What the root of a broadcast has in place stays as it is.
Status StagedBackend::CopyToDevice(const Part& part) {
  const int64_t begin = is_whole() ? Bytes(part.in_count) : 0;
  const std::byte* const pinned = part.slot->pinned.data + begin;
  CommStream& stream = *buffers_->h2d;
  ReadRuns(part, part.out_count);
  const bool at_root = batch_->kind == OpKind::kBroadcast && produces_;
  const auto stays = [&](const Run& run) {
    return run.out == nullptr || (at_root && run.out == run.in);
  };
  if (std::all_of(runs_.begin(), runs_.end(), stays)) return {};
  if (runs_.size() == 1 && !casts_out_) {
    return stream.Copy(runs_.front().out, pinned, Bytes(part.out_count));
  }
  CastSpec spec = BitwiseCopy(wire_);
  if (casts_out_) spec = {.from = wire_, .to = batch_->dtype};
  std::byte* const device = part.slot->device.data + begin;
  items_.clear();
  for (int64_t at = 0; const Run& run : runs_) {
    if (!stays(run)) items_.push_back({device + at, run.out, run.count});
    at += Bytes(run.count);
  }
  FARANDOLE_RETURN_IF_ERROR(stream.Copy(device, pinned, Bytes(part.out_count)));
  return stream.Cast(items_, spec);
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

}  // namespace

std::unique_ptr<GpuBackend> MakeStagedBackend(HostSet& host,
                                              std::shared_ptr<StagingBuffers> buffers) {
  return std::make_unique<StagedBackend>(host, std::move(buffers));
}

}  // namespace farandole
