// farandole._core: the C ABI as Python classes, and nothing more. Its names are private; the
// package farandole gives them meaning (the types are described in farandole/_core.pyi).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/c/farandole.h"
#include "bindings/python/handles.h"

namespace py = pybind11;
using farandole::python::Context;
using farandole::python::Gradients;
using farandole::python::Operation;
using farandole::python::Result;
using farandole::python::TensorList;
using farandole::python::Work;

namespace {

/// The C ABI is not told how many numbers params.splits has.
void CheckSplits(const std::optional<std::vector<int64_t>>& splits, int32_t tensors,
                 const Context& context) {
  if (!splits) return;
  const auto ranks = context.Topology()[1].cast<size_t>();
  const size_t expected = static_cast<size_t>(tensors) * ranks;
  if (splits->size() == expected) return;
  throw py::value_error("splits: expected " + std::to_string(expected) + " numbers, got " +
                        std::to_string(splits->size()));
}

std::shared_ptr<Operation> Prepare(const std::shared_ptr<Context>& context,
                                   const std::optional<std::string>& name,
                                   const py::sequence& tensors, int kind, int op, double prescale,
                                   double postscale, int root, int wire, uint32_t set, int device,
                                   const std::optional<std::vector<int64_t>>& splits,
                                   const std::optional<std::string>& function) {
  const TensorList list(tensors);
  CheckSplits(splits, list.count(), *context);
  const farandole_params params{sizeof(farandole_params),
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
                                splits ? splits->data() : nullptr,
                                function ? function->c_str() : nullptr};
  return std::make_shared<Operation>(context, params, name ? name->c_str() : nullptr, list);
}

std::shared_ptr<Gradients> MakeGradients(const std::shared_ptr<Context>& context,
                                         const std::string& prefix, const py::sequence& tensors,
                                         int op, double prescale, double postscale, int wire,
                                         uint32_t set, int device, int64_t group_bytes) {
  const farandole_params params{sizeof(farandole_params),
                                FARANDOLE_ALLREDUCE,
                                op,
                                prescale,
                                postscale,
                                -1,
                                wire,
                                set,
                                0,
                                device,
                                0,
                                nullptr,
                                nullptr};
  return std::make_shared<Gradients>(context, params, prefix.c_str(), TensorList(tensors),
                                     group_bytes);
}

void BindContext(py::module_& m) {
  py::class_<Context, std::shared_ptr<Context>>(m, "Context")
      .def_static("init", &Context::Init)
      .def_static("in_process", &Context::InProcess, py::arg("size"))
      .def_static("forget_all", &Context::ForgetAll)
      .def_property_readonly("is_open", &Context::is_open)
      .def_property_readonly("is_closed", &Context::is_closed)
      .def("close", &Context::Close)
      .def("topology", &Context::Topology)
      .def("counters", &Context::Counters)
      .def("setting", &Context::Setting, py::arg("name"))
      .def("start_timeline", &Context::StartTimeline, py::arg("path"), py::arg("mark_cycles"))
      .def("stop_timeline", &Context::StopTimeline)
      .def("join", &Context::Join)
      .def("prepare", &Prepare, py::arg("name"), py::arg("tensors"), py::kw_only(), py::arg("kind"),
           py::arg("op") = static_cast<int>(FARANDOLE_SUM), py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("root") = -1,
           py::arg("wire") = static_cast<int>(FARANDOLE_WIRE_SAME), py::arg("set") = 0,
           py::arg("device") = static_cast<int>(FARANDOLE_CPU), py::arg("splits") = py::none(),
           py::arg("function") = py::none())
      .def("gradients", &MakeGradients, py::arg("prefix"), py::arg("tensors"), py::kw_only(),
           py::arg("op"), py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
           py::arg("wire") = static_cast<int>(FARANDOLE_WIRE_SAME), py::arg("set") = 0,
           py::arg("device") = static_cast<int>(FARANDOLE_CPU), py::arg("group_bytes") = 0);
}

void BindOperation(py::module_& m) {
  py::class_<Operation, std::shared_ptr<Operation>>(m, "Operation")
      .def("start", &Work::Start, py::arg("inputs"), py::arg("outputs"), py::arg("holder"),
           py::arg("votes") = py::none(), py::arg("failed") = py::none(),
           py::arg("stream") = py::none())
      .def("start_allocating", &Work::StartAllocating, py::arg("inputs"), py::arg("holder"),
           py::arg("stream") = py::none())
      .def("run", &Work::Run, py::arg("inputs"), py::arg("outputs"), py::arg("holder"));
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("wait", &Work::Wait, py::arg("timeout_s") = -1.0, py::arg("stream") = py::none())
      .def("poll", &Work::Poll)
      .def("over", &Work::Over)
      .def("error", &Work::Error)
      .def("skipped", &Work::Skipped, py::arg("index"))
      .def("result", &Work::TakeResult, py::arg("index"));
  py::class_<Result, std::shared_ptr<Result>>(m, "Result", py::buffer_protocol())
      .def_buffer([](const Result& self) {
        return py::buffer_info(static_cast<uint8_t*>(self.data()), self.bytes());
      })
      .def_property_readonly("address", &Result::address)
      .def_property_readonly("nbytes", &Result::bytes)
      .def_property_readonly("rows", &Result::rows);
}

void BindGradients(py::module_& m) {
  py::class_<Gradients, std::shared_ptr<Gradients>>(m, "Gradients")
      .def(
          "redefine",
          [](Gradients& self, const py::sequence& tensors) { self.Redefine(TensorList(tensors)); },
          py::arg("tensors"))
      .def("mark", &Gradients::Mark, py::arg("index"), py::arg("input"), py::arg("output"),
           py::arg("vote"), py::arg("stream") = py::none())
      .def("in_step", &Gradients::InStep, py::arg("step"), py::arg("passes"),
           py::arg("no_sync_passes"), py::arg("previous_passes"),
           py::arg("previous_no_sync_passes"))
      .def("announce_step", &Gradients::AnnounceStep)
      .def("marked", &Gradients::Marked, py::arg("index"))
      .def("end", &Gradients::End, py::arg("failed") = py::none())
      .def("wait", &Gradients::Wait, py::arg("timeout_s") = -1.0, py::arg("stream") = py::none())
      .def("over", &Gradients::Over)
      .def("rounds", &Gradients::Rounds)
      .def("skipped", &Gradients::Skipped, py::arg("index"))
      .def_property_readonly("groups", &Gradients::Groups);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C ABI of Farandole; use the package farandole instead.";
  m.attr("version") = farandole_version();
  BindContext(m);
  BindOperation(m);
  BindGradients(m);
}
