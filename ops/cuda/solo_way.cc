#include "ops/cuda/solo_way.h"

#include <vector>

#include "ops/cpu/batch.h"

namespace farandole {
namespace {

bool Scales(const Batch& batch) {
  return Reduces(batch.kind) && (batch.prescale != 1.0 || batch.postscale != 1.0);
}

MoveSpec SpecOf(const Batch& batch) {
  if (!Scales(batch)) return BitwiseMove(batch.dtype);
  return {
      .from = batch.dtype, .to = batch.dtype, .scale = batch.prescale, .rescale = batch.postscale};
}

class SoloWay final : public CudaWay {
 public:
  explicit SoloWay(CudaLane& lane) : lane_(lane) {}

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

  CudaLane& lane_;
  const Batch* batch_ = nullptr;
  std::vector<DeviceMove> moves_;
  std::shared_ptr<DeviceEvent> end_;
};

Status SoloWay::Launch() {
  FARANDOLE_RETURN_IF_ERROR(lane_.WaitFor(batch_->ready));
  moves_.clear();
  for (const Segment& segment : batch_->segments) {
    const int64_t count = OutputCount(*batch_, segment);
    const bool stays = segment.out == segment.in && !Scales(*batch_);
    if (segment.out == nullptr || count == 0 || stays) continue;
    moves_.push_back({segment.in, segment.out, count});
  }
  if (!moves_.empty()) FARANDOLE_RETURN_IF_ERROR(lane_.Move(moves_, SpecOf(*batch_)));
  Result<std::shared_ptr<DeviceEvent>> end = lane_.MarkEnd();
  if (end.ok()) end_ = end.value();
  return end.status();
}

}  // namespace

std::unique_ptr<CudaWay> MakeSoloWay(CudaLane& lane) { return std::make_unique<SoloWay>(lane); }

}  // namespace farandole
