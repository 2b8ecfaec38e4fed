#include <algorithm>
#include <cstdio>
#include <utility>

#include "test/fakes/fake_device.h"

namespace farandole {
namespace {

constexpr const char* kNames[kFakeCallCount] = {
    "cudaInitDevice",  "cudaSetDevice",         "cudaStreamCreateWithPriority",
    "cudaEventCreate", "cudaEventRecord",       "cudaStreamWaitEvent",
    "cudaEventQuery",  "cudaStreamIsCapturing", "cudaMalloc",
    "cudaHostAlloc",   "cudaMemcpyAsync",       "cudaLaunchKernel",
};

bool AsksForMemory(FakeCall call) {
  return call == FakeCall::kAllocate || call == FakeCall::kAllocatePinned;
}

}  // namespace

std::string FakeDeviceState::Text(FakeCall call, const char* why) const {
  return std::string(kNames[static_cast<size_t>(call)]) + " on fake CUDA device " +
         std::to_string(index_) + ": " + why;
}

Status FakeDeviceState::Begin(FakeCall call) {
  std::lock_guard lock(mutex_);
  const auto which = static_cast<size_t>(call);
  ++counts_.calls[which];
  if (failed_) return Internal(Text(call, "an illegal memory access was encountered (injected)"));
  if (fail_at_[which] == 0 || --fail_at_[which] > 0) return {};
  if (AsksForMemory(call)) return ResourceExhausted(Text(call, "out of memory (injected)"));
  return Internal(Text(call, "unspecified launch failure (injected)"));
}

void FakeDeviceState::FailCall(FakeCall call, int k) {
  std::lock_guard lock(mutex_);
  fail_at_[static_cast<size_t>(call)] = k;
}

void FakeDeviceState::FailDevice() {
  std::lock_guard lock(mutex_);
  failed_ = true;
}

bool FakeDeviceState::failed() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

FakeStream* FakeDeviceState::AddStream(bool created) {
  std::lock_guard lock(mutex_);
  const std::string name = "stream " + std::to_string(streams_.size()) + " of fake CUDA device " +
                           std::to_string(index_);
  streams_.push_back(std::make_unique<FakeStream>(name, this, [this] { return failed(); }));
  FakeStream* stream = streams_.back().get();
  if (created) {
    created_.push_back(stream);
    stream->SlowDown(delay_us_);
  }
  return stream;
}

Result<FakeStream*> FakeDeviceState::Find(StreamHandle handle) {
  FakeStream* stream = nullptr;
  if (handle != nullptr) {
    stream = FakeStream::Find(handle);
  } else {
    std::lock_guard lock(mutex_);
    if (!streams_.empty()) stream = streams_.front().get();
  }
  if (stream != nullptr) return stream;
  return Internal("invalid resource handle (fake CUDA device " + std::to_string(index_) +
                  "): not a stream, or destroyed");
}

Result<FakeStream*> FakeDeviceState::FindOwn(StreamHandle handle) {
  Result<FakeStream*> found = Find(handle);
  if (!found.ok() || found.value()->owner() == this) return found;
  return Internal("invalid resource handle: " + found.value()->name() + " was used on device " +
                  std::to_string(index_));
}

Status FakeDeviceState::RemoveStream(StreamHandle handle) {
  Result<FakeStream*> found = Find(handle);
  if (!found.ok()) return found.status();
  std::lock_guard lock(mutex_);
  if (std::erase(created_, found.value()) == 0) {
    return Internal(found.value()->name() + " is not one that CreateStream made");
  }
  found.value()->Close();
  return {};
}

std::vector<FakeStream*> FakeDeviceState::LiveStreams() const {
  std::lock_guard lock(mutex_);
  return created_;
}

void FakeDeviceState::ReleaseStreams() {
  std::lock_guard lock(mutex_);
  for (const std::unique_ptr<FakeStream>& stream : streams_) stream->Release();
}

void FakeDeviceState::SynchronizeStreams() {
  std::vector<FakeStream*> streams;
  {
    std::lock_guard lock(mutex_);
    for (const std::unique_ptr<FakeStream>& stream : streams_) streams.push_back(stream.get());
  }
  for (FakeStream* stream : streams) stream->Synchronize();
}

void FakeDeviceState::StopStreams() {
  std::vector<std::unique_ptr<FakeStream>> streams;
  {
    std::lock_guard lock(mutex_);
    created_.clear();
    streams.swap(streams_);
  }
  // Their ends are awaited here, without the lock that their last commands may want.
}

void FakeDeviceState::SlowDownNewStreams(int64_t us) {
  std::lock_guard lock(mutex_);
  delay_us_ = us;
}

void FakeDeviceState::Misuse(std::string what) {
  std::fprintf(stderr, "fake CUDA device %d: misuse: %s\n", index_, what.c_str());
  std::lock_guard lock(mutex_);
  misuses_.push_back(std::move(what));
}

std::vector<std::string> FakeDeviceState::TakeMisuses() {
  std::lock_guard lock(mutex_);
  return std::exchange(misuses_, {});
}

FakeCounts FakeDeviceState::counts() const {
  std::lock_guard lock(mutex_);
  FakeCounts counts = counts_;
  counts.live_streams = static_cast<int64_t>(created_.size());
  return counts;
}

void FakeDeviceState::Count(int64_t FakeCounts::*counter, int64_t by) {
  std::lock_guard lock(mutex_);
  counts_.*counter += by;
}

}  // namespace farandole
