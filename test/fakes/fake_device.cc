#include "test/fakes/fake_device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "ops/gpu/cuda/cast.h"
#include "test/fakes/fake_event.h"
#include "test/support/cast_on_host.h"

namespace farandole {

FakeDevice::FakeDevice(DeviceInfo info)
    : info_(std::move(info)), state_(std::make_shared<FakeDeviceState>(info_.index)) {
  FakeStream* default_stream = state_->AddStream(/*created=*/false);
  memory_.SetLimit(info_.memory_bytes);
  driver_ = {info_.index, info_.bus_id.c_str(), default_stream};
}

FakeDevice::~FakeDevice() {
  state_->StopStreams();
  if (farandole_fake_current_device() == &driver_) farandole_fake_set_current_device(nullptr);
  if (state_->TakeMisuses().empty()) return;
  std::fprintf(stderr, "fake CUDA device %d: ends with misuses, see above\n", info_.index);
  std::abort();
}

Status FakeDevice::MakeCurrent() {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kMakeCurrent));
  farandole_fake_set_current_device(&driver_);
  return {};
}

Result<StreamHandle> FakeDevice::CreateStream() {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kCreateStream));
  return state_->AddStream(/*created=*/true)->handle();
}

void FakeDevice::DestroyStream(StreamHandle stream) {
  const Status removed = state_->RemoveStream(stream);
  if (!removed.ok()) state_->Misuse("DestroyStream: " + removed.message());
}

Result<std::shared_ptr<DeviceEvent>> FakeDevice::CreateEvent() {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kCreateEvent));
  return std::shared_ptr<DeviceEvent>(std::make_shared<FakeEvent>(state_));
}

Result<bool> FakeDevice::IsCapturing(StreamHandle stream) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kIsCapturing));
  Result<FakeStream*> found = state_->Find(stream);
  if (!found.ok()) return found.status();
  return found.value()->capturing();
}

Result<void*> FakeDevice::Allocate(int64_t size_bytes) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kAllocate));
  void* memory = memory_.Allocate(size_bytes);
  if (memory != nullptr) return memory;
  return ResourceExhausted("cudaMalloc of " + std::to_string(size_bytes) +
                           " bytes on fake CUDA device " + std::to_string(info_.index) +
                           ": out of memory");
}

void FakeDevice::Free(void* memory) {
  state_->Count(&FakeCounts::host_waits, 1);
  state_->SynchronizeStreams();
  const std::string wrong = memory_.Free(memory);
  if (!wrong.empty()) state_->Misuse("Free: " + wrong);
}

Result<void*> FakeDevice::AllocatePinned(int64_t size_bytes) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kAllocatePinned));
  void* memory = pinned_.Allocate(size_bytes);
  if (memory != nullptr) return memory;
  return ResourceExhausted("cudaHostAlloc of " + std::to_string(size_bytes) +
                           " bytes: out of memory (fake CUDA device)");
}

void FakeDevice::FreePinned(void* memory) {
  state_->Count(&FakeCounts::host_waits, 1);
  state_->SynchronizeStreams();
  const std::string wrong = pinned_.Free(memory);
  if (!wrong.empty()) state_->Misuse("FreePinned: " + wrong);
}

Status FakeDevice::Copy(void* to, const void* from, int64_t size_bytes, StreamHandle stream) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kCopy));
  Result<FakeStream*> found = state_->FindOwn(stream);
  if (!found.ok()) return found.status();
  if (size_bytes < 0) return Internal("cudaMemcpyAsync: invalid argument (fake CUDA device)");
  state_->Count(&FakeCounts::copied_bytes, size_bytes);
  if (size_bytes == 0) return {};
  found.value()->Enqueue("a copy", [to, from, size_bytes] {
    std::memmove(to, from, static_cast<size_t>(size_bytes));
  });
  return {};
}

Status FakeDevice::Cast(std::span<const CastItem> items, const CastSpec& spec, StreamHandle stream,
                        int* launches) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kCast));
  Result<FakeStream*> found = state_->FindOwn(stream);
  if (!found.ok()) return found.status();
  if (spec.poisoned != nullptr && !memory_.Has(spec.poisoned)) {
    state_->Misuse("Cast: every thread reads a flag that is not in device memory");
  }
  Result<CastJob> job = MakeCastJob(items, spec);
  if (!job.ok()) return job.status();
  std::vector<CastItem> some;
  std::copy_if(items.begin(), items.end(), std::back_inserter(some),
               [](const CastItem& item) { return item.count > 0; });
  const auto count = static_cast<int>(job.value().items.size());
  *launches = (count + kItemsPerLaunch - 1) / kItemsPerLaunch;
  state_->Count(&FakeCounts::launches, *launches);
  state_->Count(&FakeCounts::items, count);
  if (count == 0) return {};
  found.value()->Enqueue("a cast", [some = std::move(some), spec] {
    (void)CastOnHost(some, spec);  // it was checked above
  });
  return {};
}

Status FakeDevice::CopyFlag(const uint32_t* pinned, uint32_t* flag, StreamHandle stream) {
  FARANDOLE_RETURN_IF_ERROR(state_->Begin(FakeCall::kCast));
  Result<FakeStream*> found = state_->FindOwn(stream);
  if (!found.ok()) return found.status();
  if (!pinned_.Has(pinned) || !memory_.Has(flag)) {
    state_->Misuse("CopyFlag: not from pinned to device memory");
  }
  state_->Count(&FakeCounts::launches, 1);
  found.value()->Enqueue("a flag", [pinned, flag] {
    *flag = __atomic_load_n(pinned, __ATOMIC_SEQ_CST);  // the host may set it at any time
  });
  return {};
}

FakeCounts FakeDevice::counts() const {
  FakeCounts counts = state_->counts();
  counts.live_blocks = memory_.blocks();
  counts.live_pinned = pinned_.blocks();
  return counts;
}

namespace {

std::vector<DeviceInfo> MadeUpInfos(int count) {
  std::vector<DeviceInfo> infos;
  for (int i = 0; i < count; ++i) {
    char bus_id[16];
    std::snprintf(bus_id, sizeof bus_id, "0000:%02x:00.0", (i + 1) & 0xff);
    infos.push_back({i, "Fake GPU " + std::to_string(i), bus_id, int64_t{16} << 30});
  }
  return infos;
}

}  // namespace

FakeDeviceRuntime::FakeDeviceRuntime(int count) : FakeDeviceRuntime(MadeUpInfos(count)) {}

FakeDeviceRuntime::FakeDeviceRuntime(std::vector<DeviceInfo> infos) {
  for (DeviceInfo& info : infos) devices_.push_back(std::make_unique<FakeDevice>(std::move(info)));
}

FakeDeviceRuntime::~FakeDeviceRuntime() {
  // A stream of one device may wait for an event of another.
  for (const std::unique_ptr<FakeDevice>& device : devices_) device->ReleaseStreams();
}

Result<Device*> FakeDeviceRuntime::Open(int index) {
  if (index < 0 || index >= static_cast<int>(devices_.size())) {
    return InvalidArgument("there is no fake CUDA device " + std::to_string(index) + " among " +
                           std::to_string(devices_.size()));
  }
  FARANDOLE_RETURN_IF_ERROR(fake(index).BeginOpen());
  std::lock_guard lock(mutex_);
  opened_.insert(index);
  return &fake(index);
}

int FakeDeviceRuntime::opened() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(opened_.size());
}

}  // namespace farandole
