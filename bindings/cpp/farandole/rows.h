/// @file
/// How the C++ API cuts along rows, and how ranks tell each other their numbers of rows. Included
/// by farandole/row_collectives.h.
///
/// A collective whose sizes a rank does not know is two under one name: the first tells them, the
/// second moves the elements. Names and steps are those of Farandole's Python API, so that ranks
/// of both work together. Beside the sizes an empty tensor travels, so that ranks that disagree in
/// its type or row are refused, and `farandole_params.function` refuses those that call another
/// collective.
#pragma once

#include <farandole/calls.h>
#include <farandole/options.h>
#include <farandole/result.h>
#include <farandole/span.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace farandole {

/// @cond internal
namespace detail {

/// Numbers of rows, by position in the process set.
using RowCounts = std::vector<std::int64_t>;

inline std::int64_t sum_of(const RowCounts& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

/// One call of a collective along rows.
///
/// Thread safety: as a plain value. Lifetime: borrows context and options.
struct RowCall {
  farandole_context* context;
  const char* function;  ///< As users call it.
  const Options& options;
  std::string name;  ///< Of both steps.
  DataType type;
  std::int64_t size;      ///< Ranks of the set.
  std::int64_t position;  ///< Of this rank among them; `size` if it is none of them.

  Error refuse(const std::string& why) const {
    return {Code::invalid_argument,
            std::string(function) + (name.empty() ? "" : " \"" + name + "\"") + ": " + why};
  }

  /// Rows of `elements` elements.
  Result<std::int64_t> rows_of(std::size_t elements) const {
    const auto count = static_cast<std::int64_t>(elements);
    if (options.row > 0 && count % options.row == 0) return count / options.row;
    return refuse(std::to_string(count) + " elements are no whole rows of " +
                  std::to_string(options.row));
  }

  /// Elements of `rows` rows.
  std::size_t elements_of(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * options.row);
  }

  /// Of a reducescatter: the first ranks get one row more where they do not come out even.
  std::int64_t share_of(std::int64_t rows) const {
    return rows / size + (position < rows % size ? 1 : 0);
  }

  /// The step that moves elements of shape [rows, row].
  Result<Prepared> prepare(farandole_kind kind, farandole_device device, std::int64_t rows,
                           const std::int64_t* table) const {
    farandole_params params = params_of(kind, device, options);
    params.rows = table;
    const Shape shape(rows, options.row);
    const farandole_tensor tensor = shape.describe(nullptr, type);
    return detail::prepare(context, params, name, &tensor, 1);
  }

  /// Memory for the result of a step that moves elements. Where there is none, the other ranks,
  /// which count on this one, are told so in that step.
  template <class T>
  Result<std::vector<T>> allocate(std::size_t elements, farandole_kind kind, std::int64_t rows,
                                  const std::int64_t* table) const {
    try {
      return std::vector<T>(elements);
    } catch (const std::exception&) {  // bad_alloc or length_error
      const Error error(Code::resource_exhausted, std::string(function) + " \"" + name +
                                                      "\": no memory for a result of " +
                                                      std::to_string(elements) + " elements");
      fail(kind, rows, table, error.what());
      return error;
    }
  }

  void fail(farandole_kind kind, std::int64_t rows, const std::int64_t* table,
            const char* why) const {
    Result<Prepared> prepared = prepare(kind, FARANDOLE_CPU, rows, table);
    if (!prepared.ok()) return;
    const Prepared& step = prepared.value();
    const void* const in = nullptr;
    void* const out = nullptr;
    farandole_work* work = nullptr;
    if (farandole_start(step.operation, step.version, &in, &out, nullptr, why, &work) ==
        FARANDOLE_OK)
      (void)Work(work).try_wait();  // this rank has its error
  }

  /// The step that tells sizes: `table` of int64 [rows, columns], and nothing of the data.
  Result<void> tell(farandole_params params, const char* table_name, Shape table,
                    std::int64_t* given, std::int64_t* taken) const {
    params.function = function;
    const Shape empty(0, options.row);
    const farandole_tensor tensors[] = {table.describe(table_name, DataType::int64),
                                        empty.describe(name.c_str(), type)};
    Result<Prepared> prepared = detail::prepare(context, params, name, tensors, 2);
    if (!prepared.ok()) return explain(prepared.error());
    const void* const in[] = {given, nullptr};
    void* const out[] = {taken, nullptr};
    Result<void> told = run(prepared.value(), in, out);
    if (!told.ok()) return explain(told.error());
    return told;
  }

  /// The first step's error in the words of the call.
  Error explain(const Error& error) const {
    std::string text = error.what();
    const auto replace = [&text](const std::string& from, const std::string& to) {
      for (std::size_t at = text.find(from); at != std::string::npos;
           at = text.find(from, at + to.size()))
        text.replace(at, from.size(), to);
    };
    replace(std::string(function) + " \"" + name + "\": member", function);
    replace("shapes must be equal", "only the first dimension, shown as 0, may differ");
    return {error.code(), text};
  }
};

/// How many rows each rank gives, when this one gives `mine`. A rank that has joined gives none.
inline Result<RowCounts> tell_rows(const RowCall& call, std::int64_t mine) {
  farandole_params params = params_of(FARANDOLE_ALLGATHER, FARANDOLE_CPU, call.options);
  params.kind = FARANDOLE_ALLREDUCE;
  params.op = FARANDOLE_MAX;
  RowCounts rows(static_cast<std::size_t>(call.size), 0);
  if (call.position < call.size) rows[static_cast<std::size_t>(call.position)] = mine;
  Shape table(call.size, 1);
  table.dimensions = 2;
  Result<void> told = call.tell(params, "rows", table, rows.data(), rows.data());
  if (!told.ok()) return told.error();
  return rows;
}

/// What this rank receives from each, and the most rows that any rank sends to any other.
struct ToldSplits {
  RowCounts receives;
  std::int64_t most = 0;
};

/// Each rank tells each the rows for it, and the most it has for anyone.
inline Result<ToldSplits> tell_splits(const RowCall& call, const RowCounts& sends) {
  const auto size = static_cast<std::size_t>(call.size);
  RowCounts one_each(4 * size, 0);  // of the pairs; then of the empty tensor
  std::fill_n(one_each.begin(), 2 * size, 1);
  farandole_params params = params_of(FARANDOLE_ALLTOALL, FARANDOLE_CPU, call.options);
  params.rows = one_each.data();
  const std::int64_t most = *std::max_element(sends.begin(), sends.end());
  RowCounts given, taken(2 * size);
  for (const std::int64_t rows : sends) given.insert(given.end(), {rows, most});
  Result<void> told = call.tell(params, "pairs", Shape(1, 2), given.data(), taken.data());
  if (!told.ok()) return told.error();
  ToldSplits splits;
  for (std::size_t rank = 0; rank < size; ++rank) {
    splits.receives.push_back(taken[2 * rank]);
    splits.most = std::max(splits.most, taken[2 * rank + 1]);
  }
  return splits;
}

/// Names of calls that exchange sizes first: those of unnamed ones, and which are in flight.
///
/// Thread safety: any thread.
class CallNames {
 public:
  /// An unnamed call's.
  std::string next(std::uint32_t set, const std::string& function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return "noname." + function + "." + std::to_string(counts_[{set, function}]++ % kSlots);
  }
  void forget_unnamed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.clear();
  }
  /// Those of a set that has ended.
  void forget_unnamed(std::uint32_t set) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.erase(counts_.lower_bound({set, ""}), counts_.lower_bound({set + 1, ""}));
  }
  /// @return false if it is in flight.
  bool take(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_.insert(name).second;
  }
  void give_back(const std::string& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_flight_.erase(name);
  }

 private:
  static constexpr std::uint64_t kSlots = 256;
  std::mutex mutex_;
  std::map<std::pair<std::uint32_t, std::string>, std::uint64_t> counts_;
  std::set<std::string> in_flight_;
};

/// A name is in flight from the first step to the end of the second: another thread that used it in
/// between would meet other ranks in the wrong step.
class TakenName {
 public:
  TakenName(CallNames& names, const RowCall& call)
      : names_(names),
        name_(std::to_string(call.options.set.id) + " " + call.name),
        taken_(names.take(name_)) {}
  TakenName(const TakenName&) = delete;
  TakenName& operator=(const TakenName&) = delete;
  ~TakenName() {
    if (taken_) names_.give_back(name_);
  }
  bool taken() const { return taken_; }

 private:
  CallNames& names_;
  const std::string name_;
  const bool taken_;
};

}  // namespace detail
/// @endcond

}  // namespace farandole
