#include "ops/gpu/comm_stream.h"

#include <algorithm>
#include <string>
#include <utility>

namespace farandole {
namespace {

constexpr int64_t kPageBytes = int64_t{2} << 20;

}  // namespace

CastSpec BitwiseCopy(DType dtype) {
  CastSpec spec;
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

Result<std::unique_ptr<CommStream>> CommStream::Create(Device& device, Counters* counters) {
  Result<StreamHandle> stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<CommStream>(new CommStream(device, stream.value(), counters));
}

CommStream::~CommStream() { device_.DestroyStream(stream_); }

Status CommStream::WaitFor(std::span<const std::shared_ptr<DeviceEvent>> events) {
  for (const std::shared_ptr<DeviceEvent>& event : events)
    FARANDOLE_RETURN_IF_ERROR(WaitFor(event));
  return {};
}

Status CommStream::Record(std::shared_ptr<DeviceEvent>& event) {
  std::shared_ptr<DeviceEvent> mark;
  for (const std::shared_ptr<DeviceEvent>& one : events_) {
    if (one.use_count() == 1) mark = one;
  }
  if (mark == nullptr) {
    Result<std::shared_ptr<DeviceEvent>> created = device_.CreateEvent();
    if (!created.ok()) return created.status();
    mark = created.value();
    events_.push_back(mark);
  }
  FARANDOLE_RETURN_IF_ERROR(mark->Record(stream_));
  event = std::move(mark);
  return {};
}

Status CommStream::Cast(std::span<const CastItem> items, const CastSpec& spec) {
  if (items.empty()) return {};
  int launches = 0;
  FARANDOLE_RETURN_IF_ERROR(device_.Cast(items, spec, stream_, &launches));
  if (counters_ == nullptr) return {};
  counters_->Add(Counter::kDeviceLaunches, launches);
  int64_t count = 0;
  for (const CastItem& item : items) count += item.in == item.out ? 0 : item.count;
  counters_->Add(Counter::kBytesCopied, count * SizeOf(spec.to));
  return {};
}

Status CommStream::CopyFlag(const uint32_t* pinned, uint32_t* flag) {
  FARANDOLE_RETURN_IF_ERROR(device_.CopyFlag(pinned, flag, stream_));
  if (counters_ != nullptr) counters_->Add(Counter::kDeviceLaunches, 1);
  return {};
}

Status CommStream::Copy(void* to, const void* from, int64_t size_bytes) {
  FARANDOLE_RETURN_IF_ERROR(device_.Copy(to, from, size_bytes, stream_));
  if (counters_ != nullptr) counters_->Add(Counter::kBytesCopied, size_bytes);
  return {};
}

Result<std::unique_ptr<LaunchStreams>> LaunchStreams::Create(Device& device, Counters* counters) {
  std::unique_ptr<LaunchStreams> streams(new LaunchStreams(device));
  for (std::unique_ptr<CommStream> LaunchStreams::*one :
       {&LaunchStreams::pack, &LaunchStreams::collective, &LaunchStreams::unpack}) {
    Result<std::unique_ptr<CommStream>> created = CommStream::Create(device, counters);
    if (!created.ok()) return created.status();
    streams.get()->*one = std::move(created).value();
  }
  Result<void*> pinned = device.AllocatePinned(sizeof(uint32_t));
  if (!pinned.ok()) return pinned.status();
  streams->poison_ = static_cast<uint32_t*>(pinned.value());
  *streams->poison_ = 0;
  Result<void*> flag = device.Allocate(sizeof(uint32_t));
  if (!flag.ok()) return flag.status();
  streams->poisoned_ = static_cast<uint32_t*>(flag.value());
  return streams;
}

void LaunchStreams::End() {
  buffers.End();
  for (std::unique_ptr<CommStream>* stream : {&pack, &collective, &unpack}) *stream = nullptr;
  if (poisoned_ != nullptr) device_.Free(std::exchange(poisoned_, nullptr));
  if (poison_ != nullptr) device_.FreePinned(std::exchange(poison_, nullptr));
}

void FusionBuffers::End() {
  for (Buffer& buffer : buffers_) replaced_.push_back(std::exchange(buffer, {}));
  for (const Buffer& buffer : std::exchange(replaced_, {})) {
    if (buffer.memory != nullptr) free_(buffer.memory);
  }
}

Result<FusionBuffers::Buffer*> FusionBuffers::Next(int64_t size_bytes) {
  Buffer& buffer = buffers_[last_ = 1 - last_];
  if (size_bytes <= buffer.size_bytes) return &buffer;
  const int64_t wanted = std::max(size_bytes, buffer.size_bytes * 3 / 2);
  const int64_t rounded = (wanted + kPageBytes - 1) / kPageBytes * kPageBytes;
  Result<void*> memory = allocate_(rounded);
  if (!memory.ok()) {
    return ResourceExhausted("no fusion buffer of " + std::to_string(rounded) +
                             " bytes: " + memory.status().message());
  }
  if (buffer.memory != nullptr) replaced_.push_back(buffer);
  buffer = {memory.value(), rounded, nullptr};
  size_bytes_ += rounded;
  return &buffer;
}

// Before NCCL is told to abort, so that the flag is set when the first kernel ends by that.
void LaunchStreams::Poison() {
  std::atomic_ref<uint32_t>(*poison_).store(1, std::memory_order_seq_cst);
}

}  // namespace farandole
