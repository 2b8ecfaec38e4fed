// A GPU that notes when the collectives of a plane begin and end on it, for benchmarks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/device.h"

namespace farandole {

class StreamClock;

/// The devices of another runtime. Between Start and StopUs each collective of a GPU plane is noted
/// in its stream twice, by an event with a timestamp: when it may begin, and when it has ended.
///
/// How it is known: a plane creates its streams in the order pack, collective, unpack
/// (LaunchStreams); in the second one it waits before each collective and records an event after
/// it. Thread safety and lifetime: those of the inner runtime; Start and StopUs between batches
/// only.
class TimedRuntime final : public DeviceRuntime {
 public:
  explicit TimedRuntime(std::shared_ptr<DeviceRuntime> inner);
  ~TimedRuntime() override;

  std::string version() const override { return inner_->version(); }
  Result<int> Count() override { return inner_->Count(); }
  Result<Device*> Open(int index) override;

  void Start() { is_noting_ = true; }
  /// Microseconds since the first note: begin, end, begin, end, ... The batches are complete, and
  /// the device is current.
  std::vector<double> StopUs();

 private:
  class TimedDevice;
  class TimedEvent;

  /// Into the stream, if it is that of the collectives.
  void NoteIn(StreamHandle stream);

  const std::shared_ptr<DeviceRuntime> inner_;
  const std::unique_ptr<StreamClock> clock_;
  std::unique_ptr<TimedDevice> device_;
  StreamHandle collective_ = nullptr;
  int streams_ = 0;  // created
  bool is_noting_ = false;
};

}  // namespace farandole
