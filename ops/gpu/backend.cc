#include "ops/gpu/backend.h"

#include <utility>

#include "ops/cpu/batch.h"

namespace farandole {

void OwnedBatch::Assign(const Batch& batch) {
  batch_ = batch;
  const auto own = [](auto& mine, auto& span) {
    mine.assign(span.begin(), span.end());
    span = mine;
  };
  own(ranks_, batch_.ranks);
  own(absent_, batch_.absent);
  own(segments_, batch_.segments);
  own(splits_, batch_.splits);
  own(sends_, batch_.sends);
  own(receives_, batch_.receives);
  own(ready_, batch_.ready);
}

Result<std::unique_ptr<HostSet>> HostSet::Create(DataPlane& plane, uint32_t set,
                                                 std::span<const int> ranks, int my_index) {
  FARANDOLE_RETURN_IF_ERROR(plane.AddSet(set, ranks, my_index));
  return std::unique_ptr<HostSet>(new HostSet(plane, set, ranks, my_index));
}

Result<PlaneOperation*> HostSet::Start(Batch& batch) {
  batch.number = next_number_++;
  batch.set = set_;
  batch.ranks = ranks_;
  batch.my_index = my_index_;
  return plane_.Start(batch);
}

namespace {

bool Scales(const Batch& batch) {
  return Reduces(batch.kind) && (batch.prescale != 1.0 || batch.postscale != 1.0);
}

MoveSpec SpecOf(const Batch& batch) {
  if (!Scales(batch)) return BitwiseMove(batch.dtype);
  return {
      .from = batch.dtype, .to = batch.dtype, .scale = batch.prescale, .rescale = batch.postscale};
}

class SoloTask final : public LaunchTask {
 public:
  explicit SoloTask(LaunchQueue& queue) : queue_(queue) {}
  OwnedBatch batch;

  Status Run() override {
    if (queue_.failed()) return queue_.failure();
    CommStream& stream = *queue_.streams().unpack;
    FARANDOLE_RETURN_IF_ERROR(stream.WaitFor(batch.batch().ready));
    FARANDOLE_RETURN_IF_ERROR(stream.Mark(inputs));
    FARANDOLE_RETURN_IF_ERROR(stream.Move(Moves(), SpecOf(batch.batch())));
    return stream.Mark(end);
  }

 private:
  std::vector<DeviceMove>& Moves() {
    moves_.clear();
    for (const Segment& segment : batch.batch().segments) {
      const int64_t count = OutputCount(batch.batch(), segment);
      const bool stays = segment.out == segment.in && !Scales(batch.batch());
      if (segment.out == nullptr || count == 0 || stays) continue;
      moves_.push_back({segment.in, segment.out, count});
    }
    return moves_;
  }

  LaunchQueue& queue_;
  std::vector<DeviceMove> moves_;
};

class SoloBackend final : public GpuBackend {
 public:
  explicit SoloBackend(LaunchQueue& queue) : queue_(queue) {}

  Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) override {
    auto task = std::make_shared<SoloTask>(queue_);
    task->batch.Assign(batch);
    queue_.Push(task);
    return std::shared_ptr<LaunchTask>(std::move(task));
  }
  Progress Step() override { return Progress::Done(); }
  void Abandon() override {}

 private:
  LaunchQueue& queue_;
};

}  // namespace

std::unique_ptr<GpuBackend> MakeSoloBackend(LaunchQueue& queue) {
  return std::make_unique<SoloBackend>(queue);
}

}  // namespace farandole
