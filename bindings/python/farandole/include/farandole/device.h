/// @file
/// Memory and streams of a GPU as the C++ API takes them; no header of CUDA is needed.
#pragma once

#include <farandole/farandole.h>

#include <cstddef>

namespace farandole {

/// A stream of a CUDA device. Borrows.
///
/// Example: `farandole::Stream{0, stream}` with a `cudaStream_t stream`.
/// Thread safety: as a plain value.
struct Stream {
  int device = 0;          ///< As this process numbers its CUDA devices.
  void* handle = nullptr;  ///< A cudaStream_t or CUstream; null: the legacy default stream.
};

/// `size()` consecutive elements in the memory of a GPU. Borrows; the host never looks into it.
///
/// Thread safety: as a plain value.
template <class T>
class DeviceSpan {
 public:
  using element_type = T;  ///< As Span's.

  constexpr DeviceSpan() = default;
  /// `count` elements at the device address `address`.
  constexpr DeviceSpan(T* address, std::size_t count) : address_(address), size_(count) {}

  constexpr T* address() const { return address_; }     ///< Of the first element, on the device.
  constexpr std::size_t size() const { return size_; }  ///< Elements.

 private:
  T* address_ = nullptr;
  std::size_t size_ = 0;
};

/// @cond internal
namespace detail {

inline farandole_stream to_c(const Stream& stream) {
  return {sizeof(farandole_stream), stream.device, stream.handle};
}

}  // namespace detail
/// @endcond

}  // namespace farandole
