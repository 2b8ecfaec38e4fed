#include "ops/staged/staged_way.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "ops/cpu/batch.h"
#include "ops/device.h"
#include "ops/staged/cut.h"

namespace farandole {
namespace {

/// How often the device is asked whether a copy is over.
constexpr int64_t kCopyPollNs = 50'000;

/// A piece of the batch under way in one slot.
struct Piece {
  enum class State { kFree, kDown, kReducing };
  State state = State::kFree;
  int64_t number = 0;  ///< Position in the batch.
  StagedPiece cut;
  StagingSlot* slot = nullptr;
  Segment segment;  ///< These three: the host batch.
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
  Status MoveWhatStays();
  bool InputsAreThere() const;
  int64_t Bytes(int64_t count) const { return count * SizeOf(travel_); }

  CudaLane& lane_;
  HostSet& host_;
  Staging& staging_;

  const Batch* batch_ = nullptr;  // until launched
  DType travel_ = DType::kFloat32;
  bool awaited_ = false;  // the producers
  StagedCut cut_;
  int64_t next_down_ = 0;
  int64_t next_reduced_ = 0;  // host batches start in order
  int64_t finished_ = 0;
  std::array<Piece, Staging::kSlots> pieces_;
  std::vector<DeviceMove> moves_;
  std::shared_ptr<DeviceEvent> end_;
};

Status StagedWay::Begin(const Batch& batch) {
  FARANDOLE_RETURN_IF_ERROR(cut_.Begin(batch, staging_.slot_bytes()));
  batch_ = &batch;
  travel_ = TravelDType(batch);
  awaited_ = false;
  next_down_ = next_reduced_ = finished_ = 0;
  return {};
}

Progress StagedWay::Step() {
  Progress progress = Progress::Waiting();
  Status status;
  if (!awaited_) {
    // Also where nothing is read: what the producers' streams hold may still use the outputs.
    status = lane_.WaitFor(batch_->ready);
    awaited_ = true;
    if (status.ok()) status = MoveWhatStays();
  }
  if (status.ok()) status = StepPieces(progress);
  if (status.ok()) status = FillFreePieces(progress);
  if (status.ok() && finished_ == cut_.pieces()) {
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
  while (next_down_ < cut_.pieces()) {
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
  cut_.Next(piece.cut);
  piece.state = Piece::State::kDown;
  if (piece.cut.down.empty()) return {};
  staging_.Open(*piece.slot);
  FARANDOLE_RETURN_IF_ERROR(CopyDown(piece));
  return staging_.Close(*piece.slot);
}

Status StagedWay::CopyDown(Piece& piece) {
  const auto& [device, pinned] = std::tie(piece.slot->device, piece.slot->pinned);
  const bool scales = Reduces(batch_->kind) && batch_->prescale != 1.0;
  const bool as_it_is = batch_->dtype == travel_ && !scales;
  if (piece.cut.down.size() == 1 && as_it_is) {
    const StagedRun& run = piece.cut.down.front();
    return lane_.Copy(pinned + Bytes(run.at), run.in, Bytes(run.count));
  }
  MoveSpec spec = BitwiseMove(travel_);
  if (!as_it_is) spec = {.from = batch_->dtype, .to = travel_, .scale = batch_->prescale};
  moves_.clear();
  for (const StagedRun& run : piece.cut.down) {
    moves_.push_back({run.in, device + Bytes(run.at), run.count});
  }
  FARANDOLE_RETURN_IF_ERROR(lane_.Move(moves_, spec));
  return lane_.Copy(pinned, device, Bytes(piece.cut.in_count));
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
  std::byte* const out = piece.slot->pinned + Bytes(piece.cut.out_begin);
  piece.segment.in = piece.cut.gives ? piece.slot->pinned : nullptr;
  piece.segment.out = piece.cut.takes ? out : nullptr;
  piece.segment.count = piece.cut.count;
  piece.batch = *batch_;
  piece.batch.dtype = travel_;
  piece.batch.wire = travel_;
  piece.batch.prescale = 1.0;
  piece.batch.segments = {&piece.segment, 1};
  piece.batch.count = piece.cut.count;
  piece.batch.splits = piece.cut.parts;
  piece.batch.sends = piece.cut.sends;
  piece.batch.receives = piece.cut.receives;
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
  if (piece.cut.up.empty()) return {};
  staging_.Open(*piece.slot);
  FARANDOLE_RETURN_IF_ERROR(CopyUp(piece));
  return staging_.Close(*piece.slot);
}

Status StagedWay::CopyUp(Piece& piece) {
  const int64_t begin = Bytes(piece.cut.out_begin);
  std::byte* const device = piece.slot->device + begin;
  const std::byte* const pinned = piece.slot->pinned + begin;
  const bool as_it_is = batch_->dtype == travel_;
  if (piece.cut.up.size() == 1 && as_it_is) {
    const StagedRun& run = piece.cut.up.front();
    return lane_.Copy(run.out, pinned + Bytes(run.at), Bytes(run.count));
  }
  MoveSpec spec = BitwiseMove(travel_);
  if (!as_it_is) spec = {.from = travel_, .to = batch_->dtype};
  moves_.clear();
  for (const StagedRun& run : piece.cut.up) {
    moves_.push_back({device + Bytes(run.at), run.out, run.count});
  }
  FARANDOLE_RETURN_IF_ERROR(lane_.Copy(device, pinned, Bytes(piece.cut.out_count)));
  return lane_.Move(moves_, spec);
}

Status StagedWay::MoveWhatStays() {
  cut_.Stays(moves_);
  return moves_.empty() ? Status() : lane_.Move(moves_, BitwiseMove(batch_->dtype));
}

// A failed event is told by the next call.
bool StagedWay::InputsAreThere() const {
  return std::all_of(batch_->ready.begin(), batch_->ready.end(), [](DeviceEvent* event) {
    const Result<bool> passed = event->IsComplete();
    return !passed.ok() || passed.value();
  });
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
