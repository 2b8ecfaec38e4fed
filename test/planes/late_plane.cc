#include "test/planes/late_plane.h"

#include <algorithm>

namespace farandole {

class LatePlane::Operation final : public PlaneOperation {
 public:
  Operation(LatePlane& plane, uint32_t set, PlaneOperation* inner, int extra_steps)
      : plane_(plane), set_(set), inner_(inner), extra_steps_(extra_steps) {}

  uint32_t set() const { return set_; }

  Progress Step() override {
    if (inner_ != nullptr) {
      Progress progress = inner_->Step();
      if (progress.state == Progress::State::kFailed) plane_.Finish(*this);
      if (progress.state != Progress::State::kDone) return progress;
      inner_ = nullptr;
    }
    if (extra_steps_ > 0) --extra_steps_;
    if (extra_steps_ > 0 || !plane_.IsOldestOfItsSet(*this)) {
      return Progress::Waiting(plane_.options_.poll_after_ns);
    }
    plane_.Finish(*this);
    return Progress::Done();
  }

  void Abandon() override {
    if (inner_ != nullptr) inner_->Abandon();
    plane_.Finish(*this);
  }

 private:
  LatePlane& plane_;
  const uint32_t set_;
  PlaneOperation* inner_;
  int extra_steps_;
};

LatePlane::LatePlane(std::unique_ptr<DataPlane> inner, Options options)
    : inner_(std::move(inner)), options_(options), random_(options.seed) {}

LatePlane::~LatePlane() = default;

Status LatePlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  return inner_->AddSet(set, ranks, my_index);
}

void LatePlane::RemoveSet(uint32_t set) { inner_->RemoveSet(set); }

Result<PlaneOperation*> LatePlane::Start(const Batch& batch) {
  Result<PlaneOperation*> inner = inner_->Start(batch);
  if (!inner.ok()) return inner;
  std::uniform_int_distribution<int> extra_steps(0, options_.max_extra_steps);
  in_flight_.push_back(
      std::make_unique<Operation>(*this, batch.set, inner.value(), extra_steps(random_)));
  return in_flight_.back().get();
}

bool LatePlane::IsOldestOfItsSet(const Operation& operation) const {
  const auto oldest = std::find_if(in_flight_.begin(), in_flight_.end(), [&](const auto& other) {
    return other->set() == operation.set();
  });
  return oldest->get() == &operation;
}

void LatePlane::Finish(const Operation& operation) {
  std::erase_if(in_flight_, [&](const auto& other) { return other.get() == &operation; });
}

}  // namespace farandole
