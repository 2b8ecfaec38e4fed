// A stream of ours with what is enqueued in it: waits, casts, copies, and events at its end.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/counters.h"
#include "core/status.h"
#include "ops/device.h"

namespace farandole {

/// How elements of `dtype` are copied without a look at them: every bit stays, of NaNs too.
CastSpec BitwiseCopy(DType dtype);

/// Thread safety: one thread at a time. Lifetime: events handed out outlive it.
class CommStream {
 public:
  /// @param counters  May be nullptr.
  static Result<std::unique_ptr<CommStream>> Create(Device& device, Counters* counters);
  ~CommStream();
  CommStream(const CommStream&) = delete;
  CommStream& operator=(const CommStream&) = delete;

  Device& device() const { return device_; }
  StreamHandle stream() const { return stream_; }
  /// What comes next in the stream waits for the event; nullptr: for nothing.
  Status WaitFor(const std::shared_ptr<DeviceEvent>& event) {
    return event == nullptr ? Status() : event->MakeWait(stream_);
  }
  Status WaitFor(std::span<const std::shared_ptr<DeviceEvent>> events);
  /// Sets `event` to one that is complete once the stream has done what it holds now. Events that
  /// nobody holds any more are used again.
  Status Record(std::shared_ptr<DeviceEvent>& event);
  /// Enqueues the casts and counts launches and bytes; nothing for no items.
  Status Cast(std::span<const CastItem> items, const CastSpec& spec);
  /// Enqueues Device::CopyFlag and counts the launch.
  Status CopyFlag(const uint32_t* pinned, uint32_t* flag);
  /// Enqueues a copy between device and pinned memory and counts its bytes.
  Status Copy(void* to, const void* from, int64_t size_bytes);

 private:
  CommStream(Device& device, StreamHandle stream, Counters* counters)
      : device_(device), stream_(stream), counters_(counters) {}

  Device& device_;
  const StreamHandle stream_;
  Counters* const counters_;
  std::vector<std::shared_ptr<DeviceEvent>> events_;  // all there are; some in use outside
};

/// Two buffers in turn, in which tensors of a slice lie end to end. One that became too small is
/// kept to the end, because to free memory waits for the whole device, and so perhaps for peers.
///
/// Thread safety: one thread at a time, but for `size_bytes`. Lifetime: nobody uses the memory when
/// it ends, or it is leaked.
class FusionBuffers {
 public:
  struct Buffer {
    void* memory = nullptr;
    int64_t size_bytes = 0;
    std::shared_ptr<DeviceEvent> free;  ///< From then on it may be written again; nullptr: at once.
  };
  using Allocate = std::function<Result<void*>(int64_t size_bytes)>;
  using Free = std::function<void(void* memory)>;

  FusionBuffers(Allocate allocate, Free free)
      : allocate_(std::move(allocate)), free_(std::move(free)) {}
  ~FusionBuffers() { End(); }
  FusionBuffers(const FusionBuffers&) = delete;
  FusionBuffers& operator=(const FusionBuffers&) = delete;

  /// The other one of the two, at least that large. Which one, and how large it then is, follows
  /// from the sizes asked for so far. @return ResourceExhausted if there is no memory.
  Result<Buffer*> Next(int64_t size_bytes);
  /// Of both and what they replaced; from any thread.
  int64_t size_bytes() const { return size_bytes_.load(); }
  /// Frees them all. None may follow.
  void End();

 private:
  const Allocate allocate_;
  const Free free_;
  std::array<Buffer, 2> buffers_;
  std::vector<Buffer> replaced_;
  std::atomic<int64_t> size_bytes_{0};
  size_t last_ = 0;
};

/// What the launches of one GPU share: three streams, so that the next slice is packed and the last
/// one unpacked beside the collective, two fusion buffers for that, and the flag that poisons
/// results.
///
/// Thread safety: the launch thread, but for `Poison`, which any thread may call. Lifetime:
/// outlives the commands that the streams hold.
class LaunchStreams {
 public:
  static Result<std::unique_ptr<LaunchStreams>> Create(Device& device, Counters* counters);
  ~LaunchStreams() { End(); }
  LaunchStreams(const LaunchStreams&) = delete;
  LaunchStreams& operator=(const LaunchStreams&) = delete;

  /// From now on results become NaN (every bit set): an aborted collective ends like any other and
  /// leaves undefined values, which a step of the optimizer that is already enqueued would apply.
  void Poison();
  /// Enqueues, in `unpack`, what makes `poisoned` say how things stand when the stream gets there,
  /// behind the collective whose results come next.
  Status LookForPoison() { return unpack->CopyFlag(poison_, poisoned_); }
  /// The flag, for CastSpec::poisoned in `unpack`.
  const uint32_t* poisoned() const { return poisoned_; }
  /// Frees memory and streams, which waits for the device. Nothing may follow.
  void End();

  std::unique_ptr<CommStream> pack;
  std::unique_ptr<CommStream> collective;
  std::unique_ptr<CommStream> unpack;
  FusionBuffers buffers;

 private:
  explicit LaunchStreams(Device& device)
      : buffers([&device](int64_t size_bytes) { return device.Allocate(size_bytes); },
                [&device](void* memory) { device.Free(memory); }),
        device_(device) {}

  Device& device_;
  uint32_t* poison_ = nullptr;    // pinned: set by the host
  uint32_t* poisoned_ = nullptr;  // on the device
};

}  // namespace farandole
