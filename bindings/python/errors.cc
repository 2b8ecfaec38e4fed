#include "bindings/python/errors.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <utility>

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
    case FARANDOLE_GENERATION_ENDED:
      return "GenerationEndedError";
    case FARANDOLE_HALTED:
      return "JobHaltedError";
    default:
      return "HorovodInternalError";
  }
}

[[noreturn]] void Throw(py::handle type, const char* text) {
  PyErr_SetObject(type.ptr(), ToText(text).ptr());
  throw py::error_already_set();
}

py::object ClassOf(const char* name) {
  return py::module_::import("farandole.exceptions").attr(name);
}

py::object TextOrNone(const char* text) {
  return text == nullptr ? py::object(py::none()) : py::object(ToText(text));
}

py::object NumberOrNone(bool is_known, int32_t number) {
  return is_known ? py::object(py::int_(number)) : py::object(py::none());
}

/// As HorovodInternalError.kind; by farandole_failure_kind.
py::object KindName(int32_t kind) {
  static constexpr std::array kNames = {
      "error",  "killed",    "exited",   "out of memory",     "stopped",
      "frozen", "link down", "diverged", "blocked in python", "blocked in c"};
  const bool is_known = kind > 0 && kind <= static_cast<int32_t>(kNames.size());
  return TextOrNone(is_known ? kNames[static_cast<size_t>(kind) - 1] : nullptr);
}

/// What is known of the rank that failed first; see exceptions.py.
py::dict FactsOf(const farandole_failure& failure) {
  const bool is_exit = failure.kind == FARANDOLE_FAILURE_EXITED;
  py::tuple ranks(static_cast<size_t>(failure.rank_count));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = failure.ranks[i];
  py::dict facts;
  facts["failed_ranks"] = ranks;
  facts["cause"] = TextOrNone(failure.cause);
  facts["tensor"] = TextOrNone(failure.tensor);
  facts["kind"] = KindName(failure.kind);
  facts["exit_code"] = NumberOrNone(is_exit, failure.number);
  facts["signal"] = NumberOrNone(!is_exit && failure.number >= 0, failure.number);
  facts["host"] = TextOrNone(failure.host);
  facts["pid"] = NumberOrNone(failure.pid > 0, failure.pid);
  facts["last"] = TextOrNone(failure.last);
  facts["last_age_s"] =
      failure.last_age_s < 0 ? py::object(py::none()) : py::object(py::float_(failure.last_age_s));
  return facts;
}

/// This thread's last failure, with what is known of it. All is read before any Python runs, which
/// may call the library.
[[noreturn]] void ThrowLast(const char* class_name) {
  farandole_failure failure{};
  failure.struct_size = sizeof failure;
  farandole_last_failure(&failure);
  const py::str text = ToText(farandole_last_error());
  const py::dict facts = FactsOf(failure);
  const py::object type = ClassOf(class_name);
  const py::object error = type(text);
  for (const auto& [name, value] : facts) py::setattr(error, name, value);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

/// A farandole_describe, on a thread that Python does not know. What goes wrong leaves the text
/// empty: there is nobody to tell.
void WritePlaces(const uint64_t* threads, size_t count, char* text, size_t capacity) {
  const py::gil_scoped_acquire acquire;
  try {
    py::list idents;
    for (size_t i = 0; i < count; ++i) idents.append(threads[i]);
    const auto places = py::module_::import("farandole._activity").attr("describe")(idents);
    places.cast<std::string>().copy(text, capacity - 1);
  } catch (const std::exception&) {
    text[0] = 0;
  }
}

}  // namespace

void DescribeThreads() { farandole_describe_with(&WritePlaces); }

void StopDescribingThreads() {
  py::gil_scoped_release release;  // a call in flight needs it
  farandole_describe_with(nullptr);
}

py::str ToText(const char* text) {
  PyObject* const decoded =
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
  if (decoded == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(decoded);
}

OptionalText::OptionalText(py::handle text) : given_(!text.is_none()) {
  if (!given_) return;
  if (!PyUnicode_Check(text.ptr())) throw py::type_error("expected a str or None");
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!bytes) throw py::error_already_set();
  text_ = bytes;
}

void Check(int code) {
  if (code == FARANDOLE_OK) return;
  if (code == FARANDOLE_INVALID_ARGUMENT) Throw(PyExc_ValueError, farandole_last_error());
  ThrowLast(ExceptionName(code));
}

void ThrowAs(int code, const char* text) {
  if (code == FARANDOLE_INVALID_ARGUMENT) Throw(PyExc_ValueError, text);
  Throw(ClassOf(ExceptionName(code)), text);
}

void ThrowInternal(const char* text) { ThrowAs(FARANDOLE_INTERNAL, text); }

ThreadCount CountThreads() {
  try {
    const auto [program, helpers] = py::module_::import("farandole._activity")
                                        .attr("count_threads")()
                                        .cast<std::pair<int, int>>();
    return {program, helpers};
  } catch (py::error_already_set&) {  // the interpreter ends: nobody knows
    return {INT_MAX, 0};
  }
}

}  // namespace farandole::python
