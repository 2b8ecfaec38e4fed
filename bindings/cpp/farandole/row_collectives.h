/// @file
/// The collectives that cut data into parts for ranks: allgather, reducescatter, alltoall. Included
/// by farandole/context.h.
#pragma once

#include <farandole/calls.h>
#include <farandole/device.h>
#include <farandole/options.h>
#include <farandole/result.h>
#include <farandole/rows.h>
#include <farandole/span.h>
#include <farandole/work.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace farandole {

/// What an alltoall gives a rank.
template <class T>
struct Received {
  std::vector<T> data;                        ///< From all ranks, in rank order, end to end.
  std::vector<std::int64_t> received_splits;  ///< Rows of each rank among them.
};

/// What every Context can do along rows (see Options::row; a row is one element by default).
///
/// Each comes in two kinds. Those that return a vector find out its size: ranks first tell each
/// other their numbers of rows. Those that end in `_into` write to memory that the caller gives,
/// which must not overlap the input: there the sizes are known beforehand, and memory may be on a
/// GPU. Thread safety and lifetime: as Context.
template <class Context>
class RowCollectives {
 public:
  /// The elements of all ranks, in rank order. Ranks may give different numbers of rows.
  /// @code
  /// std::vector<float> all = context.allgather(std::vector<float>{loss});
  /// @endcode
  /// @throws Error as Context::allreduce().
  template <class Data>
  auto allgather(Data&& data, const Options& options = {}) {
    return try_allgather(std::forward<Data>(data), options).value();
  }
  /// As allgather(), with the failure as a value.
  template <class Data>
  auto try_allgather(Data&& data, const Options& options = {}) {
    return gather(to_read(Span(data)), options);
  }

  /// Reduces `data` over all ranks, and gives each rank its part of the rows: the first
  /// (rows % size) ranks get one row more than the others. Every rank passes as many.
  /// @throws Error as Context::allreduce().
  template <class Data>
  auto reducescatter(Data&& data, const Options& options = {}) {
    return try_reducescatter(std::forward<Data>(data), options).value();
  }
  /// As reducescatter(), with the failure as a value.
  template <class Data>
  auto try_reducescatter(Data&& data, const Options& options = {}) {
    return reduce_and_scatter(to_read(Span(data)), options);
  }

  /// Sends each rank a slice of `data`: the first `splits[0]` rows to the first rank of the set,
  /// and so on. The splits add up to the rows of `data`.
  /// @throws Error as Context::allreduce(); mismatch while a rank has joined.
  template <class Data>
  auto alltoall(Data&& data, const std::vector<std::int64_t>& splits, const Options& options = {}) {
    return try_alltoall(std::forward<Data>(data), splits, options).value();
  }
  /// As alltoall(), with the failure as a value.
  template <class Data>
  auto try_alltoall(Data&& data, const std::vector<std::int64_t>& splits,
                    const Options& options = {}) {
    return exchange(to_read(Span(data)), splits, options);
  }

  /// Gathers from all ranks as many rows into `all`, whose size is theirs times the ranks.
  /// @throws Error as Context::allreduce(); invalid_argument if `all` has another size.
  template <class In, class Out>
  void allgather_into(In&& data, Out&& all, const Options& options = {}) {
    try_allgather_into(data, all, options).value();
  }
  /// As allgather_into(), with the failure as a value.
  template <class In, class Out>
  Result<void> try_allgather_into(In&& data, Out&& all, const Options& options = {}) {
    return run(FARANDOLE_ALLGATHER, to_read(Span(data)), Span(all), options);
  }
  /// Starts an allgather; both are borrowed until the Work is over.
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
  /// As allgather_into() in a stream, with the failure as a value.
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

  /// As reducescatter(), into `mine`, which has the size of this rank's part.
  /// @throws Error as Context::allreduce(); invalid_argument if `mine` has another size.
  template <class In, class Out>
  void reducescatter_into(In&& data, Out&& mine, const Options& options = {}) {
    try_reducescatter_into(data, mine, options).value();
  }
  /// As reducescatter_into(), with the failure as a value.
  template <class In, class Out>
  Result<void> try_reducescatter_into(In&& data, Out&& mine, const Options& options = {}) {
    return run(FARANDOLE_REDUCESCATTER, to_read(Span(data)), Span(mine), options);
  }
  /// Starts a reducescatter; both are borrowed until the Work is over.
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
  /// As reducescatter_into() in a stream, with the failure as a value.
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

  /// Sends each rank as many rows of `data`, and writes what comes into `received`, of the same
  /// size. @throws Error as alltoall(); invalid_argument if the rows do not divide among the ranks.
  template <class In, class Out>
  void alltoall_into(In&& data, Out&& received, const Options& options = {}) {
    try_alltoall_into(data, received, options).value();
  }
  /// As alltoall_into(), with the failure as a value.
  template <class In, class Out>
  Result<void> try_alltoall_into(In&& data, Out&& received, const Options& options = {}) {
    return run(FARANDOLE_ALLTOALL, to_read(Span(data)), Span(received), options);
  }
  /// Starts an alltoall; both are borrowed until the Work is over.
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
  /// As alltoall_into() in a stream, with the failure as a value.
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
  Result<detail::RowCall> row_call(const char* function, DataType type, const Options& options) {
    Context& self = static_cast<Context&>(*this);
    const std::vector<int>& ranks = options.set.ranks;
    const bool all = options.set.id == 0;
    const auto here = std::lower_bound(ranks.begin(), ranks.end(), self.rank());
    const bool member = here != ranks.end() && *here == self.rank();
    detail::RowCall made{self.handle(),
                         function,
                         options,
                         options.name,
                         type,
                         all ? self.size() : static_cast<std::int64_t>(ranks.size()),
                         all      ? self.rank()
                         : member ? here - ranks.begin()
                                  : ranks.end() - ranks.begin()};
    if (made.size > 0) return made;
    return made.refuse("process set " + std::to_string(options.set.id) +
                       " has no ranks; expected what add_process_set() returned");
  }
  /// Gives an unnamed call that exchanges sizes first the next name; this counts on every rank, so
  /// that nothing may be refused on one rank alone afterwards.
  void name_unnamed(detail::RowCall& call) {
    if (call.name.empty()) call.name = names_->next(call.options.set.id, call.function);
  }
  /// @endcond

 protected:
  /// @cond internal
  RowCollectives() = default;
  void forget_unnamed() { names_->forget_unnamed(); }
  void forget_unnamed(std::uint32_t set) { names_->forget_unnamed(set); }
  /// @endcond

 private:
  template <class T>
  static Span<const T> to_read(Span<T> data) {
    return {data.data(), data.size()};
  }

  template <class T>
  Result<std::vector<T>> gather(Span<const T> data, const Options& options) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no memory: use std::uint8_t");
    Result<detail::RowCall> call = row_call("allgather", data_type_of<T>(), options);
    if (!call.ok()) return call.error();
    detail::RowCall& here = call.value();
    Result<std::int64_t> mine = here.rows_of(data.size());
    if (!mine.ok()) return mine.error();
    name_unnamed(here);
    const detail::TakenName name(*names_, here);
    if (!name.taken()) return in_flight(here);
    Result<detail::RowCounts> rows = detail::tell_rows(here, mine.value());
    if (!rows.ok()) return rows.error();
    const std::int64_t total = detail::sum_of(rows.value());
    auto all =
        here.allocate<T>(here.elements_of(total), FARANDOLE_ALLGATHER, total, rows.value().data());
    if (!all.ok() || all.value().empty()) return all;
    Result<void> moved =
        move(here, FARANDOLE_ALLGATHER, total, rows.value(), data, Span<T>(all.value()));
    if (!moved.ok()) return moved.error();
    return all;
  }

  template <class T>
  Result<std::vector<T>> reduce_and_scatter(Span<const T> data, const Options& options) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no memory: use std::uint8_t");
    Result<detail::RowCall> call = row_call("reducescatter", data_type_of<T>(), options);
    if (!call.ok()) return call.error();
    const detail::RowCall& here = call.value();
    Result<std::int64_t> rows = here.rows_of(data.size());
    if (!rows.ok()) return rows.error();
    std::vector<T> mine(here.elements_of(here.share_of(rows.value())));
    Result<void> moved = move(here, FARANDOLE_REDUCESCATTER, rows.value(), {}, data, Span<T>(mine));
    if (!moved.ok()) return moved.error();
    return mine;
  }

  template <class T>
  Result<Received<T>> exchange(Span<const T> data, const std::vector<std::int64_t>& splits,
                               const Options& options) {
    static_assert(!std::is_same_v<T, bool>, "std::vector<bool> has no memory: use std::uint8_t");
    Result<detail::RowCall> call = row_call("alltoall", data_type_of<T>(), options);
    if (!call.ok()) return call.error();
    detail::RowCall& here = call.value();
    Result<std::int64_t> rows = here.rows_of(data.size());
    if (!rows.ok()) return rows.error();
    Result<void> fit = check_splits(here, splits, rows.value());
    if (!fit.ok()) return fit.error();
    name_unnamed(here);
    const detail::TakenName name(*names_, here);
    if (!name.taken()) return in_flight(here);
    Result<detail::ToldSplits> told = detail::tell_splits(here, splits);
    if (!told.ok()) return told.error();
    const auto& [receives, most] = told.value();
    if (most == 0) return Received<T>{{}, receives};
    detail::RowCounts table = splits;
    table.insert(table.end(), receives.begin(), receives.end());
    auto received = here.allocate<T>(here.elements_of(detail::sum_of(receives)), FARANDOLE_ALLTOALL,
                                     most, table.data());
    if (!received.ok()) return received.error();
    Result<void> moved =
        move(here, FARANDOLE_ALLTOALL, most, table, data, Span<T>(received.value()));
    if (!moved.ok()) return moved.error();
    return Received<T>{std::move(received).value(), receives};
  }

  static Error in_flight(const detail::RowCall& here) {
    return here.refuse("already in flight; wait for it, or use another name");
  }

  static Result<void> check_splits(const detail::RowCall& here, const detail::RowCounts& splits,
                                   std::int64_t rows) {
    if (static_cast<std::int64_t>(splits.size()) != here.size)
      return here.refuse(std::to_string(splits.size()) + " splits; expected one for each of " +
                         std::to_string(here.size) + " ranks");
    if (*std::min_element(splits.begin(), splits.end()) < 0)
      return here.refuse("a split is negative");
    if (detail::sum_of(splits) == rows) return {};
    return here.refuse("the splits add up to " + std::to_string(detail::sum_of(splits)) +
                       " rows; expected the " + std::to_string(rows) + " of the data");
  }

  template <class T>
  static Result<void> move(const detail::RowCall& here, farandole_kind kind, std::int64_t rows,
                           const detail::RowCounts& table, Span<const T> data, Span<T> result) {
    auto prepared = here.prepare(kind, FARANDOLE_CPU, rows, table.empty() ? nullptr : table.data());
    if (!prepared.ok()) return prepared.error();
    const void* const in = data.data();
    void* const out = result.data();
    return detail::run(prepared.value(), &in, &out);
  }

  /// An operation whose sizes are known: `given` and `taken` elements on this rank.
  Result<detail::Prepared> prepare(farandole_kind kind, DataType type, farandole_device device,
                                   std::size_t given, std::size_t taken, const Options& options) {
    const bool gathers = kind == FARANDOLE_ALLGATHER;
    const bool exchanges = kind == FARANDOLE_ALLTOALL;
    const char* const function = gathers ? "allgather" : exchanges ? "alltoall" : "reducescatter";
    Result<detail::RowCall> call = row_call(function, type, options);
    if (!call.ok()) return call.error();
    const detail::RowCall& here = call.value();
    Result<std::int64_t> rows = here.rows_of(given);
    if (!rows.ok()) return rows.error();
    if (exchanges && rows.value() % here.size != 0)
      return here.refuse(std::to_string(rows.value()) + " rows do not divide among " +
                         std::to_string(here.size) + " ranks");
    const std::int64_t expected = gathers     ? rows.value() * here.size
                                  : exchanges ? rows.value()
                                              : here.share_of(rows.value());
    if (taken != here.elements_of(expected))
      return here.refuse("the output has " + std::to_string(taken) + " elements; expected " +
                         std::to_string(here.elements_of(expected)));
    const auto ranks = static_cast<std::size_t>(here.size);
    const std::int64_t slice = exchanges ? rows.value() / here.size : rows.value();
    const detail::RowCounts table(exchanges ? 2 * ranks : ranks, slice);
    return here.prepare(kind, device,
                        exchanges ? slice
                        : gathers ? expected
                                  : rows.value(),
                        gathers || exchanges ? table.data() : nullptr);
  }

  template <class T>
  Result<void> run(farandole_kind kind, Span<const T> data, Span<T> result,
                   const Options& options) {
    auto prepared =
        prepare(kind, data_type_of<T>(), FARANDOLE_CPU, data.size(), result.size(), options);
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
    return detail::start_on(prepared.value(), data.address(), result.address(), stream);
  }

  std::unique_ptr<detail::CallNames> names_ = std::make_unique<detail::CallNames>();
};

}  // namespace farandole
