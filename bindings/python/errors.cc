#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;
namespace {

const char* ExceptionName(int code) {
  switch (code) {
    case FARANDOLE_MISMATCH:
      return "MismatchError";
    case FARANDOLE_TIMEOUT:
      return "OperationTimeoutError";
    case FARANDOLE_UNAVAILABLE:
      return "PeerLostError";
    case FARANDOLE_ABORTED:
      return "AbortedError";
    default:
      return "HorovodInternalError";
  }
}

[[noreturn]] void Throw(const char* class_name, const char* text) {
  const py::object type = py::module_::import("farandole.exceptions").attr(class_name);
  PyErr_SetString(type.ptr(), text);
  throw py::error_already_set();
}

}  // namespace

void Check(int code) {
  if (code == FARANDOLE_OK) return;
  const char* text = farandole_last_error();
  if (code == FARANDOLE_INVALID_ARGUMENT) {
    PyErr_SetString(PyExc_ValueError, text);
    throw py::error_already_set();
  }
  Throw(ExceptionName(code), text);
}

void ThrowInternal(const char* text) { Throw("HorovodInternalError", text); }

}  // namespace farandole::python
