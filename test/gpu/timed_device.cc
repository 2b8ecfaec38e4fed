#include "test/gpu/timed_device.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <utility>

#include "core/clock.h"
#include "test/fakes/driver.h"

namespace farandole {

/// When a stream reaches its notes. Thread safety: the launch thread notes; TakeUs once the stream
/// has come to its end.
class StreamClock {
 public:
  virtual ~StreamClock() = default;
  virtual void Note(StreamHandle stream) = 0;
  /// Microseconds since the first note, of all notes since the last call.
  virtual std::vector<double> TakeUs() = 0;
};

namespace {

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "timestamps: %s\n", what);
  std::exit(1);
}

/// Events of CUDA's driver, which is in the process already.
class CudaClock final : public StreamClock {
 public:
  CudaClock() {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == nullptr) Fail(dlerror());
    Find(driver, "cuEventCreate", create_);
    Find(driver, "cuEventRecord", record_);
    Find(driver, "cuEventElapsedTime", elapsed_);
  }

  void Note(StreamHandle stream) override {
    if (used_ == events_.size()) {
      void* event = nullptr;
      if (create_(&event, 0) != 0) Fail("cuEventCreate");
      events_.push_back(event);
    }
    if (record_(events_[used_++], stream) != 0) Fail("cuEventRecord");
  }
  std::vector<double> TakeUs() override {
    std::vector<double> times_us;
    for (size_t i = 0; i < used_; ++i) {
      float ms = 0;
      if (elapsed_(&ms, events_[0], events_[i]) != 0) Fail("cuEventElapsedTime");
      times_us.push_back(1e3 * static_cast<double>(ms));
    }
    used_ = 0;
    return times_us;
  }

 private:
  template <class Function>
  static void Find(void* driver, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(driver, name));
    if (function == nullptr) Fail(name);
  }

  int (*create_)(void** event, unsigned int flags) = nullptr;
  int (*record_)(void* event, void* stream) = nullptr;
  int (*elapsed_)(float* ms, void* begin, void* end) = nullptr;
  std::vector<void*> events_;  // used again; they stay until the process ends
  size_t used_ = 0;
};

/// The time at which the fake stream's thread comes by.
class FakeClock final : public StreamClock {
 public:
  void Note(StreamHandle stream) override {
    auto* const fake = static_cast<FarandoleFakeStream*>(stream);
    const auto note = [](void* time_ns) {
      *static_cast<int64_t*>(time_ns) = SteadyClock().NowNs();
    };
    if (fake->enqueue(
            fake, "note the time", note, [](void*) {}, &times_ns_.emplace_back(0)) != 0)
      Fail("the fake stream takes nothing");
  }
  std::vector<double> TakeUs() override {
    std::vector<double> times_us;
    for (const int64_t time_ns : times_ns_) {
      times_us.push_back(static_cast<double>(time_ns - times_ns_.front()) / 1e3);
    }
    times_ns_.clear();
    return times_us;
  }

 private:
  std::deque<int64_t> times_ns_;  // does not move them
};

std::unique_ptr<StreamClock> ClockOf(const DeviceRuntime& runtime) {
  if (runtime.version().starts_with("fake")) return std::make_unique<FakeClock>();
  return std::make_unique<CudaClock>();
}

}  // namespace

class TimedRuntime::TimedEvent final : public DeviceEvent {
 public:
  TimedEvent(TimedRuntime& runtime, std::shared_ptr<DeviceEvent> inner)
      : runtime_(runtime), inner_(std::move(inner)) {}
  int device() const override { return inner_->device(); }
  Status Record(StreamHandle stream) override {
    runtime_.NoteIn(stream);
    return inner_->Record(stream);
  }
  Status MakeWait(StreamHandle stream) override {
    Status made = inner_->MakeWait(stream);
    runtime_.NoteIn(stream);
    return made;
  }
  Result<bool> IsComplete() override { return inner_->IsComplete(); }

 private:
  TimedRuntime& runtime_;
  const std::shared_ptr<DeviceEvent> inner_;
};

class TimedRuntime::TimedDevice final : public Device {
 public:
  TimedDevice(TimedRuntime& runtime, Device& inner) : runtime_(runtime), inner_(inner) {}

  const DeviceInfo& info() const override { return inner_.info(); }
  Status MakeCurrent() override { return inner_.MakeCurrent(); }
  Result<StreamHandle> CreateStream() override {
    Result<StreamHandle> stream = inner_.CreateStream();
    if (stream.ok() && ++runtime_.streams_ == 2) runtime_.collective_ = stream.value();
    return stream;
  }
  void DestroyStream(StreamHandle stream) override { inner_.DestroyStream(stream); }
  Result<std::shared_ptr<DeviceEvent>> CreateEvent() override {
    Result<std::shared_ptr<DeviceEvent>> event = inner_.CreateEvent();
    if (!event.ok()) return event.status();
    return std::shared_ptr<DeviceEvent>(std::make_shared<TimedEvent>(runtime_, event.value()));
  }
  Result<bool> IsCapturing(StreamHandle stream) override { return inner_.IsCapturing(stream); }
  Result<void*> Allocate(int64_t size_bytes) override { return inner_.Allocate(size_bytes); }
  void Free(void* memory) override { inner_.Free(memory); }
  Result<void*> AllocatePinned(int64_t size_bytes) override {
    return inner_.AllocatePinned(size_bytes);
  }
  void FreePinned(void* memory) override { inner_.FreePinned(memory); }
  Status Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) override {
    return inner_.Copy(to, from, size_bytes, stream);
  }
  Status Cast(std::span<const CastItem> items, const CastSpec& spec, StreamHandle stream,
              int* launches) override {
    return inner_.Cast(items, spec, stream, launches);
  }
  Status CopyFlag(const uint32_t* pinned, uint32_t* flag, StreamHandle stream) override {
    return inner_.CopyFlag(pinned, flag, stream);
  }

 private:
  TimedRuntime& runtime_;
  Device& inner_;
};

TimedRuntime::TimedRuntime(std::shared_ptr<DeviceRuntime> inner)
    : inner_(std::move(inner)), clock_(ClockOf(*inner_)) {}

TimedRuntime::~TimedRuntime() = default;

Result<Device*> TimedRuntime::Open(int index) {
  Result<Device*> device = inner_->Open(index);
  if (!device.ok()) return device.status();
  if (device_ == nullptr) device_ = std::make_unique<TimedDevice>(*this, *device.value());
  return device_.get();
}

std::vector<double> TimedRuntime::StopUs() {
  is_noting_ = false;
  return clock_->TakeUs();
}

void TimedRuntime::NoteIn(StreamHandle stream) {
  if (is_noting_ && stream == collective_) clock_->Note(stream);
}

}  // namespace farandole
