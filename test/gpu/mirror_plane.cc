#include "test/gpu/mirror_plane.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "ops/cpu/batch.h"

namespace farandole {
namespace {

constexpr std::byte kGuard{0x5A};
constexpr size_t kAlignment = 64;
constexpr int64_t kArenaBytes = int64_t{128} << 20;

// Where the segments of a batch lie in their mirror.
class Layout {
 public:
  struct Place {
    size_t in;
    size_t in_bytes;
    size_t out;
    size_t out_bytes;
  };

  explicit Layout(const Batch& batch) {
    for (const Segment& segment : batch.segments) {
      const auto in_bytes = static_cast<size_t>(InputCount(batch, segment) * SizeOf(batch.dtype));
      const auto out_bytes = static_cast<size_t>(OutputCount(batch, segment) * SizeOf(batch.dtype));
      const size_t in = segment.in == nullptr ? 0 : Put(segment.in, in_bytes);
      const bool in_place = segment.out != nullptr && segment.out == segment.in;
      const size_t out = in_place || segment.out == nullptr ? in : Put(segment.out, out_bytes);
      places_.push_back({in, in_bytes, out, out_bytes});
    }
    size_ += kAlignment;
  }

  const std::vector<Place>& places() const { return places_; }
  size_t size() const { return size_; }

 private:
  size_t Put(const void* host, size_t bytes) {
    const size_t shift = reinterpret_cast<uintptr_t>(host) % kAlignment;
    const size_t at = (size_ + kAlignment - 1) / kAlignment * kAlignment + kAlignment + shift;
    size_ = at + bytes;
    return at;
  }

  std::vector<Place> places_;
  size_t size_ = 0;
};

Status WaitForStream(Device& device, StreamHandle stream) {
  Result<std::shared_ptr<DeviceEvent>> event = device.CreateEvent();
  if (!event.ok()) return event.status();
  FARANDOLE_RETURN_IF_ERROR(event.value()->Record(stream));
  for (;;) {
    const Result<bool> passed = event.value()->IsComplete();
    if (!passed.ok()) return passed.status();
    if (passed.value()) return {};
    std::this_thread::yield();
  }
}

}  // namespace

/// One batch: its mirror in device memory, and the image of that in pinned memory.
class MirrorPlane::Operation final : public PlaneOperation {
 public:
  Operation(MirrorPlane& plane, const Batch& batch)
      : plane_(plane), host_(batch), mirrored_(batch), layout_(batch) {}

  Status Start() {
    Device& device = *plane_.device_;
    const int64_t size = static_cast<int64_t>(layout_.size());
    if (plane_.used_ + size > kArenaBytes) return ResourceExhausted("the mirrors are full");
    device_ = plane_.memory_ + plane_.used_;
    image_ = plane_.images_ + plane_.used_;
    plane_.used_ += (size + 255) / 256 * 256;
    FillImage();
    FARANDOLE_RETURN_IF_ERROR(device.Copy(device_, image_, size, plane_.stream_));
    Result<std::shared_ptr<DeviceEvent>> event = device.CreateEvent();
    if (!event.ok()) return event.status();
    uploaded_ = std::move(event).value();
    FARANDOLE_RETURN_IF_ERROR(uploaded_->Record(plane_.stream_));
    mirrored_.ready = {&uploaded_, 1};
    mirrored_.device = DeviceKind::kCuda;
    mirrored_.segments = segments_;
    Result<PlaneOperation*> started = plane_.plane_->Start(mirrored_);
    if (!started.ok()) return started.status();
    inner_ = started.value();
    return {};
  }

  Progress Step() override {
    Progress progress = inner_->Step();
    if (progress.state == Progress::State::kDone) {
      if (Status status = BringBack(); !status.ok()) progress = Progress::Failed(std::move(status));
    }
    ended_ = progress.state == Progress::State::kDone || progress.state == Progress::State::kFailed;
    return progress;
  }
  std::shared_ptr<DeviceEvent> end() const override { return inner_->end(); }
  void Abandon() override {
    inner_->Abandon();
    ended_ = true;
  }
  bool ended() const { return ended_; }

 private:
  void FillImage() {
    before_.assign(layout_.size(), kGuard);
    for (size_t k = 0; k < host_.segments.size(); ++k) {
      const Segment& segment = host_.segments[k];
      const auto& place = layout_.places()[k];
      if (segment.in != nullptr && place.in_bytes > 0) {
        std::memcpy(before_.data() + place.in, segment.in, place.in_bytes);
      }
      segments_.push_back({segment.in == nullptr ? nullptr : device_ + place.in,
                           segment.out == nullptr ? nullptr : device_ + place.out, segment.count});
    }
    std::memcpy(image_, before_.data(), before_.size());
  }

  Status BringBack() {
    const int64_t size = static_cast<int64_t>(before_.size());
    FARANDOLE_RETURN_IF_ERROR(plane_.device_->Copy(image_, device_, size, plane_.stream_));
    FARANDOLE_RETURN_IF_ERROR(WaitForStream(*plane_.device_, plane_.stream_));
    for (size_t k = 0; k < host_.segments.size(); ++k) {
      const auto& place = layout_.places()[k];
      if (host_.segments[k].out == nullptr || place.out_bytes == 0) continue;
      std::memcpy(host_.segments[k].out, image_ + place.out, place.out_bytes);
      std::memcpy(before_.data() + place.out, image_ + place.out, place.out_bytes);
    }
    if (std::memcmp(before_.data(), image_, before_.size()) == 0) return {};
    return Internal("a byte on the device that belongs to no result was changed");
  }

  MirrorPlane& plane_;
  const Batch host_;
  Batch mirrored_;
  const Layout layout_;
  std::vector<std::byte> before_;  // what must be on the device at the end
  std::byte* device_ = nullptr;
  std::byte* image_ = nullptr;
  std::vector<Segment> segments_;
  std::shared_ptr<DeviceEvent> uploaded_;
  PlaneOperation* inner_ = nullptr;
  bool ended_ = false;
};

MirrorPlane::MirrorPlane(std::shared_ptr<DeviceRuntime> runtime, int index,
                         std::unique_ptr<DataPlane> host, const MakePlaneOnDevice& make)
    : gpu_([runtime] { return Result<std::shared_ptr<DeviceRuntime>>(runtime); }, index),
      index_(index),
      host_(std::move(host)),
      plane_(make(gpu_, *host_)) {}

MirrorPlane::~MirrorPlane() {
  plane_ = nullptr;
  if (stream_ == nullptr) return;
  (void)WaitForStream(*device_, stream_);  // a failed device has been reported by a batch
  operations_.clear();
  device_->DestroyStream(stream_);
  if (memory_ != nullptr) device_->Free(memory_);
  if (images_ != nullptr) device_->FreePinned(images_);
}

Status MirrorPlane::Open() {
  const Result<Device*> gpu = gpu_.Use(index_);
  if (!gpu.ok()) return gpu.status();
  device_ = gpu.value();
  Result<StreamHandle> stream = device_->CreateStream();
  if (!stream.ok()) return stream.status();
  stream_ = stream.value();
  Result<void*> memory = device_->Allocate(kArenaBytes);
  if (!memory.ok()) return memory.status();
  memory_ = static_cast<std::byte*>(memory.value());
  Result<void*> images = device_->AllocatePinned(kArenaBytes);
  if (!images.ok()) return images.status();
  images_ = static_cast<std::byte*>(images.value());
  return {};
}

Result<PlaneOperation*> MirrorPlane::Start(const Batch& batch) {
  std::erase_if(operations_, [](const auto& operation) { return operation->ended(); });
  if (operations_.empty()) used_ = 0;
  if (images_ == nullptr) FARANDOLE_RETURN_IF_ERROR(Open());
  auto operation = std::make_unique<Operation>(*this, batch);
  FARANDOLE_RETURN_IF_ERROR(operation->Start());
  operations_.push_back(std::move(operation));
  return operations_.back().get();
}

}  // namespace farandole
