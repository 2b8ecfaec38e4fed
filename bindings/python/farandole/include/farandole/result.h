/// @file
/// How a call of the C++ API ends: with a value, or with an `Error` that says what went wrong.
///
/// Each operation comes twice: `x()` throws `Error`, `try_x()` returns a `Result`. Names of this
/// API are snake_case, as in Farandole's Python API and in libtorch, so that one vocabulary
/// serves all three.
#pragma once

#include <farandole/farandole.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

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
  internal = FARANDOLE_INTERNAL  ///< A defect; final.
};

/// A failure: `what()` is one error message that names tensor, rank, value and what was expected.
///
/// Thread safety: as std::runtime_error.
class Error : public std::runtime_error {
 public:
  /// `what` is one error message.
  Error(Code code, const std::string& what) : std::runtime_error(what), code_(code) {}
  /// The kind of failure.
  Code code() const noexcept { return code_; }

 private:
  Code code_;
};

/// A `T`, or the `Error` that took its place.
///
/// Example: `if (auto sum = context.try_allreduce(data); !sum) log(sum.error().what());`
/// In a condition it is whether there is a value, also where the value is a bool or a number.
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

inline Error last_error(int code) { return {static_cast<Code>(code), farandole_last_error()}; }

inline Result<void> check(int code) {
  if (code == FARANDOLE_OK) return {};
  return last_error(code);
}

}  // namespace detail
/// @endcond

}  // namespace farandole
