#include "ops/gpu/backend.h"

#include <utility>

#include "ops/cpu/batch.h"

namespace farandole {

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

CastSpec SpecOf(const Batch& batch) {
  if (!Scales(batch)) return BitwiseCopy(batch.dtype);
  return {
      .from = batch.dtype, .to = batch.dtype, .scale = batch.prescale, .rescale = batch.postscale};
}

class SoloSet final : public LaunchQueue::Client {
 public:
  explicit SoloSet(LaunchQueue& queue) : queue_(queue) {}

  Status Launch(std::span<const std::shared_ptr<LaunchTask>> tasks) override {
    for (const auto& task : tasks) {
      FARANDOLE_RETURN_IF_ERROR(LaunchOne(task->batch.batch(), *task));
    }
    return {};
  }

 private:
  Status LaunchOne(const Batch& batch, LaunchTask& task) {
    CommStream& stream = *queue_.streams().unpack;
    FARANDOLE_RETURN_IF_ERROR(stream.WaitFor(batch.ready));
    FARANDOLE_RETURN_IF_ERROR(stream.Record(task.inputs));
    FARANDOLE_RETURN_IF_ERROR(stream.Cast(Items(batch), SpecOf(batch)));
    return stream.Record(task.end);
  }
  std::vector<CastItem>& Items(const Batch& batch) {
    items_.clear();
    for (const Segment& segment : batch.segments) {
      const int64_t count = OutputCount(batch, segment);
      const bool stays = segment.out == segment.in && !Scales(batch);
      if (segment.out == nullptr || count == 0 || stays) continue;
      items_.push_back({segment.in, segment.out, count});
    }
    return items_;
  }

  LaunchQueue& queue_;
  std::vector<CastItem> items_;
};

class SoloBackend final : public GpuBackend {
 public:
  explicit SoloBackend(LaunchQueue& queue)
      : queue_(queue), set_(std::make_shared<SoloSet>(queue)) {}

  Result<std::shared_ptr<LaunchTask>> Begin(const Batch& batch) override {
    return queue_.Launch(set_, batch);
  }

 private:
  LaunchQueue& queue_;
  const std::shared_ptr<SoloSet> set_;
};

}  // namespace

std::unique_ptr<GpuBackend> MakeSoloBackend(LaunchQueue& queue) {
  return std::make_unique<SoloBackend>(queue);
}

}  // namespace farandole
