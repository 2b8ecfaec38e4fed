// A fake GPU: `DeviceRuntime` over host memory and threads, for machines that have none.
//
// It is a stand-in and proves no more than order, errors and arithmetic. What it does not have:
// the legacy default stream waits for no other stream, and nothing is fast.
//
//   FakeDeviceRuntime runtime(2);                  // two fake GPUs
//   FakeStream* producer = runtime.fake(0).NewStream();
//   producer->Hold();                              // what is put in now runs late
//   producer->Enqueue("a late write", [&] { *x = 1; });
//   ...                                            // the code under test
//   producer->Release();
//   runtime.fake(0).counts().launches              // what it did
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"
#include "test/fakes/driver.h"
#include "test/fakes/fake_memory.h"
#include "test/fakes/fake_stream.h"

namespace farandole {

/// The calls that can be made to fail.
enum class FakeCall : uint8_t {
  kOpen,
  kMakeCurrent,
  kCreateStream,
  kCreateEvent,
  kRecord,
  kMakeWait,
  kPassed,
  kIsCapturing,
  kAllocate,
  kAllocatePinned,
  kCopy,
  kCast,
};
inline constexpr int kFakeCallCount = 12;

/// What was asked of one device since its start. Calls that failed count too.
struct FakeCounts {
  int64_t calls[kFakeCallCount] = {};
  int64_t launches = 0;      ///< Kernels that Cast and CopyFlag took.
  int64_t items = 0;         ///< Tensors in them.
  int64_t copied_bytes = 0;  ///< By Copy.
  int64_t host_waits = 0;    ///< Free and FreePinned: the host waits for the whole device.
  int64_t live_streams = 0;  ///< Made by CreateStream and not destroyed.
  int64_t live_blocks = 0;   ///< Device memory that is not freed.
  int64_t live_pinned = 0;   ///< Pinned memory that is not freed.
  int64_t of(FakeCall call) const { return calls[static_cast<size_t>(call)]; }
};

class FakeDevice;

/// What a device and its events share; events may outlive the device.
///
/// Thread safety: any thread.
class FakeDeviceState {
 public:
  explicit FakeDeviceState(int index) : index_(index) {}
  int index() const { return index_; }
  /// Counts a call and answers for it: injected failures, a failed device.
  Status Begin(FakeCall call);
  void FailCall(FakeCall call, int k);
  void FailDevice();
  bool failed() const;
  /// The stream with this handle, of any device; null is this one's default stream.
  Result<FakeStream*> Find(StreamHandle handle);
  /// The same, but of this device.
  Result<FakeStream*> FindOwn(StreamHandle handle);
  FakeStream* AddStream(bool created);
  Status RemoveStream(StreamHandle handle);
  std::vector<FakeStream*> LiveStreams() const;
  void ReleaseStreams();
  /// The host waits until every stream is idle.
  void SynchronizeStreams();
  /// Waits for their ends. After this no stream is found.
  void StopStreams();
  void SlowDownNewStreams(int64_t us);
  void Misuse(std::string what);
  std::vector<std::string> TakeMisuses();
  FakeCounts counts() const;
  void Count(int64_t FakeCounts::*counter, int64_t by);

 private:
  std::string Text(FakeCall call, const char* why) const;

  const int index_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<FakeStream>> streams_;  // the first is the default stream
  std::vector<FakeStream*> created_;                  // by CreateStream
  FakeCounts counts_;
  int fail_at_[kFakeCallCount] = {};  // 0: not; k: the k-th call from now
  int64_t delay_us_ = 0;
  bool failed_ = false;
  std::vector<std::string> misuses_;
};

/// One fake GPU. Thread safety: any thread. Lifetime: that of its runtime.
class FakeDevice final : public Device {
 public:
  explicit FakeDevice(DeviceInfo info);
  ~FakeDevice() override;

  const DeviceInfo& info() const override { return info_; }
  Status MakeCurrent() override;
  Result<StreamHandle> CreateStream() override;
  void DestroyStream(StreamHandle stream) override;
  Result<std::shared_ptr<DeviceEvent>> CreateEvent() override;
  Result<bool> IsCapturing(StreamHandle stream) override;
  Result<void*> Allocate(int64_t size_bytes) override;
  void Free(void* memory) override;
  Result<void*> AllocatePinned(int64_t size_bytes) override;
  void FreePinned(void* memory) override;
  Status Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) override;
  Status Cast(std::span<const CastItem> items, const CastSpec& spec, StreamHandle stream,
              int* launches) override;
  Status CopyFlag(const uint32_t* pinned, uint32_t* flag, StreamHandle stream) override;

  // For tests.

  /// Ends holds on all streams.
  void ReleaseStreams() { state_->ReleaseStreams(); }
  /// A stream as a user's framework has it; it lives as long as the device.
  FakeStream* NewStream() { return state_->AddStream(/*created=*/false); }
  FakeStream* default_stream() { return state_->Find(nullptr).value(); }
  /// Those made by CreateStream and not destroyed, oldest first.
  std::vector<FakeStream*> streams() const { return state_->LiveStreams(); }
  /// Streams that CreateStream makes from now on sleep so long before every command.
  void SlowDownNewStreams(int64_t us) { state_->SlowDownNewStreams(us); }
  /// The k-th such call from now fails, once: ResourceExhausted for memory, Internal otherwise.
  void FailCall(FakeCall call, int k) { state_->FailCall(call, k); }
  /// From now on every call fails and nothing is executed, as after an illegal address.
  void FailDevice() { state_->FailDevice(); }
  /// Frees what the code under test gave up on purpose.
  void FreeAll() {
    memory_.FreeAll();
    pinned_.FreeAll();
  }
  FakeCounts counts() const;
  /// Wrong uses found so far (also written to stderr), which a test that expects them takes away:
  /// a device that ends with any left aborts the program.
  std::vector<std::string> TakeMisuses() { return state_->TakeMisuses(); }
  /// For the runtime: counts an Open and answers for it.
  Status BeginOpen() { return state_->Begin(FakeCall::kOpen); }
  /// What the fake NCCL sees.
  const FarandoleFakeDevice* driver() const { return &driver_; }

 private:
  const DeviceInfo info_;
  const std::shared_ptr<FakeDeviceState> state_;
  FakeMemory memory_;
  FakeMemory pinned_;
  FarandoleFakeDevice driver_;
};

/// Some fake GPUs. Lifetime: at its end all streams run what they hold, holds and delays set aside.
class FakeDeviceRuntime final : public DeviceRuntime {
 public:
  /// "Fake GPU <index>", bus ids "0000:<index + 1>:00.0", 16 GiB each.
  explicit FakeDeviceRuntime(int count);
  explicit FakeDeviceRuntime(std::vector<DeviceInfo> infos);
  ~FakeDeviceRuntime() override;

  std::string version() const override { return "fake CUDA (host memory and threads; no GPU)"; }
  Result<int> Count() override { return static_cast<int>(devices_.size()); }
  Result<Device*> Open(int index) override;

  FakeDevice& fake(int index) { return *devices_[static_cast<size_t>(index)]; }
  /// How many devices were opened; the others were not touched.
  int opened() const;

 private:
  std::vector<std::unique_ptr<FakeDevice>> devices_;
  mutable std::mutex mutex_;
  std::set<int> opened_;
};

}  // namespace farandole
