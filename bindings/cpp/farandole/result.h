/// @file
/// How a call of the C++ API ends: with a value, or with an `Error` that says what went wrong.
///
/// Each operation comes twice: `x()` throws `Error`, `try_x()` returns a `Result`. Names of this
/// API are snake_case, as in Farandole's Python API and in libtorch, so that one vocabulary
/// serves all three.
#pragma once

#include <farandole/farandole.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace farandole {

/// What a caller can do about a failure. The numbers are the C ABI's (`farandole_code`).
enum class Code : int {
  ok = FARANDOLE_OK,
  invalid_argument = FARANDOLE_INVALID_ARGUMENT,  ///< This rank's mistake; nothing was started.
  mismatch = FARANDOLE_MISMATCH,        ///< Ranks disagree; refused on all of them; go on.
  timeout = FARANDOLE_TIMEOUT,          ///< Started work made no progress; final.
  unavailable = FARANDOLE_UNAVAILABLE,  ///< A peer or a library is missing; final.
  aborted = FARANDOLE_ABORTED,          ///< A rank failed or left, or the context was shut down.
  resource_exhausted = FARANDOLE_RESOURCE_EXHAUSTED,
  unimplemented = FARANDOLE_UNIMPLEMENTED,
  internal = FARANDOLE_INTERNAL,  ///< A defect; final.
  generation_ended =
      FARANDOLE_GENERATION_ENDED,  ///< Of a context that was shut down; another was made.
  halted = FARANDOLE_HALTED        ///< Of farandole_reinit: end the process, with exit code 75.
};

/// The facts of a failure besides its message; see `farandole_failure`.
struct Failure {
  std::vector<int> ranks;  ///< Those that failed, ascending; empty: none, or unknown.
  farandole_failure_kind kind = FARANDOLE_FAILURE_UNKNOWN;  ///< Of the first, as the rest.
  int number = -1;         ///< Signal or exit code; -1: none, or unknown.
  int pid = 0;             ///< 0: unknown.
  double last_age_s = -1;  ///< Seconds from its last operation to the failure; -1: unknown.
  std::string cause;       ///< What failed; empty: unknown, as below.
  std::string tensor;      ///< The operation that failed, or of a group the tensor.
  std::string host;        ///< Where it ran.
  std::string last;        ///< Its last operation, such as: allreduce "x".
};

/// A failure: `what()` is one error message that names tensor, rank, value and what was expected.
///
/// Thread safety: as std::runtime_error.
class Error : public std::runtime_error {
 public:
  /// `what` is one error message.
  Error(Code code, const std::string& what, Failure failure = {})
      : std::runtime_error(what),
        code_(code),
        failure_(std::make_shared<const Failure>(std::move(failure))) {}
  /// The kind of failure.
  Code code() const noexcept { return code_; }
  /// The facts of the failure, valid as long as this or a copy.
  const Failure& failure() const noexcept { return *failure_; }

 private:
  Code code_;
  std::shared_ptr<const Failure> failure_;
};

/// A `T`, or the `Error` that took its place.
///
/// Example: `if (auto sum = context.try_allreduce(data); !sum) log(sum.error().what());`
/// In a condition it says whether there is a value, even if the value is a bool or a number.
/// Thread safety: as a plain value.
template <class T>
class [[nodiscard]] Result {
 public:
  /// Success.
  Result(T value) : held_(std::move(value)) {}  // NOLINT: meant to convert
  /// Failure.
  Result(Error error) : held_(std::move(error)) {}

  /// Whether there is a value.
  bool ok() const noexcept { return held_.index() == 0; }
  /// As ok().
  explicit operator bool() const noexcept { return ok(); }
  /// The value. @throws Error if there is none.
  T& value() & {
    throw_if_failed();
    return std::get<0>(held_);
  }
  /// The value, moved out. @throws Error if there is none.
  T value() && {
    throw_if_failed();
    return std::move(std::get<0>(held_));
  }
  /// The failure; only when `!ok()`.
  const Error& error() const { return std::get<1>(held_); }

 private:
  void throw_if_failed() const {
    if (!ok()) throw error();
  }

  std::variant<T, Error> held_;
};

/// Success, or an `Error`.
template <>
class [[nodiscard]] Result<void> {
 public:
  /// Success.
  Result() = default;
  /// Failure.
  Result(Error error) : held_(std::move(error)) {}

  /// Whether it succeeded.
  bool ok() const noexcept { return held_.index() == 0; }
  /// As ok().
  explicit operator bool() const noexcept { return ok(); }
  /// Nothing. @throws Error if it failed.
  void value() const {
    if (!ok()) throw error();
  }
  /// The failure; only when `!ok()`.
  const Error& error() const { return std::get<1>(held_); }

 private:
  std::variant<std::monostate, Error> held_;
};

/// @cond internal
namespace detail {

inline std::string text_or_empty(const char* text) { return text == nullptr ? "" : text; }

inline Error last_error(int code) {
  farandole_failure known{};
  known.struct_size = sizeof known;
  const std::string what = farandole_last_error();
  if (farandole_last_failure(&known) != FARANDOLE_OK) return {static_cast<Code>(code), what};
  Failure failure;
  failure.ranks.assign(known.ranks, known.ranks + known.rank_count);
  failure.kind = static_cast<farandole_failure_kind>(known.kind);
  failure.number = known.number;
  failure.pid = known.pid;
  failure.last_age_s = known.last_age_s;
  failure.cause = text_or_empty(known.cause);
  failure.tensor = text_or_empty(known.tensor);
  failure.host = text_or_empty(known.host);
  failure.last = text_or_empty(known.last);
  return {static_cast<Code>(code), what, std::move(failure)};
}

inline Result<void> check(int code) {
  if (code == FARANDOLE_OK) return {};
  return last_error(code);
}

}  // namespace detail
/// @endcond

}  // namespace farandole
