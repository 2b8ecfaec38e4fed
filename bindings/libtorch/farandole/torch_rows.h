/// @file
/// Collectives of tensors that are cut along their first dimension. Included by farandole/torch.h.
#pragma once

#include <farandole/context.h>
#include <farandole/torch_streams.h>
#include <farandole/torch_tensors.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace farandole::torch {

/// @cond internal
namespace detail {

/// A tensor as rows that can travel.
///
/// Lifetime: `call` borrows from it, so that it does not move.
struct Rows {
  Rows(Context& context, const char* function, const ::torch::Tensor& tensor, const Options& given)
      : options(given), call(context.row_call(function, data_type_of(tensor), options).value()) {
    if (tensor.dim() == 0) throw call.refuse("a scalar has no rows; expected a dimension");
    wire = on_wire(tensor, place_of(tensor));
    shape = wire.sizes().vec();
    rows = shape[0];
    options.row = 1;
    for (std::size_t d = 1; d < shape.size(); ++d) options.row *= shape[d];
  }
  Rows(const Rows&) = delete;

  /// A new tensor of as many rows, where this one travels.
  ::torch::Tensor like(std::int64_t many) {
    shape[0] = many;
    return ::torch::empty(shape, wire.options());
  }

  /// Runs the collective into `result`; on a GPU the current stream waits for it.
  void move(farandole_kind kind, std::int64_t total, const std::int64_t* table,
            const ::torch::Tensor& result) {
    const bool on_gpu = wire.is_cuda();
    farandole::detail::Prepared step =
        call.prepare(kind, on_gpu ? FARANDOLE_CUDA : FARANDOLE_CPU, total, table).value();
    const void* const in = wire.data_ptr();
    void* const out = result.data_ptr();
    if (!on_gpu) return farandole::detail::run(step, &in, &out).value();
    Work work =
        farandole::detail::start_on(step, in, out, stream_after_current(wire.device())).value();
    make_current_wait(wire.device(), [&](const Stream& stream) { work.hand_over(stream); });
  }

  Options options;
  farandole::detail::RowCall call;
  ::torch::Tensor wire;
  std::vector<std::int64_t> shape;
  std::int64_t rows = 0;
};

}  // namespace detail
/// @endcond

/// The rows of all ranks, in rank order; the first dimension may differ between ranks. On a GPU the
/// current stream waits for the result, and the host until the ranks know each other's rows.
/// @throws Error as Context::allgather.
inline ::torch::Tensor allgather(Context& context, const ::torch::Tensor& tensor,
                                 const Options& options = {}) {
  detail::Rows mine(context, "allgather", tensor, options);
  context.name_unnamed(mine.call);
  farandole::detail::RowCounts rows = farandole::detail::tell_rows(mine.call, mine.rows).value();
  const std::int64_t total = farandole::detail::sum_of(rows);
  const ::torch::Tensor all = mine.like(total);
  if (all.numel() > 0) mine.move(FARANDOLE_ALLGATHER, total, rows.data(), all);
  return all.to(tensor.device());
}

/// Reduces a tensor over all ranks and gives each rank its part of the rows; see
/// Context::reducescatter. On a GPU the current stream waits for the result, not the host.
/// @throws Error as Context::reducescatter.
inline ::torch::Tensor reducescatter(Context& context, const ::torch::Tensor& tensor,
                                     const Options& options = {}) {
  detail::Rows mine(context, "reducescatter", tensor, options);
  const ::torch::Tensor part = mine.like(mine.call.share_of(mine.rows));
  mine.move(FARANDOLE_REDUCESCATTER, mine.rows, nullptr, part);
  return part.to(tensor.device());
}

}  // namespace farandole::torch
