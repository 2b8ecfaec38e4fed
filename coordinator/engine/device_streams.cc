#include "coordinator/engine/device_streams.h"

#include <string>
#include <utility>

namespace farandole {
namespace {

Status RecordProducer(Operation& operation, Device& device, StreamHandle stream) {
  operation.gpu = &device;
  operation.producer = stream;
  // The event of an earlier start is recorded again, so that only the first start creates one.
  if (operation.ready.size() == operation.ready_count) {
    Result<std::shared_ptr<DeviceEvent>> event = device.CreateEvent();
    if (!event.ok()) return event.status();
    operation.ready.push_back(std::move(event).value());
  }
  const Status recorded = operation.RecordReady(*operation.ready[operation.ready_count]);
  if (!recorded.ok()) {
    return Status(recorded.code(), Describe(operation.name) + ": " + recorded.message());
  }
  ++operation.ready_count;
  return {};
}

}  // namespace

Result<Device*> DeviceStreams::GpuOf(const ProducerStream& stream) {
  if (gpu_ == nullptr) return Unavailable("this context has no GPUs");
  return gpu_->Use(stream.device);
}

// The operation's events are its own and may be recorded again once it was launched: what waits for
// them was enqueued by then.
Status DeviceStreams::RecordReady(Operation& operation, const Vote& vote,
                                  std::span<const ProducerStream> producers) {
  operation.ready_count = 0;
  const bool on_device = operation.signature.device == DeviceKind::kCuda;
  if (!vote.failed.empty()) return {};  // reads and writes nothing
  if (on_device != !producers.empty()) {
    return InvalidArgument(Describe(operation.name) +
                           (on_device ? ": tensors on a GPU need the stream that makes them"
                                      : ": a stream was given for tensors on the CPU"));
  }
  for (const ProducerStream& producer : producers) {
    Result<Device*> gpu = GpuOf(producer);
    if (!gpu.ok()) {
      return Status(gpu.status().code(), Describe(operation.name) + ": " + gpu.status().message());
    }
    FARANDOLE_RETURN_IF_ERROR(RecordProducer(operation, *gpu.value(), producer.stream));
  }
  // Before the operation is in the queue, since no caller may run the step that starts it.
  if (on_device) SetInUse();
  return {};
}

Status DeviceStreams::MakeWait(const std::shared_ptr<DeviceEvent>& end,
                               const ProducerStream& stream) {
  if (end == nullptr) return {};
  if (end->device() != stream.device) {
    return InvalidArgument("the work is on CUDA device " + std::to_string(end->device()) +
                           "; expected a stream of it to wait, got one of device " +
                           std::to_string(stream.device));
  }
  const Result<Device*> gpu = GpuOf(stream);
  if (!gpu.ok()) return gpu.status();
  const Result<bool> capturing = gpu.value()->IsCapturing(stream.stream);
  if (!capturing.ok()) return capturing.status();
  if (capturing.value()) {
    return InvalidArgument(
        "the stream that is to wait is being captured into a CUDA graph, which cannot hold what "
        "ranks negotiate; wait outside of the capture");
  }
  return end->MakeWait(stream.stream);
}

}  // namespace farandole
