#include "ops/cuda/solo_way.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/cpu/batch.h"

namespace farandole {
namespace {

bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

class SoloWay final : public CudaWay {
 public:
  SoloWay(CudaLane& lane, Staging& staging) : lane_(lane), staging_(staging) {}

  const char* name() const override { return "solo"; }
  Progress Connect() override { return Progress::Done(); }
  Status Begin(const Batch& batch) override {
    batch_ = &batch;
    return {};
  }
  Progress Step() override {
    Status status = Launch();
    return status.ok() ? Progress::Launched() : Progress::Failed(std::move(status));
  }
  std::shared_ptr<DeviceEvent> end() const override { return end_; }
  Status Check() override { return {}; }
  void Abandon() override {}

 private:
  Status Launch();
  Status MoveAll(double scale);
  Status MoveTwice(double first, double second);
  Status MoveThroughFloat(double first, double second);

  CudaLane& lane_;
  Staging& staging_;
  const Batch* batch_ = nullptr;
  std::vector<DeviceMove> moves_;
  std::shared_ptr<DeviceEvent> end_;
};

Status SoloWay::Launch() {
  FARANDOLE_RETURN_IF_ERROR(lane_.WaitFor(batch_->ready));
  const bool scales = batch_->kind != OpKind::kBroadcast;
  const double first = scales ? batch_->prescale : 1.0;
  const double second = scales ? batch_->postscale : 1.0;
  if (first == 1.0 || second == 1.0) {
    FARANDOLE_RETURN_IF_ERROR(MoveAll(first == 1.0 ? second : first));
  } else if (IsHalf(batch_->dtype)) {
    FARANDOLE_RETURN_IF_ERROR(MoveThroughFloat(first, second));
  } else {
    FARANDOLE_RETURN_IF_ERROR(MoveTwice(first, second));
  }
  Result<std::shared_ptr<DeviceEvent>> end = lane_.MarkEnd();
  if (end.ok()) end_ = end.value();
  return end.status();
}

Status SoloWay::MoveAll(double scale) {
  moves_.clear();
  for (const Segment& segment : batch_->segments) {
    const bool stays = segment.out == segment.in && scale == 1.0;
    if (segment.out == nullptr || segment.count == 0 || stays) continue;
    moves_.push_back({segment.in, segment.out, segment.count});
  }
  MoveSpec spec = BitwiseMove(batch_->dtype);
  if (scale != 1.0) spec = {.from = batch_->dtype, .to = batch_->dtype, .scale = scale};
  return moves_.empty() ? Status() : lane_.Move(moves_, spec);
}

// One product is rounded, or truncated, before the next; a product of both factors would give other
// bits.
Status SoloWay::MoveTwice(double first, double second) {
  FARANDOLE_RETURN_IF_ERROR(MoveAll(first));
  for (DeviceMove& move : moves_) move.in = move.out;
  const MoveSpec spec{.from = batch_->dtype, .to = batch_->dtype, .scale = second};
  return moves_.empty() ? Status() : lane_.Move(moves_, spec);
}

// 16-bit floats are multiplied twice in float and rounded once.
Status SoloWay::MoveThroughFloat(double first, double second) {
  Result<StagingSlot*> got = staging_.Get(0);
  if (!got.ok()) return got.status();
  StagingSlot& slot = *got.value();
  const int64_t room = staging_.slot_bytes() / SizeOf(DType::kFloat32);
  const MoveSpec widen{.from = batch_->dtype, .to = DType::kFloat32, .scale = first};
  const MoveSpec narrow{.from = DType::kFloat32, .to = batch_->dtype, .scale = second};
  SegmentCursor cursor(batch_->segments, batch_->dtype);
  staging_.Open(slot);
  for (Run run = cursor.Next(room); run.count > 0; run = cursor.Next(room)) {
    if (run.out == nullptr) continue;
    const DeviceMove down{run.in, slot.device, run.count};
    const DeviceMove up{slot.device, run.out, run.count};
    FARANDOLE_RETURN_IF_ERROR(lane_.Move({&down, 1}, widen));
    FARANDOLE_RETURN_IF_ERROR(lane_.Move({&up, 1}, narrow));
  }
  return staging_.Close(slot);
}

}  // namespace

std::unique_ptr<CudaWay> MakeSoloWay(CudaLane& lane, Staging& staging) {
  return std::make_unique<SoloWay>(lane, staging);
}

}  // namespace farandole
