#include "test/gpu/gpu.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "ops/gpu/cuda/cuda_api.h"

namespace farandole {
namespace {

[[noreturn]] void Fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(3);
}

}  // namespace

void MustCuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) Fail(std::string(call) + ": " + cudaGetErrorString(error));
}

void Must(const Status& status) {
  if (!status.ok()) Fail(status.ToString());
}

Device& Gpu() {
  static const std::shared_ptr<DeviceRuntime> runtime = MakeCudaRuntime();
  static Device& device = *Must(runtime->Open(0));
  Must(device.MakeCurrent());
  return device;
}

GpuBytes::GpuBytes(int64_t size_bytes) : size_bytes_(size_bytes) {
  void* memory = nullptr;
  MustCuda(cudaMalloc(&memory, static_cast<size_t>(size_bytes + 1)), "cudaMalloc");
  data_ = static_cast<std::byte*>(memory);
}

GpuBytes::GpuBytes(const std::vector<std::byte>& bytes)
    : GpuBytes(static_cast<int64_t>(bytes.size())) {
  MustCuda(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

GpuBytes::~GpuBytes() { MustCuda(cudaFree(data_), "cudaFree"); }

std::vector<std::byte> GpuBytes::Read() const {
  std::vector<std::byte> bytes(static_cast<size_t>(size_bytes_));
  MustCuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  MustCuda(cudaMemcpy(bytes.data(), data_, bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return bytes;
}

GpuStream::GpuStream(unsigned int flags) {
  MustCuda(cudaStreamCreateWithFlags(&stream_, flags), "cudaStreamCreateWithFlags");
}

GpuStream::~GpuStream() {
  Release();
  Wait();
  MustCuda(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

void GpuStream::HoldUp() {
  open_ = false;
  const auto wait = [](void* open) {
    while (!*static_cast<std::atomic<bool>*>(open)) std::this_thread::yield();
  };
  MustCuda(cudaLaunchHostFunc(stream_, wait, &open_), "cudaLaunchHostFunc");
}

void GpuStream::Wait() const { MustCuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

}  // namespace farandole
