#include "test/planes/blocking_plane.h"

#include <chrono>
#include <thread>
#include <utility>

namespace farandole {

class BlockingPlane::Operation final : public PlaneOperation {
 public:
  Operation(BlockingPlane& plane, PlaneOperation* inner) : plane_(plane), inner_(inner) {}

  Progress Step() override {
    if (!plane_.CallLibrary(Where::kStep)) return Progress::Failed(Aborted("returned too late"));
    return inner_->Step();
  }
  void Abandon() override { inner_->Abandon(); }

 private:
  BlockingPlane& plane_;
  PlaneOperation* const inner_;
};

BlockingPlane::BlockingPlane(std::unique_ptr<DataPlane> inner, BorrowedMemory& memory,
                             Predicate blocks)
    : inner_(std::move(inner)), memory_(memory), blocks_(std::move(blocks)) {}

BlockingPlane::~BlockingPlane() = default;

Status BlockingPlane::AddSet(uint32_t set, std::span<const int> ranks, int my_index) {
  return inner_->AddSet(set, ranks, my_index);
}

void BlockingPlane::RemoveSet(uint32_t set) { inner_->RemoveSet(set); }

Result<PlaneOperation*> BlockingPlane::Start(const Batch& batch) {
  if (!CallLibrary(Where::kStart)) return Aborted("returned too late");
  Result<PlaneOperation*> inner = inner_->Start(batch);
  if (!inner.ok()) return inner.status();
  operations_.push_back(std::make_unique<Operation>(*this, inner.value()));
  return operations_.back().get();
}

bool BlockingPlane::CallLibrary(Where where) {
  const LibraryCall call(&memory_);
  if (!open_.load() && blocks_(where)) {
    stuck_.store(true);
    while (!open_.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stuck_.store(false);
  }
  return call.ReturnedInTime();
}

}  // namespace farandole
