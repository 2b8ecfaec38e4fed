/// @file
/// The current stream of libtorch, as the C ABI takes streams. Included by farandole/torch.h.
///
/// Needs no header of CUDA: c10::Stream knows its handle. A libtorch that is too old for that is
/// ordered through the default stream, whose handle is null on every device, by events of its own.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <farandole/device.h>
#include <torch/torch.h>

#include <type_traits>
#include <utility>

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

/// Whether this libtorch knows the handle of a stream.
template <class AnyStream, class = void>
struct knows_handle : std::false_type {};
template <class AnyStream>
struct knows_handle<AnyStream,
                    std::void_t<decltype(std::declval<const AnyStream&>().native_handle())>>
    : std::true_type {};

/// A stream as the C ABI has it; of a libtorch that does not know its handle, the default stream.
template <class AnyStream>
farandole::Stream handle_of(const AnyStream& stream) {
  if constexpr (knows_handle<AnyStream>::value) {
    return {stream.device_index(), stream.native_handle()};
  } else {
    return {stream.device_index(), nullptr};
  }
}

/// The stream that `handle_of` gives for `stream`.
template <class AnyStream>
c10::Stream reached_by(const AnyStream& stream) {
  if constexpr (knows_handle<AnyStream>::value) {
    return stream;
  } else {
    return default_stream(stream.device());
  }
}

/// A stream that comes after what this thread's current stream of `device` holds now.
inline farandole::Stream stream_after_current(c10::Device device) {
  const c10::Stream current = current_stream(device);
  order(current, reached_by(current));
  return handle_of(current);
}

/// Orders this thread's current stream after `wait`, which takes a stream and orders that.
template <class Wait>
void make_current_wait(c10::Device device, Wait wait) {
  const c10::Stream current = current_stream(device);
  wait(handle_of(current));
  order(reached_by(current), current);
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
