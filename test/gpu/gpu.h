// The GPU as tests and benchmarks use it: device 0, memory, a held-up stream; a failure ends the
// program with CUDA's text, since nothing can be learnt after it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/device.h"

namespace farandole {

/// Ends the program if a call failed.
void MustCuda(cudaError_t error, const char* call);
void Must(const Status& status);
template <class T>
T Must(Result<T> result) {
  Must(result.status());
  return std::move(result).value();
}

/// Device 0 through the interface under test, made current.
Device& Gpu();

/// Device memory that frees itself.
class GpuBytes {
 public:
  explicit GpuBytes(int64_t size_bytes);
  explicit GpuBytes(const std::vector<std::byte>& bytes);
  ~GpuBytes();
  GpuBytes(const GpuBytes&) = delete;
  GpuBytes& operator=(const GpuBytes&) = delete;

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  /// Waits for all streams.
  std::vector<std::byte> Read() const;

 private:
  const int64_t size_bytes_;
  std::byte* data_ = nullptr;
};

/// A stream as a framework makes them: one that waits for the legacy stream, unless asked
/// otherwise.
class GpuStream {
 public:
  explicit GpuStream(unsigned int flags = cudaStreamDefault);
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  cudaStream_t get() const { return stream_; }
  /// What comes next in it waits until Release: no time, however long, lets it go on.
  void HoldUp();
  void Release() { open_ = true; }
  void Wait() const;

 private:
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> open_{false};
};

}  // namespace farandole
