#include "bindings/python/gradient_slots.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;

namespace {

/// A Python callable of one slot: what autograd's hooks call. Its type is made by hand as
/// pybind11's way to a function costs as much as all that the function does.
struct HookObject {
  PyObject_HEAD;
  std::weak_ptr<GradientSlots> slots;
  int32_t index;
  bool is_after;
};

PyObject* CallHook(PyObject* self, PyObject*, PyObject*) {
  auto& hook = *reinterpret_cast<HookObject*>(self);
  const std::shared_ptr<GradientSlots> slots = hook.slots.lock();
  if (!slots || slots->slots().empty()) Py_RETURN_NONE;
  try {
    if (hook.is_after) {
      slots->AfterAccumulation(hook.index);
    } else {
      slots->BeforeAccumulation(hook.index);
    }
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const py::builtin_exception& error) {
    error.set_error();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

void DeallocateHook(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<HookObject*>(self)->~HookObject();
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* HookType() {
  static PyTypeObject* const type = [] {
    static std::array<PyType_Slot, 4> slots = {
        {{Py_tp_call, reinterpret_cast<void*>(&CallHook)},
         {Py_tp_dealloc, reinterpret_cast<void*>(&DeallocateHook)},
         {Py_tp_doc, const_cast<char*>("Calls one gradient's slot while the optimizer lives.")},
         {0, nullptr}}};
    static PyType_Spec spec{"farandole._core.GradientHook", sizeof(HookObject), 0,
                            Py_TPFLAGS_DEFAULT, slots.data()};
    PyObject* const made = PyType_FromSpec(&spec);
    if (made == nullptr) throw py::error_already_set();
    // Without it torch warns that pickled tensors lose the hook.
    py::setattr(made, "__torch_unserializable__", py::bool_(true));
    return reinterpret_cast<PyTypeObject*>(made);
  }();
  return type;
}

/// An attribute by its interned name; null, and no exception, if there is none.
py::object Get(const py::object& object, PyObject* name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name);
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

PyObject* Interned(const char* name) {
  PyObject* const text = PyUnicode_InternFromString(name);
  if (text == nullptr) throw py::error_already_set();
  return text;
}

std::optional<int64_t> VersionOf(const py::object& gradient) {
  static PyObject* const name = Interned("_version");
  const py::object version = Get(gradient, name);  // a tensor of inference mode has none
  if (!version) return std::nullopt;
  return version.cast<int64_t>();
}

bool IsNegated(const py::object& gradient) {
  static PyObject* const name = Interned("is_neg");
  const auto answer =
      py::reinterpret_steal<py::object>(PyObject_CallMethodObjArgs(gradient.ptr(), name, nullptr));
  if (!answer) throw py::error_already_set();
  return answer.is(py::handle(Py_True));
}

bool HasShape(const DLTensor& tensor, const std::vector<int64_t>& shape) {
  return static_cast<size_t>(tensor.ndim) == shape.size() &&
         std::equal(shape.begin(), shape.end(), tensor.shape);
}

/// Whether it is in host memory with these elements.
bool IsOf(const DLTensor& tensor, const GradientSlot& slot) {
  return tensor.device.device_type == kDLCPU && IsSame(tensor.dtype, slot.element) &&
         HasShape(tensor, slot.shape);
}

/// The gradient as it can be sent without the codec; nullopt: it cannot.
std::optional<DLTensor> ReadDirectly(const GradientSlot& slot, const py::object& gradient) {
  if (!slot.is_direct || gradient.is_none()) return std::nullopt;
  const std::optional<DLTensor> tensor = Peek(gradient);
  const std::optional<DLTensor> parameter = Peek(slot.parameter);
  if (!tensor || !parameter || !IsOf(*tensor, slot) || !HasShape(*parameter, slot.shape))
    return std::nullopt;
  if (!IsCOrder(*tensor) || IsNegated(gradient)) return std::nullopt;
  return tensor;
}

/// Whether a direct slot's parameter, and the dtype of its gradients, are what they were.
bool LooksAsDefined(const GradientSlot& slot) {
  static PyObject* const grad_dtype = Interned("grad_dtype");
  if (!slot.is_direct || !slot.last_dtype.is(slot.dtype)) return false;
  const std::optional<DLTensor> parameter = Peek(slot.parameter);
  if (!parameter || !IsOf(*parameter, slot)) return false;
  if (!std::equal(slot.strides.begin(), slot.strides.end(), parameter->strides)) return false;
  const py::object gradient = slot.gradient();
  if (gradient.is_none()) return Get(slot.parameter, grad_dtype).is(slot.dtype);
  const std::optional<DLTensor> tensor = Peek(gradient);
  return tensor && IsSame(tensor->dtype, slot.element);
}

/// Whether the view can hold the gradient: dense, in host memory, of this dtype and shape.
bool FitsView(const GradientSlot& slot, const py::object& gradient) {
  const std::optional<DLTensor> tensor = Peek(gradient);
  return slot.is_direct && tensor && IsOf(*tensor, slot);
}

int Visit(const py::object& object, visitproc visit, void* argument) {
  return object ? visit(object.ptr(), argument) : 0;
}

}  // namespace

py::object GradientSlot::gradient() const {
  static PyObject* const grad = Interned("grad");
  py::object gradient = Get(parameter, grad);
  if (!gradient) return py::none();
  return gradient;
}

bool GradientSlot::HoldsReduced(const py::object& gradient) const {
  if (!reduced || gradient.is_none()) return false;
  return PyWeakref_Check(reduced.ptr()) ? reduced().is(gradient) : reduced.is(gradient);
}

farandole_vote GradientSlot::Vote(const py::object& gradient) const {
  if (gradient.is_none()) return FARANDOLE_ABSENT;
  const bool is_clean =
      accumulated == 0 && HoldsReduced(gradient) && version == VersionOf(gradient);
  return is_clean ? FARANDOLE_CLEAN : FARANDOLE_PRESENT;
}

void GradientSlot::NoteReduced(bool keeps_it) {
  const py::object now = gradient();
  reduced = py::object();
  if (now.is_none()) return;
  version = VersionOf(now);
  reduced =
      keeps_it ? now : py::reinterpret_steal<py::object>(PyWeakref_NewRef(now.ptr(), nullptr));
  if (!reduced) throw py::error_already_set();
}

void GradientSlot::NoteSent(const py::object& gradient) {
  sent = gradient;
  sent_version = VersionOf(gradient);
  is_fresh = false;
}

bool GradientSlot::HasChanged() const {
  const py::object now = gradient();
  if (!sent) return !now.is_none();
  return !now.is(sent) || (!now.is_none() && VersionOf(now) != sent_version);
}

/// A user's tensor that is replaced keeps its values and is reduced no more, as with torch's
/// DistributedDataParallel.
py::object GradientSlot::MoveIntoView() {
  static PyObject* const grad = Interned("grad");
  py::object now = gradient();
  if (!view || now.is(view) || !FitsView(*this, now)) return now;
  view.attr("copy_")(now.attr("detach")());
  if (PyObject_SetAttr(parameter.ptr(), grad, view.ptr()) != 0) throw py::error_already_set();
  return view;
}

GradientSlots::GradientSlots(const py::object& owner, py::object current_task,
                             py::object is_grad_enabled, py::object count_owners,
                             int64_t sole_owner, bool overlaps, bool is_average)
    : owner_(py::weakref(owner)),
      current_task_(std::move(current_task)),
      is_grad_enabled_(std::move(is_grad_enabled)),
      count_owners_(std::move(count_owners)),
      sole_owner_(sole_owner),
      overlaps_(overlaps),
      is_average_(is_average) {}

std::shared_ptr<GradientSlot> GradientSlots::Add(py::object name, py::object parameter) {
  auto slot = std::make_shared<GradientSlot>();
  slot->name = std::move(name);
  slot->parameter = std::move(parameter);
  slots_.push_back(slot);
  return slot;
}

py::object GradientSlots::Hook(int32_t index, bool is_after) {
  PyTypeObject* const type = HookType();
  auto* const hook = reinterpret_cast<HookObject*>(type->tp_alloc(type, 0));
  if (hook == nullptr) throw py::error_already_set();
  new (&hook->slots) std::weak_ptr<GradientSlots>(weak_from_this());
  hook->index = index;
  hook->is_after = is_after;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
}

void GradientSlots::Define(GradientSlot& slot, py::object codec, bool is_direct) {
  slot.dtype = codec.attr("dtype");
  slot.codec = std::move(codec);
  const std::optional<DLTensor> tensor = Peek(slot.parameter);
  slot.is_direct = is_direct && tensor && tensor->strides != nullptr &&
                   slot.dtype.is(slot.parameter.attr("dtype"));
  if (!slot.is_direct) {
    slot.view = py::object();
    return;
  }
  slot.element = tensor->dtype;
  slot.shape.assign(tensor->shape, tensor->shape + tensor->ndim);
  slot.strides.assign(tensor->strides, tensor->strides + tensor->ndim);
}

bool GradientSlots::AreDefined() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const auto& slot) {
    return LooksAsDefined(*slot) ||
           (slot->codec && slot->codec.attr("fits")(slot).is(py::handle(Py_True)));
  });
}

void GradientSlots::Open() {
  order_.clear();
  due_ = -1;
  for (const auto& slot : slots_) slot->accumulated = 0;
  has_sent = false;
  is_open = true;
}

/// nullptr when the optimizer is gone.
py::object GradientSlots::Owner() const {
  py::object owner = owner_();
  return owner.is_none() ? py::object() : owner;
}

/// They go when the context is closed, which any Python code may do that is called here.
Gradients& GradientSlots::Rounds() const {
  if (!gradients) ThrowInternal(kClosed);
  return *gradients;
}

/// In the pass that was let in there is nothing to look at, except that a gradient must not be
/// added to one in flight, which is so in a round that an earlier pass left open, nor to a sum.
void GradientSlots::BeforeAccumulation(int32_t index) {
  GradientSlot& slot = *slots_[static_cast<size_t>(index)];
  if (slot.gradient().is_none()) slot.is_fresh = true;
  const bool is_let_in =
      task && !task.is_none() && (!is_open || is_running) && (is_average_ || !slot.reduced);
  if (is_let_in && current_task_().equal(task)) return;
  if (const py::object owner = Owner()) owner.attr("before_accumulation")(index);
}

/// The first gradient of a pass begins it; and create_graph is refused, where gradients are
/// enabled.
void GradientSlots::AfterAccumulation(int32_t index) {
  if (is_running && is_grad_enabled_().is(py::handle(Py_False))) return Accumulated(index);
  if (const py::object owner = Owner()) owner.attr("accumulated")(index);
}

void GradientSlots::Accumulated(int32_t index) {
  GradientSlot& slot = *slots_[static_cast<size_t>(index)];
  slot.reduced = py::object();
  has_unreduced = true;
  (void)slot.MoveIntoView();  // now, while the gradient is in the cache
  if (!is_open) {
    if (slot.is_fresh) (void)OwnMemory(slot);  // later passes add to it in place
    slot.is_fresh = false;
    return;
  }
  if (!current_stream.is_none()) slot.stream = current_stream();
  if (++slot.accumulated == 1) order_.push_back(index);
  if (!overlaps_) return;
  const bool was_due = due_ == index;
  // Sent when the next gradient is accumulated: the user's hooks that come after ours have run.
  if (due_ >= 0 && !was_due) Send(std::exchange(due_, -1));
  if (slot.accumulated == slot.expected || was_due) {
    due_ = index;
    slot.expected = slot.accumulated;
  } else if (slot.expected > 0 && slot.accumulated > slot.expected) {
    const int times = std::exchange(slot.expected, slot.accumulated);
    throw std::runtime_error(
        "the gradient of \"" + slot.name.cast<std::string>() +
        "\" was accumulated again after it "
        "was sent: " +
        std::to_string(times) +
        " times in earlier backward passes, more often now; "
        "where the number varies, as in loops over a checkpointed layer, pass overlap=False to "
        "DistributedOptimizer, which then sends all gradients at the end of the pass");
  }
}

void GradientSlots::Send(int32_t index) {
  GradientSlot& slot = *slots_[static_cast<size_t>(index)];
  const py::object gradient = slot.MoveIntoView();
  std::optional<DLTensor> tensor = ReadDirectly(slot, gradient);
  has_sent = true;
  if (!tensor) {
    if (const py::object owner = Owner()) owner.attr("send")(index, slot.stream);
    return;
  }
  const farandole_vote vote = slot.Vote(gradient);
  slot.buffer = OwnMemory(slot);
  slot.NoteSent(slot.gradient());
  if (!slot.buffer.is(gradient)) tensor = Peek(slot.buffer);
  slot.sparse = slot.reduced = py::object();
  slot.is_present = vote == FARANDOLE_PRESENT;
  Rounds().MarkMemory(index, AddressOf(*tensor), vote);
}

/// Counted when the gradient is sent, one accumulation after its own: what only the nodes between
/// held is its own by then. Sparse gradients have no storage; they are not reduced in place.
bool GradientSlots::HasOtherOwner(const py::object& gradient) const {
  static PyObject* const untyped_storage = Interned("untyped_storage");
  static PyObject* const cdata = Interned("_cdata");
  const auto storage =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(gradient.ptr(), untyped_storage));
  if (!storage) {
    PyErr_Clear();
    return false;
  }
  const auto owners = py::reinterpret_steal<py::object>(
      PyObject_CallOneArg(count_owners_.ptr(), Get(storage, cdata).ptr()));
  if (!owners) throw py::error_already_set();
  return owners.cast<int64_t>() > sole_owner_;
}

py::object GradientSlots::OwnMemory(GradientSlot& slot) {
  py::object gradient = slot.gradient();
  if (gradient.is_none() || gradient.is(slot.view)) return gradient;
  const bool is_own = count_owners_.is_none() ? !slot.is_fresh : !HasOtherOwner(gradient);
  if (is_own) return gradient;
  const py::object copy = gradient.attr("detach")().attr("clone")();
  if (slot.is_fresh) py::setattr(slot.parameter, "grad", copy);
  return copy;
}

void GradientSlots::SendRest(bool is_left_to_user) {
  due_ = -1;
  const py::object owner = Owner();
  std::vector<int32_t> rest = order_;
  for (int32_t i = 0; i < static_cast<int32_t>(slots_.size()); ++i) {
    rest.push_back(i);
    const GradientSlot& slot = *slots_[static_cast<size_t>(i)];
    if (!Rounds().Marked(i)) continue;
    if (slot.HasChanged() || (is_left_to_user && !ReadDirectly(slot, slot.gradient())))
      owner.attr("check")(slots_[static_cast<size_t>(i)]);
  }
  for (const int32_t i : rest) {
    if (Rounds().Marked(i)) continue;
    slots_[static_cast<size_t>(i)]->stream = py::none();  // the current one
    Send(i);
  }
}

std::vector<bool> GradientSlots::Receive(const py::object& increment_versions, bool keeps_reduced) {
  std::vector<bool> skipped(slots_.size());
  py::list in_place;
  const py::object owner = Owner();
  for (size_t i = 0; i < slots_.size(); ++i) {
    GradientSlot& slot = *slots_[i];
    skipped[i] = Rounds().Skipped(static_cast<int32_t>(i));
    if (skipped[i] || !slot.buffer) {
      slot.sent = slot.buffer = py::object();
    } else if (slot.is_direct && slot.buffer.is(slot.sent)) {
      if (slot.sent_version) in_place.append(slot.sent);
      slot.sent = slot.buffer = py::object();
    } else {
      const py::object changed = owner.attr("receive")(slots_[i]);
      if (!changed.is_none()) in_place.append(changed);
    }
    slot.expected = std::max(slot.expected, slot.accumulated);
  }
  increment_versions(in_place);  // before versions are noted
  for (const auto& slot : slots_) slot->NoteReduced(keeps_reduced);
  return skipped;
}

void GradientSlots::Drop() {
  for (const auto& slot : slots_)
    slot->sent = slot->buffer = slot->sparse = slot->reduced = py::object();
}

std::shared_ptr<GradientSlot> GradientSlots::FindAssigned() const {
  const auto assigned = std::find_if(slots_.begin(), slots_.end(), [](const auto& slot) {
    const py::object now = slot->gradient();
    return !now.is_none() && !slot->HoldsReduced(now);
  });
  return assigned == slots_.end() ? nullptr : *assigned;
}

void GradientSlots::ForgetReduced() {
  for (const auto& slot : slots_) slot->reduced = py::object();
}

void GradientSlots::ReleaseSparse() {
  for (const auto& slot : slots_) slot->sparse = py::object();
}

py::list GradientSlots::Memory() const {
  py::list memory;
  for (const auto& slot : slots_)
    for (const py::object& object : {slot->sent, slot->buffer})
      if (object) memory.append(object);
  return memory;
}

bool GradientSlots::HasSparse() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const auto& slot) {
    return slot->is_present && (slot->was_sparse || slot->sparse);
  });
}

int GradientSlots::Traverse(visitproc visit, void* argument) const {
  for (const auto& slot : slots_)
    for (const py::object* object : {&slot->parameter, &slot->codec, &slot->view, &slot->sent,
                                     &slot->buffer, &slot->sparse, &slot->reduced})
      if (const int code = Visit(*object, visit, argument); code != 0) return code;
  return Visit(current_stream, visit, argument);
}

void GradientSlots::Clear() {
  const std::vector<std::shared_ptr<GradientSlot>> gone = std::exchange(slots_, {});
}

}  // namespace farandole::python
