/// @file
/// The collectives that split data among ranks: allgather, reducescatter, alltoall. Included
/// by farandole/context.h.
#pragma once

#include <farandole/calls.h>
#include <farandole/device.h>
#include <farandole/options.h>
#include <farandole/result.h>
#include <farandole/span.h>
#include <farandole/work.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace farandole {

/// What a rank receives by an alltoall.
template <class T>
struct Received {
  std::vector<T> data;                        ///< From all ranks, in rank order, end to end.
  std::vector<std::int64_t> received_splits;  ///< Rows of each rank among them.
};

/// @cond internal
namespace detail {

/// One call of a collective along rows.
///
/// Thread safety: as a plain value. Lifetime: borrows context and options.
struct RowCall {
  farandole_context* context;
  farandole_kind kind;
  DataType type;
  const Options& options;
  std::int64_t size;  ///< Ranks of the set.

  Error refuse(const std::string& why) const {
    const char* const function = kind == FARANDOLE_ALLGATHER  ? "allgather"
                                 : kind == FARANDOLE_ALLTOALL ? "alltoall"
                                                              : "reducescatter";
    const std::string name = options.name.empty() ? "" : " \"" + options.name + "\"";
    return {Code::invalid_argument, function + name + ": " + why};
  }

  /// Rows of `elements` elements.
  Result<std::int64_t> rows_of(std::size_t elements) const {
    const auto count = static_cast<std::int64_t>(elements);
    if (options.row > 0 && count % options.row == 0) return count / options.row;
    return refuse(std::to_string(count) + " elements are no whole rows of " +
                  std::to_string(options.row));
  }

  /// How many rows this rank receives if all pass `rows`.
  Result<std::int64_t> output_rows(std::int64_t rows) const {
    std::int64_t received = 0;
    const int code = farandole_output_rows(context, kind, options.set.id, rows, &received);
    if (code != FARANDOLE_OK) return last_error(code);
    return received;
  }

  /// An operation to which this rank gives `rows` rows. `splits`: of an alltoall, how many of them
  /// to each rank; nullptr: the same number.
  Result<Prepared> prepare(farandole_device device, std::int64_t rows,
                           const std::int64_t* splits = nullptr) const {
    farandole_params params = params_of(kind, device, options);
    params.splits = splits;
    const Shape shape(rows, options.row);
    const farandole_tensor tensor = shape.describe(nullptr, type);
    return detail::prepare(context, params, options.name, &tensor, 1);
  }
};

/// farandole_allocator::allocate for a Received<T>.
template <class T>
void* allocate_received(void* received, std::int32_t, const std::int64_t* rows, std::int32_t ranks,
                        std::int64_t bytes) noexcept {
  auto& [data, splits] = *static_cast<Received<T>*>(received);
  try {
    splits.assign(rows, rows + ranks);
    data.resize(static_cast<std::size_t>(bytes) / sizeof(T));
  } catch (...) {  // bad_alloc or length_error
    return nullptr;
  }
  return data.data();
}

}  // namespace detail
/// @endcond

/// What every Context can do along rows (see Options::row; a row is one element by default).
///
/// Each call has two forms. One returns a vector, as large as what the ranks pass. The other, which
/// ends in `_into`, writes to the caller's memory, which must not overlap the input: all ranks pass
/// equally many rows, and the memory may be on a GPU. Ranks may use different forms in one call.
/// Thread safety and lifetime: as Context.
template <class Context>
class RowCollectives {
 public:
  /// The elements of all ranks, in rank order. Ranks may give different numbers of rows.
  /// @code
  /// std::vector<float> all = context.allgather(std::vector<float>{loss});
  /// @endcode
  /// @throws Error as Context::allreduce(); resource_exhausted, on this rank alone: there is no
  /// memory for the result.
  template <class Data>
  auto allgather(Data&& data, const Options& options = {}) {
    return try_allgather(std::forward<Data>(data), options).value();
  }
  /// As allgather(), but returns the failure.
  template <class Data>
  auto try_allgather(Data&& data, const Options& options = {}) {
    return gather(to_read(Span(data)), options);
  }

  /// Reduces `data` over all ranks and returns this rank's split of the rows: the first (rows %
  /// size) ranks get one row more than the others. All ranks pass equally many rows.
  /// @throws Error as Context::allreduce().
  template <class Data>
  auto reducescatter(Data&& data, const Options& options = {}) {
    return try_reducescatter(std::forward<Data>(data), options).value();
  }
  /// As reducescatter(), but returns the failure.
  template <class Data>
  auto try_reducescatter(Data&& data, const Options& options = {}) {
    return reduce_and_scatter(to_read(Span(data)), options);
  }

  /// Sends each rank a slice of `data`: the first `splits[0]` rows to the first rank of the set,
  /// and so on. The splits add up to the rows of `data`.
  /// @throws Error as allgather(); mismatch while a rank has joined.
  template <class Data>
  auto alltoall(Data&& data, const std::vector<std::int64_t>& splits, const Options& options = {}) {
    return try_alltoall(std::forward<Data>(data), splits, options).value();
  }
  /// As alltoall(), but returns the failure.
  template <class Data>
  auto try_alltoall(Data&& data, const std::vector<std::int64_t>& splits,
                    const Options& options = {}) {
    return exchange(to_read(Span(data)), splits, options);
  }

  /// Gathers equally many rows of all ranks into `all`, whose size is that of `data` times the
  /// ranks.
  /// @throws Error as Context::allreduce(); invalid_argument if `all` has another size; mismatch,
  /// on ranks that call this: another rank gives another number of rows.
  template <class In, class Out>
  void allgather_into(In&& data, Out&& all, const Options& options = {}) {
    try_allgather_into(data, all, options).value();
  }
  /// As allgather_into(), but returns the failure.
  template <class In, class Out>
  Result<void> try_allgather_into(In&& data, Out&& all, const Options& options = {}) {
    return run(FARANDOLE_ALLGATHER, to_read(Span(data)), Span(all), options);
  }
  /// Starts an allgather; both are borrowed until the Work is complete.
  template <class In, class Out>
  [[nodiscard]] Work allgather_into_async(In&& data, Out&& all, const Options& options = {}) {
    return start(FARANDOLE_ALLGATHER, to_read(Span(data)), Span(all), options).value();
  }
  /// Gathers memory of a GPU in the order of `stream`, as Context::allreduce() in a stream.
  template <class In, class Out>
  void allgather_into(DeviceSpan<In> data, DeviceSpan<Out> all, const Stream& stream,
                      const Options& options = {}) {
    try_allgather_into(data, all, stream, options).value();
  }
  /// As allgather_into() in a stream, but returns the failure.
  template <class In, class Out>
  Result<void> try_allgather_into(DeviceSpan<In> data, DeviceSpan<Out> all, const Stream& stream,
                                  const Options& options = {}) {
    return run(FARANDOLE_ALLGATHER, data, all, stream, options);
  }
  /// Starts an allgather after what `stream` holds now; see Context::allreduce_async().
  template <class In, class Out>
  [[nodiscard]] Work allgather_into_async(DeviceSpan<In> data, DeviceSpan<Out> all,
                                          const Stream& stream, const Options& options = {}) {
    return start(FARANDOLE_ALLGATHER, data, all, stream, options).value();
  }

  /// As reducescatter(), into `mine`, which has the size of this rank's split.
  /// @throws Error as Context::allreduce(); invalid_argument if `mine` has another size.
  template <class In, class Out>
  void reducescatter_into(In&& data, Out&& mine, const Options& options = {}) {
    try_reducescatter_into(data, mine, options).value();
  }
  /// As reducescatter_into(), but returns the failure.
  template <class In, class Out>
  Result<void> try_reducescatter_into(In&& data, Out&& mine, const Options& options = {}) {
    return run(FARANDOLE_REDUCESCATTER, to_read(Span(data)), Span(mine), options);
  }
  /// Starts a reducescatter; both are borrowed until the Work is complete.
  template <class In, class Out>
  [[nodiscard]] Work reducescatter_into_async(In&& data, Out&& mine, const Options& options = {}) {
    return start(FARANDOLE_REDUCESCATTER, to_read(Span(data)), Span(mine), options).value();
  }
  /// Reduces memory of a GPU in the order of `stream`, as Context::allreduce() in a stream.
  template <class In, class Out>
  void reducescatter_into(DeviceSpan<In> data, DeviceSpan<Out> mine, const Stream& stream,
                          const Options& options = {}) {
    try_reducescatter_into(data, mine, stream, options).value();
  }
  /// As reducescatter_into() in a stream, but returns the failure.
  template <class In, class Out>
  Result<void> try_reducescatter_into(DeviceSpan<In> data, DeviceSpan<Out> mine,
                                      const Stream& stream, const Options& options = {}) {
    return run(FARANDOLE_REDUCESCATTER, data, mine, stream, options);
  }
  /// Starts a reducescatter after what `stream` holds now; see Context::allreduce_async().
  template <class In, class Out>
  [[nodiscard]] Work reducescatter_into_async(DeviceSpan<In> data, DeviceSpan<Out> mine,
                                              const Stream& stream, const Options& options = {}) {
    return start(FARANDOLE_REDUCESCATTER, data, mine, stream, options).value();
  }

  /// Sends equally many rows of `data` to each rank, and writes the received rows into `received`,
  /// of the same size. @throws Error as allgather_into(); invalid_argument if the rows do not
  /// divide among the ranks; mismatch while a rank has joined.
  template <class In, class Out>
  void alltoall_into(In&& data, Out&& received, const Options& options = {}) {
    try_alltoall_into(data, received, options).value();
  }
  /// As alltoall_into(), but returns the failure.
  template <class In, class Out>
  Result<void> try_alltoall_into(In&& data, Out&& received, const Options& options = {}) {
    return run(FARANDOLE_ALLTOALL, to_read(Span(data)), Span(received), options);
  }
  /// Starts an alltoall; both are borrowed until the Work is complete.
  template <class In, class Out>
  [[nodiscard]] Work alltoall_into_async(In&& data, Out&& received, const Options& options = {}) {
    return start(FARANDOLE_ALLTOALL, to_read(Span(data)), Span(received), options).value();
  }
  /// Exchanges memory of a GPU in the order of `stream`, as Context::allreduce() in a stream.
  template <class In, class Out>
  void alltoall_into(DeviceSpan<In> data, DeviceSpan<Out> received, const Stream& stream,
                     const Options& options = {}) {
    try_alltoall_into(data, received, stream, options).value();
  }
  /// As alltoall_into() in a stream, but returns the failure.
  template <class In, class Out>
  Result<void> try_alltoall_into(DeviceSpan<In> data, DeviceSpan<Out> received,
                                 const Stream& stream, const Options& options = {}) {
    return run(FARANDOLE_ALLTOALL, data, received, stream, options);
  }
  /// Starts an alltoall after what `stream` holds now; see Context::allreduce_async().
  template <class In, class Out>
  [[nodiscard]] Work alltoall_into_async(DeviceSpan<In> data, DeviceSpan<Out> received,
                                         const Stream& stream, const Options& options = {}) {
    return start(FARANDOLE_ALLTOALL, data, received, stream, options).value();
  }

  /// @cond internal
  Result<detail::RowCall> row_call(farandole_kind kind, DataType type, const Options& options) {
    Context& self = static_cast<Context&>(*this);
    const std::vector<int>& ranks = options.set.ranks;
    const bool all = options.set.id == 0;
    detail::RowCall made{self.handle(), kind, type, options,
                         all ? self.size() : static_cast<std::int64_t>(ranks.size())};
    if (made.size > 0) return made;
    return made.refuse("process set " + std::to_string(options.set.id) +
                       " has no ranks; expected what add_process_set() returned");
  }
  /// @endcond

 protected:
  /// @cond internal
  RowCollectives() = default;
  /// @endcond

 private:
  template <class T>
  static Span<const T> to_read(Span<T> data) {
    return {data.data(), data.size()};
  }

  template <class T>
  Result<std::vector<T>> gather(Span<const T> data, const Options& options) {
    Result<detail::RowCall> call = row_call(FARANDOLE_ALLGATHER, data_type_of<T>(), options);
    if (!call.ok()) return call.error();
    Result<std::int64_t> rows = call.value().rows_of(data.size());
    if (!rows.ok()) return rows.error();
    auto received = receive(call.value(), rows.value(), nullptr, data);
    if (!received.ok()) return received.error();
    return std::move(received).value().data;
  }

  template <class T>
  Result<std::vector<T>> reduce_and_scatter(Span<const T> data, const Options& options) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no memory: use std::uint8_t");
    Result<detail::RowCall> call = row_call(FARANDOLE_REDUCESCATTER, data_type_of<T>(), options);
    if (!call.ok()) return call.error();
    const detail::RowCall& here = call.value();
    Result<std::int64_t> rows = here.rows_of(data.size());
    if (!rows.ok()) return rows.error();
    Result<std::int64_t> share = here.output_rows(rows.value());
    if (!share.ok()) return share.error();
    std::vector<T> mine(static_cast<std::size_t>(share.value() * options.row));
    Result<void> reduced = run(here.prepare(FARANDOLE_CPU, rows.value()), data, Span<T>(mine));
    if (!reduced.ok()) return reduced.error();
    return mine;
  }

  template <class T>
  Result<Received<T>> exchange(Span<const T> data, const std::vector<std::int64_t>& splits,
                               const Options& options) {
    Result<detail::RowCall> call = row_call(FARANDOLE_ALLTOALL, data_type_of<T>(), options);
    if (!call.ok()) return call.error();
    const detail::RowCall& here = call.value();
    Result<std::int64_t> rows = here.rows_of(data.size());
    if (!rows.ok()) return rows.error();
    if (static_cast<std::int64_t>(splits.size()) != here.size)
      return here.refuse(std::to_string(splits.size()) + " splits; expected one for each of " +
                         std::to_string(here.size) + " ranks");
    const std::int64_t sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
    if (sum == rows.value()) return receive(here, rows.value(), splits.data(), data);
    return here.refuse("the splits add up to " + std::to_string(sum) + " rows; expected the " +
                       std::to_string(rows.value()) + " of the data");
  }

  /// The library writes to `received` until the work is done: its destructor waits for that.
  template <class T>
  static Result<Received<T>> receive(const detail::RowCall& here, std::int64_t rows,
                                     const std::int64_t* splits, Span<const T> data) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no memory: use std::uint8_t");
    Result<detail::Prepared> prepared = here.prepare(FARANDOLE_CPU, rows, splits);
    if (!prepared.ok()) return prepared.error();
    Received<T> received;
    const farandole_allocator memory{sizeof memory, &received, &detail::allocate_received<T>};
    Result<Work> started = detail::start_allocating(prepared.value(), data.data(), memory);
    if (!started.ok()) return started.error();
    Result<void> done = started.value().try_wait();
    if (!done.ok()) return done.error();
    return Result<Received<T>>(std::move(received));
  }

  /// An operation into memory of the caller's: `given` and `taken` elements on this rank.
  Result<detail::Prepared> prepare(farandole_kind kind, DataType type, farandole_device device,
                                   std::size_t given, std::size_t taken, const Options& options) {
    Result<detail::RowCall> call = row_call(kind, type, options);
    if (!call.ok()) return call.error();
    const detail::RowCall& here = call.value();
    Result<std::int64_t> rows = here.rows_of(given);
    if (!rows.ok()) return rows.error();
    Result<std::int64_t> expected = here.output_rows(rows.value());
    if (!expected.ok()) return expected.error();
    if (static_cast<std::int64_t>(taken) == expected.value() * options.row)
      return here.prepare(device, rows.value());
    return here.refuse("the output has " + std::to_string(taken) + " elements; expected " +
                       std::to_string(expected.value() * options.row));
  }

  template <class T>
  Result<void> run(farandole_kind kind, Span<const T> data, Span<T> result,
                   const Options& options) {
    return run(prepare(kind, data_type_of<T>(), FARANDOLE_CPU, data.size(), result.size(), options),
               data, result);
  }

  template <class T>
  static Result<void> run(Result<detail::Prepared> prepared, Span<const T> data, Span<T> result) {
    if (!prepared.ok()) return prepared.error();
    const void* const in = data.data();
    void* const out = result.data();
    return detail::run(prepared.value(), &in, &out);
  }

  template <class T>
  Result<Work> start(farandole_kind kind, Span<const T> data, Span<T> result,
                     const Options& options) {
    auto prepared =
        prepare(kind, data_type_of<T>(), FARANDOLE_CPU, data.size(), result.size(), options);
    if (!prepared.ok()) return prepared.error();
    return detail::start(prepared.value(), data.data(), result.data());
  }

  template <class In, class Out>
  Result<void> run(farandole_kind kind, DeviceSpan<In> data, DeviceSpan<Out> result,
                   const Stream& stream, const Options& options) {
    Result<Work> started = start(kind, data, result, stream, options);
    if (!started.ok()) return started.error();
    return started.value().try_hand_over(stream);
  }

  template <class In, class Out>
  Result<Work> start(farandole_kind kind, DeviceSpan<In> data, DeviceSpan<Out> result,
                     const Stream& stream, const Options& options) {
    static_assert(std::is_same_v<std::remove_const_t<In>, Out>, "input and output have one type");
    auto prepared =
        prepare(kind, data_type_of<Out>(), FARANDOLE_CUDA, data.size(), result.size(), options);
    if (!prepared.ok()) return prepared.error();
    return detail::start(prepared.value(), data.address(), result.address(), &stream);
  }
};

}  // namespace farandole
