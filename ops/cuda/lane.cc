#include "ops/cuda/lane.h"

namespace farandole {

MoveSpec BitwiseMove(DType dtype) {
  MoveSpec spec;
  switch (SizeOf(dtype)) {
    case 2:
      spec.from = DType::kInt16;
      break;
    case 4:
      spec.from = DType::kInt32;
      break;
    case 8:
      spec.from = DType::kInt64;
      break;
    default:
      spec.from = DType::kUint8;
      break;
  }
  spec.to = spec.from;
  return spec;
}

Result<std::unique_ptr<CudaLane>> CudaLane::Create(Device& device, Counters* counters) {
  Result<StreamHandle> stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<CudaLane>(new CudaLane(device, stream.value(), counters));
}

CudaLane::CudaLane(Device& device, StreamHandle stream, Counters* counters)
    : device_(device), stream_(stream), counters_(counters) {}

CudaLane::~CudaLane() { device_.DestroyStream(stream_); }

Status CudaLane::WaitFor(std::span<DeviceEvent* const> events) {
  inputs_ = nullptr;
  if (events.empty()) return {};
  for (DeviceEvent* event : events) FARANDOLE_RETURN_IF_ERROR(event->MakeWait(stream_));
  Result<std::shared_ptr<DeviceEvent>> passed = RecordNow();
  if (passed.ok()) inputs_ = passed.value();
  return passed.status();
}

Result<std::shared_ptr<DeviceEvent>> CudaLane::MarkEnd() { return RecordNow(); }

Result<std::shared_ptr<DeviceEvent>> CudaLane::RecordNow() {
  std::shared_ptr<DeviceEvent> event;
  for (const std::shared_ptr<DeviceEvent>& one : events_) {
    if (one.use_count() == 1) event = one;
  }
  if (event == nullptr) {
    Result<std::shared_ptr<DeviceEvent>> created = device_.CreateEvent();
    if (!created.ok()) return created;
    event = created.value();
    events_.push_back(event);
  }
  FARANDOLE_RETURN_IF_ERROR(event->Record(stream_));
  return event;
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

Status CudaLane::Copy(void* to, const void* from, int64_t size_bytes) {
  FARANDOLE_RETURN_IF_ERROR(device_.Copy(to, from, size_bytes, stream_));
  if (counters_ != nullptr) counters_->Add(Counter::kBytesCopied, size_bytes);
  return {};
}

}  // namespace farandole
