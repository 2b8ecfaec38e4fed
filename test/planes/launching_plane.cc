#include "test/planes/launching_plane.h"

#include <utility>

#include "core/clock.h"

namespace farandole {

class LaunchingPlane::Operation final : public PlaneOperation {
 public:
  Operation(LaunchingPlane& plane, const Batch& batch) : plane_(plane), batch_(batch) {}

  Progress Step() override {
    if (end_ != nullptr) return AwaitEnd();
    for (const std::shared_ptr<DeviceEvent>& ready : batch_.ready) {
      if (!ready->IsComplete().value()) return Progress::WaitingForInputs(kNsPerUs);
    }
    if (inner_ == nullptr) {
      Result<PlaneOperation*> started = plane_.inner_->Start(batch_);
      if (!started.ok()) return Progress::Failed(started.status());
      inner_ = started.value();
    }
    const Progress progress = inner_->Step();
    if (progress.state != Progress::State::kDone) return progress;
    inner_ = nullptr;
    end_ = plane_.device_.CreateEvent().value();
    Status recorded = end_->Record(plane_.stream_);
    return recorded.ok() ? Progress::Launched() : Progress::Failed(recorded);
  }

  std::shared_ptr<DeviceEvent> end() const override { return end_; }

  void Abandon() override {
    if (inner_ != nullptr) inner_->Abandon();
  }

 private:
  Progress AwaitEnd() const {
    return end_->IsComplete().value() ? Progress::Done() : Progress::Waiting(kNsPerUs);
  }

  LaunchingPlane& plane_;
  const Batch& batch_;
  PlaneOperation* inner_ = nullptr;
  std::shared_ptr<DeviceEvent> end_;
};

LaunchingPlane::LaunchingPlane(std::unique_ptr<DataPlane> inner, Device& device,
                               StreamHandle stream)
    : inner_(std::move(inner)), device_(device), stream_(stream) {}

LaunchingPlane::~LaunchingPlane() = default;

Status LaunchingPlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  return inner_->AddSet(set, ranks, my_index);
}

void LaunchingPlane::RemoveSet(uint32_t set) { inner_->RemoveSet(set); }

// Operations are kept until the plane ends: a test starts few.
Result<PlaneOperation*> LaunchingPlane::Start(const Batch& batch) {
  operations_.push_back(std::make_unique<Operation>(*this, batch));
  return operations_.back().get();
}

}  // namespace farandole
