/// @file
/// The current stream of libtorch, as the C ABI takes streams. Included by farandole/torch.h.
///
/// Works with any libtorch and needs no header of CUDA: what libtorch calls current is reached
/// through the default stream, whose handle is null on every device. Where another stream is
/// current, an event of libtorch's orders one after the other on the device.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <farandole/device.h>
#include <torch/torch.h>

namespace farandole::torch {

/// @cond internal
namespace detail {

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

/// `later` goes on when what `earlier` holds now is complete.
inline void order(const c10::Stream& earlier, const c10::Stream& later) {
  if (earlier == later) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

inline c10::Stream default_stream(c10::Device device) {
  return c10::Stream(c10::Stream::DEFAULT, device);
}

/// A stream that comes after what this thread's current stream of `device` holds now.
inline farandole::Stream stream_after_current(c10::Device device) {
  order(current_stream(device), default_stream(device));
  return {device.index(), nullptr};
}

/// Orders this thread's current stream after `wait`, which takes a stream and orders that.
template <class Wait>
void make_current_wait(c10::Device device, Wait wait) {
  wait(farandole::Stream{device.index(), nullptr});
  order(default_stream(device), current_stream(device));
}

/// Memory that is freed from now on is not given out again before the current stream, which is
/// ordered after all that touches it, has come to that point.
inline void use_in_current_stream(const ::torch::Tensor& tensor) {
  const c10::impl::DeviceGuardImplInterface* const device =
      c10::impl::getDeviceGuardImpl(tensor.device().type());
  device->recordDataPtrOnStream(tensor.storage().data_ptr(), current_stream(tensor.device()));
}

}  // namespace detail
/// @endcond

}  // namespace farandole::torch
