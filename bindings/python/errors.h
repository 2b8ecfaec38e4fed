// How a failure of the C ABI becomes a Python exception, and how a wait stays interruptible.
//
// Everything here needs the GIL unless said otherwise.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>

#include "bindings/c/farandole.h"

namespace farandole::python {

/// Does nothing for FARANDOLE_OK. Otherwise throws the exception of farandole.exceptions that
/// stands for `code` (ValueError for FARANDOLE_INVALID_ARGUMENT), with this thread's last error as
/// text.
void Check(int code);

/// Text of the library as a Python string. It may hold names in any encoding, or be cut within a
/// character: such bytes become U+FFFD.
pybind11::str ToText(const char* text);

/// Throws farandole.HorovodInternalError(text).
[[noreturn]] void ThrowInternal(const char* text);

/// How long a call stays in C++ before it looks for signals.
inline constexpr double kSliceSeconds = 0.05;

/// Calls `wait(slice_s)` without the GIL until it answers something else than FARANDOLE_PENDING or
/// `timeout_s` has passed (<0: no limit). Between slices of 50 ms it looks for signals, so Ctrl-C
/// ends the wait with KeyboardInterrupt; what was waited for goes on.
template <class Wait>
int WaitInSlices(double timeout_s, Wait wait) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double left_s = timeout_s;
  for (;;) {
    const double slice_s = timeout_s < 0 ? kSliceSeconds : std::clamp(left_s, 0.0, kSliceSeconds);
    int code = FARANDOLE_OK;
    {
      pybind11::gil_scoped_release release;
      code = wait(slice_s);
    }
    if (code != FARANDOLE_PENDING) return code;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    left_s = timeout_s - std::chrono::duration<double>(Clock::now() - start).count();
    if (timeout_s >= 0 && left_s <= 0) return code;
  }
}

}  // namespace farandole::python
