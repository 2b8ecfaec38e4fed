// farandole._core: the C ABI as Python classes, which read arrays and hold what they borrow. Its
// names are private; the package farandole gives them meaning (the types are described in
// farandole/_core.pyi).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "bindings/python/arrays.h"
#include "bindings/python/context.h"
#include "bindings/python/errors.h"
#include "bindings/python/gradients.h"
#include "bindings/python/work.h"

namespace py = pybind11;
using farandole::python::Array;
using farandole::python::Context;
using farandole::python::Gradients;
using farandole::python::GradientSlot;
using farandole::python::Guarded;
using farandole::python::Options;
using farandole::python::ResultMemory;
using farandole::python::Submission;
using farandole::python::TorchFunctions;

namespace {

constexpr size_t kRowBytes = 512;

uint64_t SumOfRow(const std::byte* row) {
  uint64_t sum = 0;
  for (size_t i = 0; i < kRowBytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, row + i, sizeof(word));  // the row lies anywhere
    sum += word;
  }
  return sum;
}

/// A number that changes with any one bit of the memory, in about 30 us per megabyte: the sum of
/// words of 64 bits of each row, times an odd number of the row, as a product with an odd number
/// changes with each bit of its other factor. The multiplier is Knuth's, from the golden ratio.
int64_t Digest(const void* data, size_t size_bytes) {
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15;
  const auto* from = static_cast<const std::byte*>(data);
  uint64_t digest = 0;
  uint64_t row = 1;
  for (; size_bytes >= kRowBytes; size_bytes -= kRowBytes, from += kRowBytes, ++row)
    digest += SumOfRow(from) * ((row * kMultiplier) | 1U);
  std::array<std::byte, kRowBytes> rest{};
  if (size_bytes > 0) std::memcpy(rest.data(), from, size_bytes);
  return static_cast<int64_t>(digest + SumOfRow(rest.data()) * ((row * kMultiplier) | 1U));
}

/// Of each array.
/// @throw ValueError: one does not lie in host memory, in C order.
std::vector<int64_t> Digests(const py::list& arrays) {
  std::vector<std::pair<const void*, size_t>> memory;
  memory.reserve(arrays.size());
  std::vector<Array> read;  // keeps the memory
  for (const py::handle array : arrays) {
    std::optional<Array> found = farandole::python::Read(array);
    if (!found || found->is_cuda() || !found->is_contiguous)
      throw py::value_error("digests: array " + std::to_string(memory.size()) +
                            " does not lie in host memory, in C order");
    size_t bits = size_t{found->dtype.bits} * found->dtype.lanes;
    for (int32_t i = 0; i < found->ndim; ++i) bits *= static_cast<size_t>(found->shape[i]);
    memory.emplace_back(found->data, bits / 8);
    read.push_back(std::move(*found));
  }
  std::vector<int64_t> digests(memory.size());
  const py::gil_scoped_release released;
  std::ranges::transform(memory, digests.begin(),
                         [](const auto& one) { return Digest(one.first, one.second); });
  return digests;
}

farandole_params ToParams(int kind, int op, double prescale, double postscale, int root, int wire,
                          uint32_t set, int device = FARANDOLE_CPU) {
  return {sizeof(farandole_params),
          kind,
          op,
          prescale,
          postscale,
          root,
          wire,
          set,
          0,
          device,
          0,
          nullptr,
          nullptr};
}

/// How many rows go to each rank, as users give them: an array of integers, or what NumPy makes one
/// of. The C ABI is not told how many numbers params.splits has.
/// @throw ValueError, in Horovod's words.
std::optional<std::vector<int64_t>> ToSplits(py::handle splits, const Options& options,
                                             size_t tensors, const Context& context) {
  if (splits.is_none()) return std::nullopt;
  const std::string function = options.FunctionName();
  const auto numbers = py::array::ensure(splits);  // null for lists of unequal lengths
  const std::string kind(1, numbers ? numbers.dtype().kind() : 'O');
  if (std::string("OSU").find(kind) != std::string::npos)
    throw py::value_error(function +
                          " expects splits as a sequence or an array of integers, one per rank; "
                          "got " +
                          std::string(py::repr(splits)).substr(0, 80));
  if (numbers.ndim() != 1)
    throw py::value_error(function +
                          " expects a 1D splits tensor, one number per rank; got shape " +
                          std::string(py::str(numbers.attr("shape"))));
  if (numbers.size() > 0 && kind != "i" && kind != "u")
    throw py::value_error(function + " expects splits to contain integers, not " +
                          std::string(py::str(numbers.dtype())));
  const auto ranks = static_cast<size_t>(context.InfoOf(options.params.set).size);
  if (static_cast<size_t>(numbers.size()) != tensors * ranks)
    throw py::value_error(function +
                          ": Number of entries in splits does not equal number of workers; splits: "
                          "expected " +
                          std::to_string(tensors * ranks) + " numbers, got " +
                          std::to_string(numbers.size()));
  const py::array_t<int64_t, py::array::c_style | py::array::forcecast> values(numbers);
  return std::vector<int64_t>(values.data(), values.data() + values.size());
}

enum How { kGroup = 1, kInPlace = 2, kBlocks = 4, kInternal = 8, kRaw = 16 };

// What is called for each tensor is made of CPython's own descriptors, as pybind11's take 0.1 us a
// call and more with each argument.

/// Of a pybind11 object, whose type a descriptor has checked.
template <class T>
T& SelfOf(PyObject* self) {
  const auto held = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  if (!held.holder_constructed()) throw py::type_error("__init__ was not called");
  return *held.value_ptr<T>();
}

template <class T>
bool IsA(PyObject* object) {
  static PyObject* const type = py::type::of<T>().release().ptr();
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type)) != 0;
}

/// The arguments of Context.submit by position or by name, borrowed; None for what is left out.
using SubmitArguments = std::array<py::handle, 10>;
SubmitArguments ReadArguments(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  static constexpr std::array<const char*, 10> kNames = {
      "options", "tensors", "name", "how", "finish", "labels", "failed", "splits", "out", "rows"};
  SubmitArguments read;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count > std::ssize(kNames)) throw py::type_error("submit: more than 10 arguments");
  for (Py_ssize_t i = 0; i < count + named; ++i) {
    auto at = static_cast<size_t>(i);
    if (i >= count) {
      PyObject* const name = PyTuple_GET_ITEM(names, i - count);
      const auto is_name = [name](const char* known) {
        return PyUnicode_CompareWithASCIIString(name, known) == 0;
      };
      at = static_cast<size_t>(std::ranges::find_if(kNames, is_name) - kNames.begin());
      if (at == kNames.size() || read[at])
        throw py::type_error("submit: argument " + std::string(py::repr(name)));
    }
    read[at] = args[i];
  }
  if (!read[0] || !read[1] || !read[2])
    throw py::type_error("submit: options, tensors or name is missing");
  for (py::handle& one : read)
    if (!one) one = Py_None;
  return read;
}

PyObject* Submit(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return Guarded([&] {
    const auto [given, tensors, name, flags, finish, labels, failed, splits, out, expected] =
        ReadArguments(args, count, names);
    if (!IsA<Options>(given.ptr()))
      throw py::type_error("submit: options must be Options, not " + std::string(py::repr(given)));
    const Options& options = SelfOf<Options>(given.ptr());
    const int how = flags.is_none() ? 0 : flags.cast<int>();
    const bool is_group = (how & kGroup) != 0;
    auto& context = SelfOf<Context>(self);
    const size_t many = is_group ? py::len(tensors) : 1;
    std::vector<int64_t> rows;
    if (!expected.is_none()) rows = expected.cast<std::vector<int64_t>>();
    if (!rows.empty()) {
      const auto ranks = static_cast<size_t>(context.InfoOf(options.params.set).size);
      if (rows.size() != many * ranks)
        throw py::value_error("rows has " + std::to_string(rows.size()) + " numbers; expected " +
                              std::to_string(many * ranks));
    }
    return context.Submit({options, tensors, name, is_group, (how & kInPlace) != 0,
                           (how & kBlocks) != 0, (how & kInternal) != 0, (how & kRaw) != 0, finish,
                           labels, failed, ToSplits(splits, options, many, context), out,
                           std::move(rows)});
  });
}

/// An allreduce of one tensor in the context of the thread. What most calls ask for, over all ranks
/// and without factors, runs no Python. Refers to the variables of Python's modules, which it reads
/// at each call.
class Allreduce {
 public:
  /// See _core.pyi. Lives as long as the process.
  static py::object Make(int how, py::object of_thread, py::object process, py::object current,
                         py::object global_set, py::object options) {
    auto* const made = new Allreduce{how,
                                     std::move(of_thread),
                                     std::move(process),
                                     std::move(current),
                                     std::move(global_set),
                                     std::move(options)};
    static PyMethodDef method = {"allreduce",
                                 reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call)),
                                 METH_FASTCALL, nullptr};
    const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(made, nullptr, nullptr));
    if (!self) throw py::error_already_set();
    auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
    if (!function) throw py::error_already_set();
    return function;
  }

 private:
  Allreduce(int how, py::object of_thread, py::object process, py::object current,
            py::object global_set, py::object options)
      : how_(how),
        of_thread_(std::move(of_thread)),
        process_(std::move(process)),
        current_(std::move(current)),
        global_set_(std::move(global_set)),
        options_(std::move(options)) {}

  /// (tensor, name, op, prescale_factor, postscale_factor, process_set)
  static PyObject* Call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    return Guarded([&] {
      auto& call = *static_cast<Allreduce*>(PyCapsule_GetPointer(self, nullptr));
      if (count != 6) throw py::type_error("allreduce: expected 6 arguments");
      return call.Submit(*reinterpret_cast<PyObject* const(*)[6]>(args));
    });
  }

  py::object Submit(PyObject* const (&args)[6]) {
    const auto& [tensor, name, op, prescale, postscale, set] = args;
    const py::object options = OptionsFor(op, prescale, postscale, set);
    const py::object core = Core();
    return SelfOf<Context>(core.ptr())
        .Submit({SelfOf<Options>(options.ptr()), tensor, name, false, (how_ & kInPlace) != 0,
                 (how_ & kBlocks) != 0, false, false, Py_None, Py_None, Py_None});
  }

  static bool IsOne(PyObject* factor) {
    return PyFloat_CheckExact(factor) && PyFloat_AS_DOUBLE(factor) == 1.0;
  }

  /// Those of plain calls with None or a small number are kept.
  py::object OptionsFor(PyObject* op, PyObject* prescale, PyObject* postscale, PyObject* set) {
    const bool is_plain = set == global_set_.ptr() && IsOne(prescale) && IsOne(postscale);
    py::object* const kept = is_plain ? PlaceOf(op) : nullptr;
    if (kept != nullptr && *kept) return *kept;
    py::object made =
        options_(py::handle(op), py::handle(prescale), py::handle(postscale), py::handle(set));
    if (!IsA<Options>(made.ptr())) throw py::type_error("allreduce: expected Options");
    if (kept != nullptr) *kept = made;
    return made;
  }

  /// nullptr: it has none.
  py::object* PlaceOf(PyObject* op) {
    if (op == Py_None) return by_op_.data();
    int overflow = 0;
    const long number = PyLong_CheckExact(op) ? PyLong_AsLongAndOverflow(op, &overflow) : -1;
    const bool is_known = number >= 0 && number < std::ssize(by_op_) - 1;
    return is_known ? &by_op_[static_cast<size_t>(number) + 1] : nullptr;
  }

  /// basics.current().core, without a call where there is one.
  py::object Core() const {
    static PyObject* const default_name = PyUnicode_InternFromString("default");
    PyObject* of_thread = nullptr;
    if (PyContextVar_Get(of_thread_.ptr(), nullptr, &of_thread) != 0) throw py::error_already_set();
    auto context = py::reinterpret_steal<py::object>(of_thread);
    if (!context || context.is_none())
      context = py::reinterpret_steal<py::object>(PyObject_GetAttr(process_.ptr(), default_name));
    if (!context) throw py::error_already_set();
    py::object core = CoreOf(context);
    if (!core || !SelfOf<Context>(core.ptr()).is_open()) core = CoreOf(current_());
    if (!core) throw py::type_error("allreduce: expected a Context");
    return core;
  }

  /// Null where there is none that has joined.
  static py::object CoreOf(const py::object& context) {
    static PyObject* const core_name = PyUnicode_InternFromString("core");
    if (context.is_none()) return {};
    auto core = py::reinterpret_steal<py::object>(PyObject_GetAttr(context.ptr(), core_name));
    if (!core) throw py::error_already_set();
    return IsA<Context>(core.ptr()) ? core : py::object();
  }

  const int how_;
  const py::object of_thread_, process_, current_, global_set_, options_;
  std::array<py::object, 7> by_op_;  // of op None, 0, 1, ...
};

PyObject* IsOpen(PyObject* self, void* /*unused*/) {
  return Guarded([&] { return py::bool_(SelfOf<Context>(self).is_open()); });
}

PyMethodDef submit_method = {"submit",
                             reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Submit)),
                             METH_FASTCALL | METH_KEYWORDS, nullptr};
PyGetSetDef is_open_property = {"is_open", &IsOpen, nullptr, nullptr, nullptr};

template <class Definition>
void AddDescriptor(const py::object& type, const char* name,
                   PyObject* (*make)(PyTypeObject*, Definition*), Definition& definition) {
  PyObject* const made = make(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition);
  if (made == nullptr) throw py::error_already_set();
  type.attr(name) = py::reinterpret_steal<py::object>(made);
}

std::shared_ptr<Gradients> MakeGradients(
    const std::shared_ptr<Context>& context, const Options& options, const py::object& owner,
    const std::vector<std::pair<py::object, py::object>>& named,
    const std::vector<std::string>& labels, const py::tuple& torch, int64_t group_bytes,
    bool overlaps, bool is_average) {
  return std::make_shared<Gradients>(
      context, options, owner, named, labels,
      TorchFunctions{torch[0], torch[1], torch[2], torch[3].cast<int64_t>()},
      Gradients::Settings{group_bytes, overlaps, is_average});
}

void BindContext(py::module_& m) {
  py::class_<Options>(m, "Options")
      .def(py::init([](int kind, int op, double prescale, double postscale, int root, int wire,
                       uint32_t set, std::string function) {
             return Options{ToParams(kind, op, prescale, postscale, root, wire, set),
                            std::move(function)};
           }),
           py::arg("kind"), py::arg("op") = static_cast<int>(FARANDOLE_SUM),
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = -1,
           py::arg("wire") = static_cast<int>(FARANDOLE_WIRE_SAME), py::arg("set") = 0,
           py::arg("function") = "")
      .def(
          "of_set",
          [](Options self, uint32_t set) {
            self.params.set = set;
            return self;
          },
          py::arg("set"))
      .def_property_readonly("function", &Options::FunctionName)
      .def_property_readonly("kind", [](const Options& self) { return self.params.kind; })
      .def_property_readonly("op", [](const Options& self) { return self.params.op; })
      .def_property_readonly("prescale", [](const Options& self) { return self.params.prescale; })
      .def_property_readonly("postscale", [](const Options& self) { return self.params.postscale; })
      .def_property_readonly("wire", [](const Options& self) { return self.params.wire; })
      .def_property_readonly("root", [](const Options& self) { return self.params.root; })
      .def_property_readonly("set", [](const Options& self) { return self.params.set; });
  py::class_<Context, std::shared_ptr<Context>>(m, "Context")
      .def_static(
          "init",
          [](std::optional<int> rank, std::optional<int> size, std::optional<int> local_rank,
             std::optional<std::string> address, py::object store, bool apart, double timeout_s,
             bool in_order, int slots, bool elastic, std::optional<std::string> members) {
            return Context::Init({rank, size, local_rank, std::move(address), std::move(store),
                                  apart, timeout_s, in_order, slots, elastic, std::move(members)});
          },
          py::arg("rank") = py::none(), py::arg("size") = py::none(),
          py::arg("local_rank") = py::none(), py::arg("address") = py::none(),
          py::arg("store") = py::none(), py::arg("apart") = false, py::arg("timeout_s") = 0.0,
          py::arg("in_order") = false, py::arg("slots") = 0, py::arg("elastic") = false,
          py::arg("members") = py::none())
      .def("reinit", &Context::Reinit)
      .def("generation", &Context::GenerationNumber)
      .def("change_is_due", &Context::IsChangeDue)
      .def("members", &Context::Members, py::arg("rank") = -1)
      .def_static("in_process", &Context::InProcess, py::arg("size"))
      .def_static("forget_all", &Context::ForgetAll)
      .def_property_readonly("is_closed", &Context::is_closed)
      // Of the C ABI, for libraries beside this one.
      .def_property_readonly(
          "address", [](const Context& self) { return reinterpret_cast<uintptr_t>(self.get()); })
      .def("close", &Context::Close)
      .def(
          "close_within", [](Context& self, double limit_s) { return self.CloseWithin(limit_s); },
          py::arg("limit_s"))
      .def("close_at_exit", &Context::CloseAtExit, py::arg("limit_s"),
           py::arg("reason") = static_cast<int>(FARANDOLE_EXIT_BY_OTHER), py::arg("cause") = "")
      .def("raise_if_ended", &Context::RaiseIfEnded)
      .def("end_step", [](const Context& context) { farandole_end_step(context.get()); })
      .def("topology", &Context::Topology)
      .def("slot_range", &Context::SlotRange)
      .def("counters", &Context::Counters)
      .def("setting", &Context::Setting, py::arg("name"))
      .def("settings", &Context::Settings)
      .def("start_timeline", &Context::StartTimeline, py::arg("path"), py::arg("mark_cycles"))
      .def("stop_timeline", &Context::StopTimeline)
      .def("set_timeout", &Context::SetTimeout, py::arg("timeout_s"))
      .def("join", &Context::Join)
      .def("add_set", &Context::AddSet, py::arg("ranks"))
      .def("remove_set", &Context::RemoveSet, py::arg("uid"))
      .def(
          "rank_and_size",
          [](const Context& self, uint32_t uid) {
            const Context::SetInfo set = self.InfoOf(uid);
            return std::pair(set.rank, set.size);
          },
          py::arg("uid"))
      .def("allocate", &Context::Allocate, py::arg("bytes"))
      .def("release_completed", &Context::ReleaseCompleted)
      .def_property_readonly("in_flight", &Context::in_flight)
      .def("take_unseen_failures", &Context::TakeUnseenFailures)
      .def("find_interrupted", &Context::FindInterrupted, py::arg("name"))
      .def("is_in_flight", &Context::IsInFlight, py::arg("name"))
      .def("gradients", &MakeGradients, py::arg("options"), py::arg("owner"), py::arg("named"),
           py::arg("labels"), py::arg("torch"), py::arg("group_bytes"), py::arg("overlaps"),
           py::arg("is_average"));
  m.def("allreduce", &Allreduce::Make, py::arg("how"), py::arg("of_thread"), py::arg("process"),
        py::arg("current"), py::arg("global_set"), py::arg("options"));
  AddDescriptor(m.attr("Context"), "submit", PyDescr_NewMethod, submit_method);
  AddDescriptor(m.attr("Context"), "is_open", PyDescr_NewGetSet, is_open_property);
}

void BindWork(py::module_& m) {
  m.attr("Work") = farandole::python::WorkType();
  py::class_<ResultMemory, std::shared_ptr<ResultMemory>>(m, "ResultMemory", py::buffer_protocol())
      .def_buffer([](const ResultMemory& self) {
        return py::buffer_info(static_cast<uint8_t*>(self.data()), self.size_bytes());
      })
      .def("__dlpack__", [](const std::shared_ptr<ResultMemory>& self,
                            const py::kwargs&) { return ResultMemory::ToDlpack(self); })
      .def("__dlpack_device__", &ResultMemory::DlpackDevice)
      .def_property_readonly("address", &ResultMemory::address)
      .def_property_readonly("nbytes", &ResultMemory::size_bytes);
  m.def(
      "describe",
      [](const py::object& object) -> py::object {
        const std::optional<Array> array = farandole::python::Read(object);
        if (!array) return py::none();
        py::tuple shape(static_cast<size_t>(array->ndim));
        for (size_t i = 0; i < shape.size(); ++i) shape[i] = array->shape[i];
        const int device = array->is_cuda() ? array->device.device_id : -1;
        return py::make_tuple(reinterpret_cast<uintptr_t>(array->data),
                              farandole::python::NameOf(array->dtype), shape, array->is_contiguous,
                              device, array->is_writable);
      },
      py::arg("array"));
  m.def("digests", &Digests, py::arg("arrays"));
  m.def("use_library", &farandole::python::UseLibrary, py::arg("type"), py::arg("library"));
}

template <py::object GradientSlot::*kField>
py::object GetField(const GradientSlot& slot) {
  return slot.*kField ? slot.*kField : py::object(py::none());
}

/// None stands for null.
template <py::object GradientSlot::*kField>
void SetField(GradientSlot& slot, const py::object& value) {
  slot.*kField = value.is_none() ? py::object() : value;
}

template <py::object GradientSlot::*kField>
void BindField(py::class_<GradientSlot, std::shared_ptr<GradientSlot>>& type, const char* name) {
  type.def_property(name, &GetField<kField>, &SetField<kField>);
}

void BindGradientSlot(py::module_& m) {
  py::class_<GradientSlot, std::shared_ptr<GradientSlot>> slot(m, "GradientSlot");
  slot.def_readonly("name", &GradientSlot::name)
      .def_readonly("parameter", &GradientSlot::parameter)
      .def_readwrite("is_present", &GradientSlot::is_present)
      .def_readwrite("was_sparse", &GradientSlot::was_sparse)
      .def_readwrite("is_channels_last", &GradientSlot::is_channels_last)
      .def("gradient_dtype", &GradientSlot::GradientDtype)
      .def_property_readonly("shape", &GradientSlot::Shape)
      .def("holds_reduced",
           [](const GradientSlot& self) { return self.HoldsReduced(self.gradient()); })
      .def("note_reduced", [](GradientSlot& self) { self.NoteReduced(false); })
      .def("was_reduced", [](const GradientSlot& self) { return static_cast<bool>(self.reduced); })
      .def("has_changed", &GradientSlot::HasChanged)
      .def("forget_reduced", [](GradientSlot& self) { self.reduced = py::object(); });
  BindField<&GradientSlot::codec>(slot, "codec");
  BindField<&GradientSlot::dtype>(slot, "dtype");
  BindField<&GradientSlot::last_dtype>(slot, "last_dtype");
  BindField<&GradientSlot::sent>(slot, "sent");
  BindField<&GradientSlot::sparse>(slot, "sparse");
}

bool IsConstructed(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  return instance->get_value_and_holder().holder_constructed();
}

/// Makes the garbage collector see what the slots refer to.
void Collect(PyHeapTypeObject* heap_type) {
  PyTypeObject& type = heap_type->ht_type;
  type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
    Py_VISIT(Py_TYPE(self));
#endif
    if (!IsConstructed(self)) return 0;
    return py::cast<const Gradients&>(py::handle(self)).Traverse(visit, arg);
  };
  type.tp_clear = [](PyObject* self) {
    if (IsConstructed(self)) py::cast<Gradients&>(py::handle(self)).Clear();
    return 0;
  };
}

void BindGradients(py::module_& m) {
  py::class_<Gradients::Description>(m, "GradientDescription")
      .def(py::init([](int32_t dtype, std::vector<int64_t> shape) {
             return Gradients::Description{dtype, std::move(shape)};
           }),
           py::arg("dtype"), py::arg("shape"));
  const auto status = [](auto field) {
    return [field](const Gradients& self) { return self.Status().*field; };
  };
  const auto is = [](auto field) {
    return [field](const Gradients& self) { return self.Status().*field != 0; };
  };
  py::class_<Gradients, std::shared_ptr<Gradients>>(m, "Gradients", py::custom_type_setup(&Collect))
      .def("__len__", [](const Gradients& self) { return self.slots().size(); })
      .def("__getitem__",
           [](const Gradients& self, size_t index) { return self.slots().at(index); })
      .def("__iter__", [](const Gradients& self) { return py::iter(py::cast(self.slots())); })
      .def("hook", &Gradients::Hook, py::arg("index"), py::arg("is_after"))
      .def("define", &Gradients::Define, py::arg("descriptions"), py::arg("like"))
      .def("add", &Gradients::Add, py::arg("named"), py::arg("describe"))
      .def("are_defined", &Gradients::AreDefined)
      .def("rebind", &Gradients::Rebind, py::arg("context"), py::arg("set"), py::arg("labels"))
      .def("count_pass", &Gradients::CountPass, py::arg("is_no_sync"))
      .def("set_passes", &Gradients::SetPasses, py::arg("passes"))
      .def("open", &Gradients::Open)
      .def("accumulated", &Gradients::Accumulated, py::arg("index"))
      .def(
          "own_memory",
          [](Gradients& self, GradientSlot& slot) { return self.OwnMemory(slot, slot.gradient()); },
          py::arg("slot"))
      .def("compare", &Gradients::Compare)
      .def("end", &Gradients::End, py::arg("is_left_to_user"))
      .def("fail", &Gradients::Fail, py::arg("why"))
      .def("note_failure", &Gradients::NoteFailure, py::arg("why"))
      .def("forget", &Gradients::Forget)
      .def("wait", &Gradients::Wait)
      .def("receive", &Gradients::Receive, py::arg("increment_versions"), py::arg("keeps_reduced"))
      .def("release_sparse", &Gradients::ReleaseSparse)
      .def("drop", &Gradients::Drop)
      .def("stepped", &Gradients::Stepped)
      .def("skipped", &Gradients::Skipped, py::arg("index"))
      .def("find_assigned", &Gradients::FindAssigned)
      .def("forget_reduced", &Gradients::ForgetReduced)
      .def("release_completed", &Gradients::ReleaseCompleted)
      .def("detach", &Gradients::Detach)
      .def_property_readonly("is_open", is(&farandole_round_status::is_open))
      .def_property_readonly("is_pending", is(&farandole_round_status::is_pending))
      .def_property_readonly("is_interrupted", is(&farandole_round_status::is_interrupted))
      .def_property_readonly("has_window", is(&farandole_round_status::has_window))
      .def_property_readonly("failure", [](const Gradients& self) { return self.Status().failure; })
      .def_property_readonly("is_complete", &Gradients::IsComplete)
      .def_property_readonly("kept", &Gradients::kept)
      .def_property_readonly("has_marked", is(&farandole_round_status::has_marked))
      .def_property_readonly("has_unreduced", is(&farandole_round_status::has_unreduced))
      .def_property_readonly("flag", is(&farandole_round_status::flag))
      .def_property_readonly("groups", status(&farandole_round_status::groups))
      .def_property_readonly("number", status(&farandole_round_status::number))
      .def_property_readonly("succeeded", status(&farandole_round_status::succeeded))
      .def_readwrite("is_running", &Gradients::is_running)
      .def_readwrite("task", &Gradients::task);
}

}  // namespace

/// The interpreter ends with 1 after an exception, and knows no other way.
void ExitWith(int code) {
  (void)on_exit(
      [](int, void* chosen) {
        std::fflush(nullptr);
        _exit(static_cast<int>(reinterpret_cast<intptr_t>(chosen)));
      },
      reinterpret_cast<void*>(static_cast<intptr_t>(code)));
}

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C ABI of Farandole; use the package farandole instead.";
  m.attr("version") = farandole_version();
  const py::tuple dtypes = farandole::python::DTypeNames();
  const py::tuple reducible = dtypes[py::slice(0, FARANDOLE_FLOAT64 + 1, 1)];
  m.attr("dtypes") = dtypes;
  m.attr("reducible_dtypes") = reducible;
  m.attr("reduced_dtypes") = reducible + py::make_tuple("complex64", "complex128");
  farandole::python::DescribeThreads();
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&farandole::python::StopDescribingThreads));
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&farandole::python::StopCallingBack));
  m.def("count_waiting_threads", &farandole_count_waiting_threads);
  m.def("note_input", [](int64_t ns) { farandole_note_time(FARANDOLE_TIME_INPUT, ns); });
  m.def("note_garbage_collection",
        [](int64_t ns) { farandole_note_time(FARANDOLE_TIME_GARBAGE_COLLECTION, ns); });
  m.def("exit_with", &ExitWith, py::arg("code"));
  BindContext(m);
  BindWork(m);
  BindGradientSlot(m);
  BindGradients(m);
}
