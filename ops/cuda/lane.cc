#include "ops/cuda/lane.h"

namespace farandole {

Result<std::unique_ptr<CudaLane>> CudaLane::Create(Device& device, Counters* counters) {
  Result<StreamHandle> stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<CudaLane>(new CudaLane(device, stream.value(), counters));
}

CudaLane::CudaLane(Device& device, StreamHandle stream, Counters* counters)
    : device_(device), stream_(stream), counters_(counters) {}

CudaLane::~CudaLane() { device_.DestroyStream(stream_); }

Status CudaLane::WaitFor(std::span<DeviceEvent* const> events) {
  for (DeviceEvent* event : events) FARANDOLE_RETURN_IF_ERROR(event->MakeWait(stream_));
  return {};
}

Result<std::shared_ptr<DeviceEvent>> CudaLane::MarkEnd() {
  std::shared_ptr<DeviceEvent> end;
  for (const std::shared_ptr<DeviceEvent>& one : ends_) {
    if (one.use_count() == 1) end = one;
  }
  if (end == nullptr) {
    Result<std::shared_ptr<DeviceEvent>> created = device_.CreateEvent();
    if (!created.ok()) return created;
    end = created.value();
    ends_.push_back(end);
  }
  FARANDOLE_RETURN_IF_ERROR(end->Record(stream_));
  return end;
}

Status CudaLane::Move(std::span<const DeviceMove> moves, const MoveSpec& spec) {
  int launches = 0;
  FARANDOLE_RETURN_IF_ERROR(device_.Move(moves, spec, stream_, &launches));
  if (counters_ == nullptr) return {};
  counters_->Add(Counter::kDeviceLaunches, launches);
  int64_t count = 0;
  for (const DeviceMove& move : moves) count += move.count;
  counters_->Add(Counter::kBytesCopied, count * SizeOf(spec.to));
  return {};
}

}  // namespace farandole
