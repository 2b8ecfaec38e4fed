// libfarandole_fake_cuda.so: the fake GPU as a plug-in, and for programs that are not C++.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/plugin_entry.h"
#include "test/fakes/fake_cuda.h"
#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

int NumberOf(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

std::shared_ptr<FakeDeviceRuntime> MakeRuntime() {
  const int count = NumberOf("FARANDOLE_TEST_CUDA_DEVICES", 8);
  auto runtime = std::make_shared<FakeDeviceRuntime>(count);
  for (int i = 0; i < count; ++i) {
    runtime->fake(i).SlowDownNewStreams(NumberOf("FARANDOLE_TEST_CUDA_SLOW_US", 0));
  }
  return runtime;
}

struct Process {
  std::mutex mutex;
  std::shared_ptr<FakeDeviceRuntime> runtime;
};

Process& OfProcess() {
  static auto* process = new Process;  // engines may use it until the very end
  return *process;
}

std::shared_ptr<FakeDeviceRuntime> Runtime() {
  std::lock_guard lock(OfProcess().mutex);
  if (OfProcess().runtime == nullptr) OfProcess().runtime = MakeRuntime();
  return OfProcess().runtime;
}

FakeDevice* DeviceAt(int index) {
  const std::shared_ptr<FakeDeviceRuntime> runtime = Runtime();
  return index >= 0 && index < runtime->Count().value() ? &runtime->fake(index) : nullptr;
}

/// Calls `use` with the stream. @return 0, or 1 if it is not there.
int WithStream(int index, void* handle, const std::function<void(FakeStream&)>& use) {
  FakeDevice* device = DeviceAt(index);
  if (device == nullptr) return 1;
  FakeStream* stream = handle == nullptr ? device->default_stream() : FakeStream::Find(handle);
  if (stream == nullptr) return 1;
  use(*stream);
  return 0;
}

}  // namespace
}  // namespace farandole

using farandole::FakeCounts;
using farandole::FakeDevice;
using farandole::FakeDeviceRuntime;
using farandole::FakeStream;

FARANDOLE_PLUGIN_ENTRY {
  return farandole::EnterPlugin(build_id, error, error_size,
                                [&] { backends->device = farandole::Runtime(); });
}

void* farandole_fake_stream_create(int device) {
  FakeDevice* found = farandole::DeviceAt(device);
  return found == nullptr ? nullptr : found->NewStream()->handle();
}

int farandole_fake_stream_destroy(int device, void* stream) {
  return farandole::WithStream(device, stream, [](FakeStream& it) { it.Close(); });
}

int farandole_fake_stream_synchronize(int device, void* stream) {
  return farandole::WithStream(device, stream, [](FakeStream& it) { it.Synchronize(); });
}

int farandole_fake_stream_is_idle(int device, void* stream) {
  bool idle = false;
  farandole::WithStream(device, stream, [&](FakeStream& it) { idle = it.Idle(); });
  return idle ? 1 : 0;
}

int farandole_fake_stream_write(int device, void* stream, void* to, const void* from, int64_t size,
                                int64_t delay_us) {
  const auto* begin = static_cast<const char*>(from);
  const std::vector<char> bytes(begin, begin + size);
  return farandole::WithStream(device, stream, [&](FakeStream& it) {
    it.Enqueue("a late write", [to, bytes, delay_us] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      std::memcpy(to, bytes.data(), bytes.size());
    });
  });
}

int farandole_fake_stream_copy(int device, void* stream, void* to, const void* from, int64_t size) {
  return farandole::WithStream(device, stream, [&](FakeStream& it) {
    it.Enqueue("a copy", [to, from, size] { std::memcpy(to, from, static_cast<size_t>(size)); });
  });
}

int farandole_fake_stream_hold(int device, void* stream) {
  return farandole::WithStream(device, stream, [](FakeStream& it) { it.Hold(); });
}

int farandole_fake_stream_release(int device, void* stream) {
  return farandole::WithStream(device, stream, [](FakeStream& it) { it.Release(); });
}

int farandole_fake_stream_begin_capture(int device, void* stream) {
  return farandole::WithStream(device, stream, [](FakeStream& it) { it.BeginCapture(); });
}

int farandole_fake_stream_end_capture(int device, void* stream) {
  return farandole::WithStream(device, stream, [](FakeStream& it) { it.EndCapture(); });
}

int farandole_fake_device_fail(int device) {
  FakeDevice* found = farandole::DeviceAt(device);
  if (found == nullptr) return 1;
  found->FailDevice();
  return 0;
}

int64_t farandole_fake_device_count(int device, const char* what) {
  FakeDevice* found = farandole::DeviceAt(device);
  if (found == nullptr) return -1;
  const FakeCounts counts = found->counts();
  const std::string name = what;
  if (name == "launches") return counts.launches;
  if (name == "items") return counts.items;
  if (name == "copied_bytes") return counts.copied_bytes;
  if (name == "host_waits") return counts.host_waits;
  if (name == "live_streams") return counts.live_streams;
  if (name == "live_blocks") return counts.live_blocks;
  if (name == "live_pinned") return counts.live_pinned;
  if (name == "events") return counts.of(farandole::FakeCall::kCreateEvent);
  if (name == "copies") return counts.of(farandole::FakeCall::kCopy);
  return -1;
}

int farandole_fake_devices_opened(void) { return farandole::Runtime()->opened(); }

void farandole_fake_cuda_end(void) {
  std::shared_ptr<FakeDeviceRuntime> ended;
  const std::lock_guard lock(farandole::OfProcess().mutex);
  ended.swap(farandole::OfProcess().runtime);
}
