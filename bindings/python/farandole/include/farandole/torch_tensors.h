/// @file
/// Tensors of libtorch as memory that can travel. Included by farandole/torch.h.
#pragma once

#include <farandole/device.h>
#include <farandole/result.h>
#include <farandole/span.h>
#include <torch/torch.h>

#include <complex>
#include <cstdint>
#include <string>
#include <string_view>

namespace farandole::torch {

/// @cond internal
namespace detail {

/// Of the types that older versions of libtorch have not got, by their names.
inline DataType newer_type_of(std::string_view name) {
  constexpr struct {
    std::string_view name;
    DataType type;
  } kTypes[] = {{"UInt16", DataType::uint16},
                {"UInt32", DataType::uint32},
                {"UInt64", DataType::uint64},
                {"Float8_e4m3fn", DataType::float8_e4m3fn},
                {"Float8_e5m2", DataType::float8_e5m2}};
  for (const auto& one : kTypes)
    if (one.name == name) return one.type;
  throw Error(Code::invalid_argument,
              "a tensor of " + std::string(name) +
                  " cannot travel; expected bool, an integer, a floating or a complex type");
}

inline DataType data_type_of(const ::torch::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ::torch::kBool:
      return DataType::boolean;
    case ::torch::kUInt8:
      return DataType::uint8;
    case ::torch::kInt8:
      return DataType::int8;
    case ::torch::kInt16:
      return DataType::int16;
    case ::torch::kInt32:
      return DataType::int32;
    case ::torch::kInt64:
      return DataType::int64;
    case ::torch::kFloat16:
      return DataType::float16;
    case ::torch::kBFloat16:
      return DataType::bfloat16;
    case ::torch::kFloat32:
      return DataType::float32;
    case ::torch::kFloat64:
      return DataType::float64;
    case ::torch::kComplexFloat:
      return DataType::complex64;
    case ::torch::kComplexDouble:
      return DataType::complex128;
    default:
      return newer_type_of(::torch::toString(tensor.scalar_type()));
  }
}

/// The device of a tensor that travels: its GPU, or else the host.
inline c10::Device wire_device_of(const ::torch::Tensor& tensor) {
  return tensor.is_cuda() ? tensor.device() : c10::Device(::torch::kCPU);
}

/// The tensor's elements in row order on `device`: its own memory where that is so already.
inline ::torch::Tensor on_wire(const ::torch::Tensor& tensor, c10::Device device) {
  if (tensor.layout() != ::torch::kStrided)
    throw Error(Code::invalid_argument, "a sparse tensor cannot travel; expected a dense one");
  return tensor.detach().to(device).contiguous();
}

inline void copy_back(const ::torch::Tensor& wire, const ::torch::Tensor& tensor) {
  const ::torch::NoGradGuard no_grad;
  if (!wire.is_alias_of(tensor)) tensor.detach().copy_(wire);
}

/// Runs one collective on elements of the tensor's type. `call` gets a typed Span, or DeviceSpan.
template <template <class> class SpanOf, class Call>
void with_span(const ::torch::Tensor& wire, Call call) {
  const auto count = static_cast<std::size_t>(wire.numel());
  const auto span = [&](auto element) {
    using T = decltype(element);
    return SpanOf<T>(static_cast<T*>(wire.data_ptr()), count);
  };
  switch (data_type_of(wire)) {
    case DataType::boolean:
      return call(span(bool{}));
    case DataType::uint8:
      return call(span(std::uint8_t{}));
    case DataType::int8:
      return call(span(std::int8_t{}));
    case DataType::int16:
      return call(span(std::int16_t{}));
    case DataType::int32:
      return call(span(std::int32_t{}));
    case DataType::int64:
      return call(span(std::int64_t{}));
    case DataType::float16:
      return call(span(Float16{}));
    case DataType::bfloat16:
      return call(span(Bfloat16{}));
    case DataType::float32:
      return call(span(float{}));
    case DataType::float64:
      return call(span(double{}));
    case DataType::uint16:
      return call(span(std::uint16_t{}));
    case DataType::uint32:
      return call(span(std::uint32_t{}));
    case DataType::uint64:
      return call(span(std::uint64_t{}));
    case DataType::complex64:
      return call(span(std::complex<float>{}));
    case DataType::complex128:
      return call(span(std::complex<double>{}));
    case DataType::float8_e4m3fn:
      return call(span(Float8E4m3fn{}));
    case DataType::float8_e5m2:
      return call(span(Float8E5m2{}));
  }
}

}  // namespace detail
/// @endcond

}  // namespace farandole::torch
