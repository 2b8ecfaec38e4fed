// How a failure of the C ABI becomes a Python exception, how a wait stays interruptible, and texts.
//
// Everything here needs the GIL unless said otherwise.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "bindings/c/farandole.h"

namespace farandole::python {

/// Does nothing for FARANDOLE_OK. Otherwise throws the exception of farandole.exceptions that
/// stands for `code` (ValueError for FARANDOLE_INVALID_ARGUMENT), with this thread's last error as
/// text and what farandole_last_failure knows as attributes.
void Check(int code);
/// Throws the exception that stands for `code`, an error, with a text of the caller's.
[[noreturn]] void ThrowAs(int code, const char* text);

/// Text of the library as a Python string. It may hold names in any encoding, or be cut within a
/// character: such bytes become U+FFFD.
pybind11::str ToText(const char* text);

/// Throws farandole.HorovodInternalError(text).
[[noreturn]] void ThrowInternal(const char* text);

/// What is said of a handle whose context is closed.
inline constexpr const char* kClosed =
    "this Farandole context has been shut down, or belongs to the parent of a forked process";

/// Of a C function of Python's: null with Python's exception for what `call` throws.
template <class Call>
PyObject* Guarded(const Call& call) {
  try {
    return call().release().ptr();
  } catch (abi::__forced_unwind&) {  // the interpreter ends, and with it this thread
    throw;
  } catch (const pybind11::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
    return nullptr;
  } catch (...) {
    pybind11::detail::try_translate_exceptions();
    return nullptr;
  }
}

/// Keeps a Python string's UTF-8 text alive; null for None. Lone surrogates, which UTF-8 does not
/// have and error texts about files may hold, become question marks.
class OptionalText {
 public:
  explicit OptionalText(pybind11::handle text);
  const char* c_str() const { return given_ ? text_.c_str() : nullptr; }

 private:
  bool given_;
  std::string text_;
};

/// Counts a wait in flight, so that Close in another thread leaves the handle alone.
class WaitGuard {
 public:
  explicit WaitGuard(int& waiting) : waiting_(waiting) { ++waiting_; }
  ~WaitGuard() { --waiting_; }
  WaitGuard(const WaitGuard&) = delete;
  WaitGuard& operator=(const WaitGuard&) = delete;

 private:
  int& waiting_;
};

/// How long a call stays in C++ before it looks for signals.
inline constexpr double kSliceSeconds = 0.05;
/// The first time, after which the program's threads are counted.
inline constexpr double kFirstSliceSeconds = 0.02;

/// Of the program: those that the interpreter waits for at its end, and those of the backend of
/// torch.distributed; and one for compiled programs that may run. Helpers: other daemons, which may
/// start operations but mostly are libraries'.
struct ThreadCount {
  int program = 1;
  int helpers = 0;
};
/// With the GIL.
ThreadCount CountThreads();

/// Reports of stalls say where this process's threads are
/// (farandole/_activity.py). Again in a forked child.
void DescribeThreads();
/// No call is in flight afterwards, which in a finalizing interpreter would not return.
void StopDescribingThreads();

/// While it exists, a wait without a limit is made in slices.
class SlicesGuard {
 public:
  explicit SlicesGuard(bool is_unlimited) : is_unlimited_(is_unlimited) {}
  ~SlicesGuard() {
    if (is_counted_) farandole_wait_in_slices(0, 0);
  }
  SlicesGuard(const SlicesGuard&) = delete;
  SlicesGuard& operator=(const SlicesGuard&) = delete;
  /// After a slice, with the GIL.
  void Next() {
    if (is_unlimited_) {
      const ThreadCount count = CountThreads();
      farandole_wait_in_slices(count.program, count.helpers);
    }
    is_counted_ = is_unlimited_;
  }

 private:
  const bool is_unlimited_;
  bool is_counted_ = false;
};

/// Calls `wait(slice_s)` without the GIL until it answers something else than FARANDOLE_PENDING or
/// `timeout_s` has passed (<0: no limit). Between slices of 50 ms it looks for signals, so Ctrl-C
/// ends the wait with KeyboardInterrupt; what was waited for goes on.
template <class Wait>
int WaitInSlices(double timeout_s, Wait wait) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double left_s = timeout_s;
  SlicesGuard slices(timeout_s < 0);
  for (double most_s = kFirstSliceSeconds;; most_s = kSliceSeconds) {
    const double slice_s = timeout_s < 0 ? most_s : std::clamp(left_s, 0.0, most_s);
    int code = FARANDOLE_OK;
    {
      pybind11::gil_scoped_release release;
      code = wait(slice_s);
    }
    if (code != FARANDOLE_PENDING) return code;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    slices.Next();
    left_s = timeout_s - std::chrono::duration<double>(Clock::now() - start).count();
    if (timeout_s >= 0 && left_s <= 0) return code;
  }
}

}  // namespace farandole::python
