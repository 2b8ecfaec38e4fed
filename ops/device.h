// The interface of a GPU: streams, events, memory, and the one kernel that copies, casts and scales
// tensors.
//
// Planes and engine are written against this, so that they build, and are tested, where no GPU is.
// libfarandole_cuda.so implements it over CUDA; test/fakes over threads and host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/status.h"
#include "core/types.h"

namespace farandole {

/// A cudaStream_t; nullptr is CUDA's legacy default stream.
using StreamHandle = void*;

/// An event of a stream, as a cudaEvent_t. Thread safety: any thread, one at a time. Lifetime:
/// independent of stream and device object.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// The number of the device in whose streams it can be recorded.
  virtual int device() const = 0;
  /// Completes when all work enqueued in `stream` so far is complete. Replaces an earlier
  /// recording; waits that were enqueued before still refer to that one.
  virtual Status Record(StreamHandle stream) = 0;
  /// Work enqueued in `stream` from now on runs after the event. The host does not wait. Before
  /// the first Record it does nothing.
  virtual Status MakeWait(StreamHandle stream) = 0;
  /// Whether the event is complete. @return Internal with the library's text if the device has
  /// failed.
  virtual Result<bool> IsComplete() = 0;
};

struct DeviceInfo {
  int index = 0;       ///< As this process numbers its devices.
  std::string name;    ///< "NVIDIA H100 80GB HBM3"
  std::string bus_id;  ///< "0000:17:00.0"; one host's devices differ in it.
  int64_t memory_bytes = 0;
};

/// One tensor, or a slice of one, to be copied or cast.
struct CastItem {
  const void* in = nullptr;  ///< nullptr: `out` is filled with the identity of CastSpec::op.
  void* out = nullptr;
  int64_t count = 0;  ///< Elements.
};

/// out[i] = to(rescale * (scale * (in[i] / divisor))), element by element.
///
/// Semantics of the numbers: as documented at `class CpuKernels` (ops/cpu/kernels.h). Casts round
/// once, to nearest even; NaN stays NaN, but which one is left open (GPUs know a single one). 16-
/// and 32-bit floats are scaled in float, float64 in double, whatever `to` is; integers are divided
/// first (exact, truncating toward zero); each product of theirs is taken in double, truncated and
/// clamped to the values that `from` and `to` share: before they are widened, or as they are
/// narrowed. A factor of exactly 1 and a divisor of 1 change nothing; an integer is then widened,
/// or narrowed modulo 2^bits. There is a cast between any two floating types, from an integer type
/// to int64 and back, and from int16 to int32 and back; bool is taken as uint8 and neither divided
/// nor scaled.
struct CastSpec {
  DType from = DType::kFloat32;
  DType to = DType::kFloat32;
  double scale = 1.0;
  int64_t divisor = 1;           ///< Integers only.
  ReduceOp op = ReduceOp::kSum;  ///< Whose identity stands for an absent contribution.
  double rescale = 1.0;          ///< Only where `from` and `to` are one type.
  /// Device memory (see CopyFlag), or nullptr: if it is not 0 when the kernel runs, every bit of
  /// every `out` is set instead, which is NaN in floating types. A copy from a place to itself then
  /// is one.
  const uint32_t* poisoned = nullptr;
};

/// One GPU as this process sees it.
///
/// Thread safety: any thread; the calling thread's current device is left as it was, except by
/// MakeCurrent. Every failure is Internal with the call's name and the library's text, or
/// ResourceExhausted for memory.
class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  /// Makes it the calling thread's current device, as NCCL wants it.
  virtual Status MakeCurrent() = 0;

  /// A stream that no other stream waits for implicitly, of the highest priority.
  virtual Result<StreamHandle> CreateStream() = 0;
  virtual void DestroyStream(StreamHandle stream) = 0;
  virtual Result<std::shared_ptr<DeviceEvent>> CreateEvent() = 0;
  /// `stream` is being captured into a graph: events of it cannot be waited for from outside.
  virtual Result<bool> IsCapturing(StreamHandle stream) = 0;

  /// Aligned to 256 bytes at least. Free waits until the device no longer uses the memory.
  virtual Result<void*> Allocate(int64_t size_bytes) = 0;
  virtual void Free(void* memory) = 0;
  /// Host memory that copies reach without a detour.
  virtual Result<void*> AllocatePinned(int64_t size_bytes) = 0;
  virtual void FreePinned(void* memory) = 0;

  /// Enqueues a copy between any two of device and pinned memory.
  virtual Status Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) = 0;
  /// Enqueues all items: one kernel launch for up to kItemsPerLaunch of them, none for no elements.
  /// Allocates nothing and never waits, so it may be captured. `items` may be gone on return.
  /// `out` may equal `in` where elements of both have one size; otherwise nothing overlaps. Memory
  /// is aligned to its elements; 16 bytes, alike for `in` and `out`, are fastest.
  /// @param launches  Receives how many kernels it took.
  /// @return InvalidArgument for items no kernel can do (see MakeCastJob), with nothing enqueued.
  virtual Status Cast(std::span<const CastItem> items, const CastSpec& spec, StreamHandle stream,
                      int* launches) = 0;
  static constexpr int kItemsPerLaunch = 1024;
  /// Enqueues a kernel of one thread that copies a flag, as the host has set it by then, from
  /// pinned to device memory, where the many threads of the next kernel read it without crossing
  /// PCIe.
  virtual Status CopyFlag(const uint32_t* pinned, uint32_t* flag, StreamHandle stream) = 0;
};

/// The GPUs of this process. Lifetime: until process exit.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// "CUDA runtime 13.0, driver 13.0"
  virtual std::string version() const = 0;
  /// How many devices there are. Creates no context.
  virtual Result<int> Count() = 0;
  /// The device, set up for use; the same object each time. @return InvalidArgument for a number
  /// that is not there.
  virtual Result<Device*> Open(int index) = 0;
};

}  // namespace farandole
