#include "test/planes/stopping_plane.h"

namespace farandole {

class StoppingPlane::Stopped final : public PlaneOperation {
 public:
  explicit Stopped(StoppingPlane& plane) : plane_(plane) {}

  Progress Step() override { return Progress::Waiting(); }

  void Abandon() override {
    if (plane_.on_abandon_) plane_.on_abandon_();
    ++plane_.abandoned_;
    std::erase_if(plane_.stopped_, [this](const auto& other) { return other.get() == this; });
  }

 private:
  StoppingPlane& plane_;
};

StoppingPlane::StoppingPlane(std::unique_ptr<DataPlane> inner, Predicate stops,
                             std::function<void()> on_abandon)
    : inner_(std::move(inner)), stops_(std::move(stops)), on_abandon_(std::move(on_abandon)) {}

StoppingPlane::~StoppingPlane() = default;

StoppingPlane::Predicate StoppingPlane::Set(uint32_t set) {
  return [set](const Batch& batch) { return batch.set == set; };
}

StoppingPlane::Predicate StoppingPlane::Decision(int64_t number) {
  return [number](const Batch& batch) { return batch.number == number; };
}

Status StoppingPlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  return inner_->AddSet(set, ranks, my_index);
}

void StoppingPlane::RemoveSet(uint32_t set) { inner_->RemoveSet(set); }

Result<PlaneOperation*> StoppingPlane::Start(const Batch& batch) {
  if (!stops_(batch)) return inner_->Start(batch);
  stopped_.push_back(std::make_unique<Stopped>(*this));
  return stopped_.back().get();
}

}  // namespace farandole
