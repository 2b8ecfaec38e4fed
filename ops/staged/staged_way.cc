#include "ops/staged/staged_way.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/device.h"

namespace farandole {
namespace {

/// How often the device is asked whether a copy is over.
constexpr int64_t kCopyPollNs = 50'000;

/// A piece of the batch under way in one slot.
struct Piece {
  enum class State { kFree, kDown, kReducing };
  State state = State::kFree;
  int64_t number = 0;  ///< Position in the batch.
  int64_t count = 0;   ///< Elements.
  StagingSlot* slot = nullptr;
  SegmentCursor cursor;  ///< At its first element.
  Segment segment;       ///< These three: the host batch.
  Batch batch;
  PlaneOperation* operation = nullptr;
};

/// Someone waits and wants to be asked again after `poll_after_ns`: the earliest wish counts.
void AskAfter(Progress& progress, int64_t poll_after_ns) {
  if (progress.state != Progress::State::kWaiting || poll_after_ns == kByDoorbell) return;
  const bool earlier =
      progress.poll_after_ns == kByDoorbell || poll_after_ns < progress.poll_after_ns;
  if (earlier) progress.poll_after_ns = poll_after_ns;
}

class StagedWay final : public CudaWay {
 public:
  explicit StagedWay(const StagedWayOptions& options)
      : lane_(*options.lane), host_(*options.host), staging_(*options.staging) {}
  ~StagedWay() override { Abandon(); }

  const char* name() const override { return "staged"; }
  Progress Connect() override { return Progress::Done(); }
  Status Begin(const Batch& batch) override;
  Progress Step() override;
  std::shared_ptr<DeviceEvent> end() const override { return end_; }
  Status Check() override { return {}; }
  void Abandon() override;

 private:
  Status StepPieces(Progress& progress);
  Status FillFreePieces(Progress& progress);
  Status StartDown(Piece& piece);
  Status CopyDown(Piece& piece);
  Status StepDown(Piece& piece, Progress& progress);
  Status StepReduction(Piece& piece, Progress& progress);
  Status StartReduction(Piece& piece);
  Status StartUp(Piece& piece);
  Status CopyUp(Piece& piece);
  Status CopyOnTheRoot();
  bool InputsAreThere() const;
  bool WantsResult(const Piece& piece) const;

  CudaLane& lane_;
  HostSet& host_;
  Staging& staging_;

  const Batch* batch_ = nullptr;  // until launched
  DType travel_ = DType::kFloat32;
  bool broadcast_ = false;
  bool sends_ = false;     // something of this rank goes down
  bool receives_ = false;  // results may come up
  bool awaited_ = false;   // the producers
  int64_t piece_count_ = 0;
  int64_t piece_elements_ = 1;
  int64_t next_down_ = 0;
  int64_t next_reduced_ = 0;  // host batches start in order
  int64_t finished_ = 0;
  SegmentCursor cursor_;
  std::array<Piece, Staging::kSlots> pieces_;
  std::vector<DeviceMove> moves_;
  std::shared_ptr<DeviceEvent> end_;
};

Status StagedWay::Begin(const Batch& batch) {
  batch_ = &batch;
  travel_ = TravelDType(batch);
  broadcast_ = batch.kind == OpKind::kBroadcast;
  const bool root = broadcast_ && batch.my_index == batch.root_index;
  sends_ = broadcast_ ? root : !IsAbsent(batch, batch.my_index);
  receives_ = !root;
  awaited_ = false;
  piece_elements_ = staging_.slot_bytes() / SizeOf(travel_);
  piece_count_ = (batch.count + piece_elements_ - 1) / piece_elements_;
  next_down_ = next_reduced_ = finished_ = 0;
  cursor_ = SegmentCursor(batch.segments, batch.dtype);
  return {};
}

Progress StagedWay::Step() {
  Progress progress = Progress::Waiting();
  Status status;
  if (!awaited_) {
    // Also where nothing is read: what the producers' streams hold may still use the outputs.
    status = lane_.WaitFor(batch_->ready);
    awaited_ = true;
    if (status.ok() && broadcast_ && sends_) status = CopyOnTheRoot();
  }
  if (status.ok()) status = StepPieces(progress);
  if (status.ok()) status = FillFreePieces(progress);
  if (status.ok() && finished_ == piece_count_) {
    Result<std::shared_ptr<DeviceEvent>> end = lane_.MarkEnd();
    status = end.status();
    if (status.ok()) {
      end_ = end.value();
      batch_ = nullptr;
      return Progress::Launched();
    }
  }
  if (status.ok()) return progress;
  Abandon();
  return Progress::Failed(std::move(status));
}

Status StagedWay::StepPieces(Progress& progress) {
  for (Piece& piece : pieces_) {
    switch (piece.state) {
      case Piece::State::kFree:
        break;
      case Piece::State::kDown:
        FARANDOLE_RETURN_IF_ERROR(StepDown(piece, progress));
        break;
      case Piece::State::kReducing:
        FARANDOLE_RETURN_IF_ERROR(StepReduction(piece, progress));
        break;
    }
  }
  return {};
}

Status StagedWay::FillFreePieces(Progress& progress) {
  while (next_down_ < piece_count_) {
    const auto at = static_cast<size_t>(next_down_ % Staging::kSlots);
    Piece& piece = pieces_[at];
    if (piece.state != Piece::State::kFree) return {};
    Result<StagingSlot*> slot = staging_.Get(static_cast<int>(at));
    if (!slot.ok()) return slot.status();
    piece.slot = slot.value();
    FARANDOLE_RETURN_IF_ERROR(StartDown(piece));
    progress = Progress::Moved();
  }
  return {};
}

Status StagedWay::StartDown(Piece& piece) {
  piece.number = next_down_++;
  piece.count = std::min(piece_elements_, batch_->count - piece.number * piece_elements_);
  piece.cursor = cursor_;
  cursor_.Skip(piece.count);
  piece.state = Piece::State::kDown;
  if (!sends_) return {};
  staging_.Open(*piece.slot);
  FARANDOLE_RETURN_IF_ERROR(CopyDown(piece));
  return staging_.Close(*piece.slot);
}

Status StagedWay::CopyDown(Piece& piece) {
  const int64_t bytes = piece.count * SizeOf(travel_);
  const bool as_it_is = broadcast_ || (batch_->dtype == travel_ && batch_->prescale == 1.0);
  MoveSpec spec = BitwiseMove(travel_);
  if (!as_it_is) spec = {.from = batch_->dtype, .to = travel_, .scale = batch_->prescale};
  SegmentCursor cursor = piece.cursor;
  moves_.clear();
  for (int64_t at = 0; at < piece.count;) {
    const Run run = cursor.Next(piece.count - at);
    moves_.push_back({run.in, piece.slot->device + at * SizeOf(travel_), run.count});
    at += run.count;
  }
  if (moves_.size() == 1 && as_it_is) {
    return lane_.Copy(piece.slot->pinned, moves_.front().in, bytes);
  }
  FARANDOLE_RETURN_IF_ERROR(lane_.Move(moves_, spec));
  return lane_.Copy(piece.slot->pinned, piece.slot->device, bytes);
}

// Also a piece of which nothing went down waits: an earlier piece may still go up from the slot.
Status StagedWay::StepDown(Piece& piece, Progress& progress) {
  if (piece.number != next_reduced_) return {};
  const Result<bool> idle = staging_.IsIdle(*piece.slot);
  if (!idle.ok()) return idle.status();
  if (!idle.value()) {
    AskAfter(progress, kCopyPollNs);
    progress.for_inputs = progress.for_inputs || !InputsAreThere();
    return {};
  }
  FARANDOLE_RETURN_IF_ERROR(StartReduction(piece));
  progress = Progress::Moved();
  return {};
}

Status StagedWay::StartReduction(Piece& piece) {
  ++next_reduced_;
  piece.segment.in = sends_ ? piece.slot->pinned : nullptr;
  piece.segment.out = sends_ || WantsResult(piece) ? piece.slot->pinned : nullptr;
  piece.segment.count = piece.count;
  piece.batch = *batch_;
  piece.batch.dtype = travel_;
  piece.batch.wire = travel_;
  piece.batch.prescale = 1.0;
  piece.batch.segments = {&piece.segment, 1};
  piece.batch.count = piece.count;
  piece.batch.device = DeviceKind::kCpu;
  piece.batch.ready = {};
  Result<PlaneOperation*> started = host_.Start(piece.batch);
  if (!started.ok()) return started.status();
  piece.operation = started.value();
  piece.state = Piece::State::kReducing;
  return {};
}

Status StagedWay::StepReduction(Piece& piece, Progress& progress) {
  const Progress reduced = piece.operation->Step();
  switch (reduced.state) {
    case Progress::State::kWaiting:
      AskAfter(progress, reduced.poll_after_ns);
      return {};
    case Progress::State::kFailed:
      piece.operation = nullptr;
      return reduced.status;
    case Progress::State::kDone:
      piece.operation = nullptr;
      progress = Progress::Moved();
      return StartUp(piece);
    case Progress::State::kMoved:
    case Progress::State::kLaunched:  // not said by a CPU plane
      progress = Progress::Moved();
      return {};
  }
  return {};
}

Status StagedWay::StartUp(Piece& piece) {
  piece.state = Piece::State::kFree;
  ++finished_;
  if (!receives_ || !WantsResult(piece)) return {};
  staging_.Open(*piece.slot);
  FARANDOLE_RETURN_IF_ERROR(CopyUp(piece));
  return staging_.Close(*piece.slot);
}

Status StagedWay::CopyUp(Piece& piece) {
  const int64_t bytes = piece.count * SizeOf(travel_);
  const bool as_it_is = batch_->dtype == travel_;
  MoveSpec spec = BitwiseMove(travel_);
  if (!as_it_is) spec = {.from = travel_, .to = batch_->dtype};
  SegmentCursor cursor = piece.cursor;
  moves_.clear();
  for (int64_t at = 0; at < piece.count;) {
    const Run run = cursor.Next(piece.count - at);
    if (run.out != nullptr) {
      moves_.push_back({piece.slot->device + at * SizeOf(travel_), run.out, run.count});
    }
    at += run.count;
  }
  if (moves_.front().count == piece.count && as_it_is) {
    return lane_.Copy(moves_.front().out, piece.slot->pinned, bytes);
  }
  FARANDOLE_RETURN_IF_ERROR(lane_.Copy(piece.slot->device, piece.slot->pinned, bytes));
  return lane_.Move(moves_, spec);
}

// A broadcast's root has the result already.
Status StagedWay::CopyOnTheRoot() {
  moves_.clear();
  for (const Segment& segment : batch_->segments) {
    if (segment.out == nullptr || segment.out == segment.in || segment.count == 0) continue;
    moves_.push_back({segment.in, segment.out, segment.count});
  }
  return moves_.empty() ? Status() : lane_.Move(moves_, BitwiseMove(batch_->dtype));
}

// A failed event is told by the next call.
bool StagedWay::InputsAreThere() const {
  return std::all_of(batch_->ready.begin(), batch_->ready.end(), [](DeviceEvent* event) {
    const Result<bool> passed = event->Passed();
    return !passed.ok() || passed.value();
  });
}

bool StagedWay::WantsResult(const Piece& piece) const {
  SegmentCursor cursor = piece.cursor;
  for (int64_t at = 0; at < piece.count;) {
    const Run run = cursor.Next(piece.count - at);
    if (run.out != nullptr) return true;
    at += run.count;
  }
  return false;
}

void StagedWay::Abandon() {
  for (Piece& piece : pieces_) {
    if (piece.operation != nullptr) piece.operation->Abandon();
    piece.operation = nullptr;
    piece.state = Piece::State::kFree;
  }
}

}  // namespace

std::unique_ptr<CudaWay> MakeStagedWay(const StagedWayOptions& options) {
  return std::make_unique<StagedWay>(options);
}

}  // namespace farandole
