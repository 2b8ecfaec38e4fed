// The engine's dealings with streams: what comes before an operation on a GPU, and what after it.
#include <string>

#include "coordinator/engine.h"

namespace farandole {

Result<Device*> Engine::DeviceOf(const ProducerStream& stream) {
  if (parts_.home == nullptr) return Unavailable("this context has no GPUs");
  return parts_.home->Use(stream.device);
}

// Marks in each producer how far it must have come before the operation reads. The operation's
// events are its own, so they may be recorded anew as soon as it was launched: its waits are made.
Status Engine::RecordReady(Operation& operation, const Vote& vote,
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
    Result<Device*> device = DeviceOf(producer);
    if (!device.ok()) {
      return Status(device.status().code(),
                    Describe(operation.name) + ": " + device.status().message());
    }
    Result<bool> capturing = device.value()->IsCapturing(producer.stream);
    if (!capturing.ok()) return capturing.status();
    if (capturing.value()) {
      return InvalidArgument(Describe(operation.name) +
                             ": its stream is being captured into a CUDA graph, which cannot hold "
                             "what ranks negotiate; start it outside of the capture");
    }
    if (operation.ready.size() == operation.ready_count) {
      Result<std::shared_ptr<DeviceEvent>> event = device.value()->CreateEvent();
      if (!event.ok()) return event.status();
      operation.ready.push_back(std::move(event).value());
    }
    FARANDOLE_RETURN_IF_ERROR(operation.ready[operation.ready_count]->Record(producer.stream));
    ++operation.ready_count;
  }
  if (on_device) uses_device_.store(true, std::memory_order_relaxed);
  return {};
}

Status Engine::MakeWait(const std::shared_ptr<DeviceEvent>& end, const ProducerStream& stream) {
  if (end == nullptr) return {};
  Result<Device*> device = DeviceOf(stream);
  if (!device.ok()) return device.status();
  return end->MakeWait(stream.stream);
}

}  // namespace farandole
