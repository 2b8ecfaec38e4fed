/// @file
/// Collectives of tensors that are split along their first dimension. Included by
/// farandole/torch.h.
#pragma once

#include <c10/core/StreamGuard.h>
#include <farandole/context.h>
#include <farandole/torch_streams.h>
#include <farandole/torch_tensors.h>
#include <torch/torch.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

namespace farandole::torch {

/// @cond internal
namespace detail {

/// A tensor as rows that can travel.
///
/// Lifetime: `call` borrows from it, so that it does not move.
struct Rows {
  Rows(Context& context, farandole_kind kind, const ::torch::Tensor& tensor, const Options& given)
      : options(given), call(context.row_call(kind, data_type_of(tensor), options).value()) {
    if (tensor.dim() == 0) throw call.refuse("a scalar has no rows; expected a dimension");
    wire = on_wire(tensor, wire_device_of(tensor));
    shape = wire.sizes().vec();
    rows = shape[0];
    options.row = 1;
    for (std::size_t d = 1; d < shape.size(); ++d) options.row *= shape[d];
  }
  Rows(const Rows&) = delete;

  /// A new tensor of as many rows, where this one travels.
  ::torch::Tensor like(std::int64_t many) const {
    std::vector<std::int64_t> sizes = shape;
    sizes[0] = many;
    return ::torch::empty(sizes, wire.options());
  }

  /// Runs what `start(step, stream)` starts, without a stream on the host. On a GPU the current
  /// stream waits for it.
  template <class Start>
  void run(Start start) const {
    const farandole_device device = wire.is_cuda() ? FARANDOLE_CUDA : FARANDOLE_CPU;
    const farandole::detail::Prepared step = call.prepare(device, rows).value();
    if (!wire.is_cuda()) return start(step, nullptr).value().wait();
    const Stream producer = stream_after_current(wire.device());
    Work work = start(step, &producer).value();
    make_current_wait(wire.device(), [&](const Stream& stream) { work.hand_over(stream); });
  }

  Options options;
  farandole::detail::RowCall call;
  ::torch::Tensor wire;
  std::vector<std::int64_t> shape;
  std::int64_t rows = 0;
};

/// The rows of all ranks: a tensor that a thread of the library makes when their number is known.
///
/// Thread safety: that thread's until the work is done. Lifetime: longer than the work.
struct GatheredRows {
  const Rows& mine;
  std::optional<c10::Stream> current;  ///< GPU: where the tensor will be used.
  ::torch::Tensor tensor;

  /// farandole_allocator::allocate. On a GPU the memory is free in the order of the current stream,
  /// which the stream of the operation therefore waits for once more, if it is another.
  static void* allocate(void* self, std::int32_t, const std::int64_t* rows, std::int32_t ranks,
                        std::int64_t) noexcept {
    auto& [mine, current, tensor] = *static_cast<GatheredRows*>(self);
    try {
      c10::OptionalStreamGuard guard;
      if (current) guard.reset_stream(*current);
      tensor = mine.like(std::accumulate(rows, rows + ranks, std::int64_t{0}));
      if (current) order(*current, reached_by(*current));
      return tensor.data_ptr();
    } catch (...) {  // no memory
      return nullptr;
    }
  }
};

}  // namespace detail
/// @endcond

/// The rows of all ranks, in rank order; the first dimension may differ between ranks. On a GPU the
/// current stream waits for the result, and the host until the ranks know each other's rows.
/// @throws Error as Context::allgather.
inline ::torch::Tensor allgather(Context& context, const ::torch::Tensor& tensor,
                                 const Options& options = {}) {
  const detail::Rows mine(context, FARANDOLE_ALLGATHER, tensor, options);
  detail::GatheredRows all{mine, {}, {}};
  if (mine.wire.is_cuda()) all.current = detail::current_stream(mine.wire.device());
  const farandole_allocator memory{sizeof memory, &all, &detail::GatheredRows::allocate};
  mine.run([&](const farandole::detail::Prepared& step, const Stream* stream) {
    return farandole::detail::start_allocating(step, mine.wire.data_ptr(), memory, stream);
  });
  return all.tensor.to(tensor.device());
}

/// Reduces a tensor over all ranks and returns this rank's split of the rows; see
/// Context::reducescatter. On a GPU the current stream waits for the result, not the host.
/// @throws Error as Context::reducescatter.
inline ::torch::Tensor reducescatter(Context& context, const ::torch::Tensor& tensor,
                                     const Options& options = {}) {
  const detail::Rows mine(context, FARANDOLE_REDUCESCATTER, tensor, options);
  const ::torch::Tensor split = mine.like(mine.call.output_rows(mine.rows).value());
  mine.run([&](const farandole::detail::Prepared& step, const Stream* stream) {
    return farandole::detail::start(step, mine.wire.data_ptr(), split.data_ptr(), stream);
  });
  return split.to(tensor.device());
}

}  // namespace farandole::torch
