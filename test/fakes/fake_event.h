// A fake CUDA event: the newest of the moments that were recorded.
#pragma once

#include <memory>
#include <utility>

#include "test/fakes/fake_device.h"

namespace farandole {

/// As `DeviceEvent` says. Without a lock of its own, so that ThreadSanitizer sees two threads that
/// use one event at once.
class FakeEvent final : public DeviceEvent {
 public:
  explicit FakeEvent(std::shared_ptr<FakeDeviceState> state) : state_(std::move(state)) {}
  int device() const override { return state_->index(); }
  Status Record(StreamHandle stream) override;
  Status MakeWait(StreamHandle stream) override;
  Result<bool> IsComplete() override;

 private:
  const std::shared_ptr<FakeDeviceState> state_;
  std::shared_ptr<FakeMoment> moment_;
};

}  // namespace farandole
