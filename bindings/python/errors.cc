#include "bindings/python/errors.h"

#include <cstring>

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

[[noreturn]] void Throw(py::handle type, const char* text) {
  PyErr_SetObject(type.ptr(), ToText(text).ptr());
  throw py::error_already_set();
}

[[noreturn]] void Throw(const char* class_name, const char* text) {
  Throw(py::module_::import("farandole.exceptions").attr(class_name), text);
}

}  // namespace

py::str ToText(const char* text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

OptionalText::OptionalText(const py::object& text) : given_(!text.is_none()) {
  if (!given_) return;
  if (!PyUnicode_Check(text.ptr())) throw py::type_error("expected a str or None");
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!bytes) throw py::error_already_set();
  text_ = bytes;
}

void Check(int code) {
  if (code != FARANDOLE_OK) Check(code, farandole_last_error());
}

void Check(int code, const char* text) {
  if (code == FARANDOLE_OK) return;
  if (code == FARANDOLE_INVALID_ARGUMENT) {
    Throw(PyExc_ValueError, text);
  }
  Throw(ExceptionName(code), text);
}

void ThrowInternal(const char* text) { Throw("HorovodInternalError", text); }

}  // namespace farandole::python
