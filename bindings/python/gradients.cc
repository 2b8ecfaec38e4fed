// One file: the class and its slots, called for every gradient, with their helpers.
#include "bindings/python/gradients.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;

namespace {

/// A Python callable of one slot: what autograd's hooks call. Its type is made by hand as
/// pybind11's way to a function costs as much as all that the function does.
struct HookObject {
  PyObject_HEAD;
  std::weak_ptr<Gradients> gradients;
  int32_t index;
  bool is_after;
};

PyObject* CallHook(PyObject* self, PyObject*, PyObject*) {
  auto& hook = *reinterpret_cast<HookObject*>(self);
  const std::shared_ptr<Gradients> gradients = hook.gradients.lock();
  if (!gradients || gradients->slots().empty()) Py_RETURN_NONE;
  try {
    if (hook.is_after) {
      gradients->AfterAccumulation(hook.index);
    } else {
      gradients->BeforeAccumulation(hook.index);
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

py::object Call(const py::object& function) {
  auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function.ptr()));
  if (!result) throw py::error_already_set();
  return result;
}

std::optional<int64_t> VersionOf(const py::object& gradient) {
  static PyObject* const name = Interned("_version");
  const py::object version = Get(gradient, name);  // a tensor of inference mode has none
  if (!version) return std::nullopt;
  return version.cast<int64_t>();
}

/// Whether the memory does not hold the values, which are to be negated or conjugated.
bool IsLazy(const py::object& gradient, DLDataType dtype) {
  static PyObject* const is_neg = Interned("is_neg");
  static PyObject* const is_conj = Interned("is_conj");
  const auto answers = [&](PyObject* question) {
    const auto answer =
        py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(gradient.ptr(), question));
    if (!answer) throw py::error_already_set();
    return answer.is(py::handle(Py_True));
  };
  return answers(is_neg) || (dtype.code == kDLComplex && answers(is_conj));
}

bool HasShape(const DLTensor& tensor, const DLTensor& other) {
  return std::equal(tensor.shape, tensor.shape + tensor.ndim, other.shape,
                    other.shape + other.ndim);
}

bool IsOn(const DLTensor& tensor, DLDevice device) {
  return tensor.device.device_type == device.device_type &&
         tensor.device.device_id == device.device_id;
}

/// Rows of images, or of volumes, with their channels next to each other, without gaps.
bool IsChannelsLast(const DLTensor& tensor) {
  if (tensor.ndim < 3) return false;
  std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
  std::vector<int64_t> strides(tensor.strides, tensor.strides + tensor.ndim);
  std::rotate(shape.begin() + 1, shape.begin() + 2, shape.end());
  std::rotate(strides.begin() + 1, strides.begin() + 2, strides.end());
  DLTensor moved = tensor;
  moved.shape = shape.data();
  moved.strides = strides.data();
  return IsCOrder(moved);
}

/// As Peek(), with shape and strides that stay as they are when the tensor's change.
std::optional<Layout> Record(const py::object& parameter) {
  std::optional<Layout> layout = Peek(parameter);
  if (!layout || !layout->own.empty()) return layout;
  DLTensor& tensor = layout->tensor;
  layout->own.assign(tensor.shape, tensor.shape + tensor.ndim);
  layout->own.insert(layout->own.end(), tensor.strides, tensor.strides + tensor.ndim);
  tensor.shape = layout->own.data();
  tensor.strides = tensor.shape + tensor.ndim;
  return layout;
}

/// A copy of small elements in C order, in host memory, by DLPack's C functions: torch's detach()
/// and clone() take ten times as long. Null: it is none of these.
py::object CopyOfSmall(const py::object& gradient) {
  constexpr size_t kMostBytes = size_t{1} << 14;
  const ArrayType& type = TypeOf(gradient);
  const std::optional<Layout> layout = Peek(gradient);
  if (type.api == nullptr || !layout || layout->tensor.device.device_type != kDLCPU ||
      !IsCOrder(layout->tensor) || IsLazy(gradient, layout->tensor.dtype))
    return {};
  const DLTensor& from = layout->tensor;
  const std::vector<int64_t> shape(from.shape, from.shape + from.ndim);
  size_t bytes = size_t{from.dtype.bits} * from.dtype.lanes / 8;
  for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
  if (bytes == 0 || bytes > kMostBytes) return {};
  ManagedTensor made = Allocate(type, from.device, from.dtype, shape);
  if (made == nullptr) return {};
  std::memcpy(AddressOf(made->dl_tensor), AddressOf(from), bytes);
  return Adopted(type, std::move(made));
}

/// As the C ABI takes descriptions; refers to all that it is made of.
std::vector<farandole_tensor> ToTensors(const std::vector<std::string>& names,
                                        const std::vector<Gradients::Description>& descriptions) {
  std::vector<farandole_tensor> tensors;
  for (size_t i = 0; i < names.size(); ++i)
    tensors.push_back({names[i].c_str(), descriptions[i].dtype,
                       static_cast<int32_t>(descriptions[i].shape.size()),
                       descriptions[i].shape.data()});
  return tensors;
}

using Named = std::vector<std::pair<py::object, py::object>>;
using Slots = std::vector<std::shared_ptr<GradientSlot>>;

Slots ToSlots(const Named& named) {
  Slots slots;
  for (const auto& [name, parameter] : named) {
    slots.push_back(std::make_shared<GradientSlot>());
    slots.back()->name = name;
    slots.back()->parameter = parameter;
  }
  return slots;
}

std::vector<std::string> NamesOf(const Slots& slots) {
  std::vector<std::string> names;
  for (const auto& slot : slots) names.push_back(slot->name.cast<std::string>());
  return names;
}

/// The stream as torch's frontends name it: None, or its device and handle.
py::object ToPair(const std::optional<farandole_stream>& stream) {
  if (!stream) return py::none();
  return py::make_tuple(stream->device, reinterpret_cast<uintptr_t>(stream->stream));
}

bool IsSameStream(const std::optional<farandole_stream>& a,
                  const std::optional<farandole_stream>& b) {
  return a.has_value() == b.has_value() &&
         (!a || (a->device == b->device && a->stream == b->stream));
}

/// Of all optimizers, by the address of the tensor that gradients are views of; slots own the
/// counts.
auto& AllAdditions() {
  static auto* const all = new std::unordered_map<PyObject*, std::weak_ptr<int64_t>>;
  return *all;
}

/// The count of the slot's view of a tensor; null: its gradient is no view.
int64_t* AdditionsTo(GradientSlot& slot, const py::object& gradient) {
  static PyObject* const name = Interned("_base");
  slot.additions = nullptr;
  const py::object base = Get(gradient, name);
  if (!base || base.is_none()) return nullptr;
  std::weak_ptr<int64_t>& known = AllAdditions()[base.ptr()];
  std::shared_ptr<int64_t> count = known.lock();
  if (!count) known = count = std::make_shared<int64_t>(0);
  slot.additions = count;
  return count.get();
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

/// torch >= 2.10 lets a parameter's `grad_dtype` differ from its dtype, or be None for any dtype;
/// then the next gradient is expected to be as the last one seen.
py::object GradientSlot::GradientDtype() const {
  static PyObject* const dtype_name = Interned("dtype");
  static PyObject* const grad_dtype = Interned("grad_dtype");
  static const bool has_grad_dtype = PyObject_HasAttr(parameter.ptr(), grad_dtype) != 0;
  const py::object now = gradient();
  if (!now.is_none()) return Get(now, dtype_name);
  if (!has_grad_dtype) return Get(parameter, dtype_name);
  py::object next = Get(parameter, grad_dtype);
  if (next && !next.is_none()) return next;
  return last_dtype ? last_dtype : Get(parameter, dtype_name);
}

std::optional<int64_t> GradientSlot::Version(const py::object& gradient) const {
  std::optional<int64_t> own = VersionOf(gradient);
  if (own && additions) *own -= *additions;
  return own;
}

bool GradientSlot::HoldsReduced(const py::object& gradient) const {
  if (!reduced || gradient.is_none()) return false;
  return PyWeakref_Check(reduced.ptr()) ? reduced().is(gradient) : reduced.is(gradient);
}

farandole_vote GradientSlot::Vote(const py::object& gradient) const {
  if (gradient.is_none()) return FARANDOLE_ABSENT;
  const bool is_clean = HoldsReduced(gradient) && version == Version(gradient);
  return is_clean ? FARANDOLE_CLEAN : FARANDOLE_PRESENT;
}

void GradientSlot::NoteReduced(bool keeps_it) {
  const py::object now = gradient();
  reduced = py::object();
  if (now.is_none()) return;
  version = Version(now);
  reduced =
      keeps_it ? now : py::reinterpret_steal<py::object>(PyWeakref_NewRef(now.ptr(), nullptr));
  if (!reduced) throw py::error_already_set();
}

void GradientSlot::NoteSent(const py::object& gradient) {
  sent = gradient;
  sent_version = Version(gradient);
  is_fresh = false;
}

bool GradientSlot::HasChanged() const {
  const py::object now = gradient();
  if (!sent) return !now.is_none();
  return !now.is(sent) || (!now.is_none() && Version(now) != sent_version);
}

py::tuple GradientSlot::Shape() const {
  if (!look) return py::tuple(parameter.attr("shape"));
  py::tuple shape(static_cast<size_t>(look->tensor.ndim));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = look->tensor.shape[i];
  return shape;
}

bool GradientSlot::IsLive() const {
  static PyObject* const requires_grad = Interned("requires_grad");
  return Get(parameter, requires_grad).is(py::bool_(true)) || !gradient().is_none();
}

bool GradientSlot::LooksAsDefined() const {
  if (!dtype || !GradientDtype().is(dtype) || (!was_live && IsLive())) return false;
  const std::optional<Layout> now = Peek(parameter);
  if (!now || !look) return now.has_value() == look.has_value();
  const DLTensor& a = now->tensor;
  const DLTensor& b = look->tensor;
  return IsOn(a, b.device) && IsSame(a.dtype, b.dtype) && HasShape(a, b) &&
         std::equal(a.strides, a.strides + a.ndim, b.strides);
}

Gradients::Gradients(std::shared_ptr<Context> context, const Options& options,
                     const py::object& owner, const Named& named,
                     const std::vector<std::string>& labels, TorchFunctions torch,
                     Settings settings)
    : Child(std::move(context)),
      owner_(py::weakref(owner)),
      torch_(std::move(torch)),
      settings_(settings),
      slots_(ToSlots(named)),
      new_results_(slots_.size()) {
  if (!named.empty()) type_ = &TypeOf(named.front().second);
  const farandole_allocator allocator{sizeof allocator, this, &Gradients::AllocateResult};
  const std::vector<const char*> texts = ToTexts(labels);
  farandole_gradient_options how{};
  how.struct_size = sizeof how;
  how.labels = texts.data();
  how.label_count = static_cast<int32_t>(texts.size());
  how.has_flag = 1;
  how.is_late = settings_.overlaps ? 0 : 1;
  how.group_bytes = settings_.group_bytes;
  if (type_ != nullptr && type_->api != nullptr) how.allocator = &allocator;
  // Ranks whose first round fails before their gradients are defined meet by the names.
  const std::vector<std::string> names = NamesOf(slots_);
  const std::vector<Description> placeholders(names.size(), {FARANDOLE_FLOAT32, {}});
  const std::vector<farandole_tensor> tensors = ToTensors(names, placeholders);
  Check(farandole_gradients_create(context_->get(), &options.params, &how, tensors.data(),
                                   static_cast<int32_t>(tensors.size()), &handle_));
}

Gradients::~Gradients() {
  Release();
  if (unbound_ != nullptr) farandole_gradients_release(unbound_);
}

/// What is known of the gradients stays for Rebind(), unless something is in flight for ever.
bool Gradients::Release() {
  if (waiting_ > 0) return false;
  if (is_gone()) {
    handle_ = nullptr;
  } else if (farandole_gradients* const handle = std::exchange(handle_, nullptr);
             farandole_gradients_rebind(handle, nullptr, 0, nullptr, 0) == FARANDOLE_OK) {
    unbound_ = handle;
  } else {
    farandole_gradients_release(handle);
  }
  return true;
}

std::vector<const char*> Gradients::ToTexts(const std::vector<std::string>& labels) {
  std::vector<const char*> texts;
  for (const std::string& label : labels) texts.push_back(label.c_str());
  return texts;
}

void Gradients::Rebind(std::shared_ptr<Context> context, uint32_t set,
                       const std::vector<std::string>& labels) {
  if (unbound_ == nullptr) ThrowInternal("gradients that are in flight cannot go on elsewhere");
  const std::vector<const char*> texts = ToTexts(labels);
  Check(farandole_gradients_rebind(unbound_, context->get(), set, texts.data(),
                                   static_cast<int32_t>(texts.size())));
  MoveTo(std::move(context));
  handle_ = std::exchange(unbound_, nullptr);
  Drop();
  kept_.clear();
}

farandole_gradients* Gradients::get() const {
  if (is_gone()) context_->ThrowClosed();
  return handle_;
}

/// nullptr when the optimizer is gone.
py::object Gradients::Owner() const {
  py::object owner = owner_();
  return owner.is_none() ? py::object() : owner;
}

py::object Gradients::Hook(int32_t index, bool is_after) {
  PyTypeObject* const type = HookType();
  auto* const hook = reinterpret_cast<HookObject*>(type->tp_alloc(type, 0));
  if (hook == nullptr) throw py::error_already_set();
  new (&hook->gradients) std::weak_ptr<Gradients>(weak_from_this());
  hook->index = index;
  hook->is_after = is_after;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
}

void Gradients::Define(const std::vector<Description>& descriptions, const py::object& like) {
  const std::optional<Layout> on_gpu = like.is_none() ? std::nullopt : Peek(like);
  const DLDevice device = on_gpu ? on_gpu->tensor.device : DLDevice{kDLCPU, 0};
  const std::vector<std::string> names = NamesOf(slots_);
  const std::vector<farandole_tensor> tensors = ToTensors(names, descriptions);
  Check(
      farandole_gradients_redefine(get(), tensors.data(), static_cast<int32_t>(tensors.size()),
                                   device.device_type == kDLCUDA ? FARANDOLE_CUDA : FARANDOLE_CPU));
  device_ = device;
  like_ = like;
  for (size_t i = 0; i < slots_.size(); ++i) {
    slots_[i]->look = Record(slots_[i]->parameter);
    slots_[i]->was_live = slots_[i]->IsLive();
    new_results_[i].shape = descriptions[i].shape;
    new_results_[i].dtype = OfNumber(descriptions[i].dtype);
  }
}

void Gradients::Add(const Named& named, const py::object& describe) {
  const Slots slots = ToSlots(named);
  std::vector<Description> descriptions;
  for (const auto& slot : slots) {
    slot->look = Record(slot->parameter);
    descriptions.push_back(describe(slot).cast<Description>());
  }
  const std::vector<std::string> names = NamesOf(slots);
  const std::vector<farandole_tensor> tensors = ToTensors(names, descriptions);
  Check(farandole_gradients_add(get(), tensors.data(), static_cast<int32_t>(tensors.size())));
  const std::lock_guard lock(new_results_mutex_);  // full groups may be in flight
  for (size_t i = 0; i < slots.size(); ++i) {
    slots_.push_back(slots[i]);
    new_results_.push_back({descriptions[i].shape, OfNumber(descriptions[i].dtype), nullptr});
  }
}

bool Gradients::AreDefined() const {
  return std::ranges::all_of(slots_, [](const auto& slot) { return slot->LooksAsDefined(); });
}

bool Gradients::CountPass(bool is_no_sync) {
  Check(farandole_gradients_count_pass(get(), is_no_sync ? 1 : 0));
  return Status().is_window_full != 0;
}

void Gradients::SetPasses(int passes) {
  farandole_gradients* const handle = is_gone() ? unbound_ : handle_;
  if (handle != nullptr) Check(farandole_gradients_set_passes(handle, passes));
}

void Gradients::Open() {
  std::erase_if(AllAdditions(), [](const auto& entry) { return entry.second.expired(); });
  Check(farandole_gradients_open(get()));
}

/// In the pass that was let in, before which a round that an earlier one left open has ended, there
/// is nothing to look at, except that a gradient must not be added to a reduced sum.
void Gradients::BeforeAccumulation(int32_t index) {
  GradientSlot& slot = *slots_[static_cast<size_t>(index)];
  if (slot.gradient().is_none()) {
    slot.is_fresh = true;
    slot.additions = nullptr;  // of a view that is gone
  }
  const bool is_let_in = task && !task.is_none() && (settings_.is_average || !slot.reduced);
  if (is_let_in && Call(torch_.current_task).equal(task)) return;
  if (const py::object owner = Owner()) owner.attr("before_accumulation")(index);
}

/// The first gradient of a pass begins it; and create_graph is refused, where gradients are
/// enabled.
void Gradients::AfterAccumulation(int32_t index) {
  if (is_running && Call(torch_.is_grad_enabled).is(py::handle(Py_False)))
    return Accumulated(index);
  if (const py::object owner = Owner()) owner.attr("accumulated")(index);
}

void Gradients::Accumulated(int32_t index) {
  GradientSlot& slot = *slots_[static_cast<size_t>(index)];
  slot.reduced = py::object();
  constexpr int32_t kNoRound = -2;
  int32_t due = kNoRound;
  const int code = farandole_gradients_accumulated(get(), index, &due);
  if (code != FARANDOLE_OK)
    throw std::runtime_error(std::string(farandole_last_error()) +
                             "; where the number varies, as in loops over a checkpointed layer, "
                             "pass overlap=False to DistributedOptimizer, which then sends all "
                             "gradients at the end of the pass");
  if (!slot.is_fresh)  // Autograd has added to what was there, by one write.
    if (int64_t* const additions = AdditionsTo(slot, slot.gradient())) ++*additions;
  if (due != kNoRound) {
    slot.made_in = StreamNow();
    if (due >= 0) Send(due);
    return;
  }
  if (slot.is_fresh) (void)OwnMemory(slot, slot.gradient());  // later passes add to it in place
  slot.is_fresh = false;
}

/// Of the thread that calls, on the GPU where gradients travel.
std::optional<farandole_stream> Gradients::StreamNow() const {
  if (!is_cuda()) return std::nullopt;
  return CurrentStream(TypeOf(like_), like_, device_);
}

/// The gradient as it can be sent where it lies; nullopt: it cannot.
std::optional<Layout> Gradients::ReadDirectly(const GradientSlot& slot,
                                              const py::object& gradient) const {
  if (slot.codec || !slot.look) return std::nullopt;
  const std::optional<Layout> parameter = Peek(slot.parameter);
  std::optional<Layout> layout = Peek(gradient);
  if (!layout || !parameter || !HasShape(parameter->tensor, slot.look->tensor)) return std::nullopt;
  const DLTensor& tensor = layout->tensor;
  const bool is_ordered = slot.is_channels_last ? IsChannelsLast(tensor) : IsCOrder(tensor);
  if (!is_ordered || !IsOn(tensor, device_) || !HasShape(tensor, slot.look->tensor))
    return std::nullopt;
  static PyObject* const dtype = Interned("dtype");
  if (!Get(gradient, dtype).is(slot.dtype) || IsLazy(gradient, tensor.dtype)) return std::nullopt;
  return layout;
}

void Gradients::Mark(int32_t index, void* in, void* out, farandole_vote vote) {
  const std::optional<farandole_stream>& stream = slots_[static_cast<size_t>(index)]->made_in;
  Check(farandole_gradients_mark(get(), index, in, out, vote, stream ? &*stream : nullptr));
}

void Gradients::Send(int32_t index) {
  GradientSlot& slot = *slots_[static_cast<size_t>(index)];
  const py::object gradient = slot.gradient();
  slot.sparse = py::object();
  if (gradient.is_none()) return SendAbsent(slot, index);
  std::optional<Layout> layout = ReadDirectly(slot, gradient);
  const farandole_vote vote = slot.Vote(gradient);
  slot.is_present = vote == FARANDOLE_PRESENT;
  if (!layout) {
    slot.buffer = Pack(slot, index);
    slot.reduced = py::object();
    if (!slot.buffer) return Mark(index, nullptr, nullptr, FARANDOLE_ABSENT);
    layout = Peek(slot.buffer);
  } else {
    slot.buffer = OwnMemory(slot, gradient);
    const bool is_own = slot.buffer.is(gradient);
    slot.NoteSent(is_own ? gradient : slot.gradient());
    if (!is_own) layout = Peek(slot.buffer);
  }
  if (!layout) throw py::type_error("a packed gradient that cannot be read");
  slot.reduced = py::object();
  void* const memory = AddressOf(layout->tensor);
  Mark(index, memory, memory, vote);
}

/// The result is allocated when the decision is executed. A codec may have something left of
/// earlier rounds to contribute, unless no rank has a gradient.
void Gradients::SendAbsent(GradientSlot& slot, int32_t index) {
  const std::optional<Layout> parameter = Peek(slot.parameter);
  if (parameter && slot.look && !HasShape(parameter->tensor, slot.look->tensor))
    if (const py::object owner = Owner()) owner.attr("check")(slots_[static_cast<size_t>(index)]);
  slot.sent = slot.reduced = slot.buffer = py::object();
  slot.sent_version = std::nullopt;
  slot.is_present = slot.is_fresh = false;
  if (slot.codec) slot.buffer = Pack(slot, index);
  const std::optional<Layout> layout = slot.buffer ? Peek(slot.buffer) : std::nullopt;
  if (!layout) return Mark(index, nullptr, nullptr, FARANDOLE_ABSENT);
  Mark(index, AddressOf(layout->tensor), AddressOf(layout->tensor), FARANDOLE_CLEAN);
}

/// What travels of a gradient that cannot be sent where it lies; null: nothing. In its own stream.
py::object Gradients::Pack(GradientSlot& slot, int32_t index) {
  const py::object owner = Owner();
  if (!owner) ThrowInternal(kClosed);
  const py::object stream =
      IsSameStream(slot.made_in, StreamNow()) ? py::object(py::none()) : ToPair(slot.made_in);
  const py::object packed = owner.attr("pack")(slots_[static_cast<size_t>(index)], stream);
  if (const py::object gradient = slot.gradient(); !gradient.is_none()) slot.NoteSent(gradient);
  return packed.is_none() ? py::object() : packed;
}

/// Counted when the gradient is sent, one accumulation after its own: what only the nodes between
/// held is its own by then. Sparse gradients have no storage; they are not reduced in place.
bool Gradients::HasOtherOwner(const py::object& gradient) const {
  static PyObject* const untyped_storage = Interned("untyped_storage");
  static PyObject* const cdata = Interned("_cdata");
  const auto storage =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(gradient.ptr(), untyped_storage));
  if (!storage) {
    PyErr_Clear();
    return false;
  }
  const auto owners = py::reinterpret_steal<py::object>(
      PyObject_CallOneArg(torch_.count_owners.ptr(), Get(storage, cdata).ptr()));
  if (!owners) throw py::error_already_set();
  return owners.cast<int64_t>() > torch_.sole_owner;
}

py::object Gradients::OwnMemory(GradientSlot& slot, const py::object& gradient) {
  if (gradient.is_none()) return gradient;
  const bool is_own = torch_.count_owners.is_none() ? !slot.is_fresh : !HasOtherOwner(gradient);
  if (is_own) return gradient;
  const py::object owner = Owner();
  const bool is_elsewhere = is_cuda() && !IsSameStream(slot.made_in, StreamNow());
  py::object copy = is_elsewhere && owner ? owner.attr("copy_in")(gradient, ToPair(slot.made_in))
                                          : CopyOfSmall(gradient);
  if (!copy) copy = gradient.attr("detach")().attr("clone")();
  if (slot.is_fresh) {
    py::setattr(slot.parameter, "grad", copy);
  } else {
    (void)AdditionsTo(slot, gradient);
  }
  return copy;
}

void Gradients::Compare() {
  farandole_gradients* const handle = get();
  const WaitGuard guard(waiting_);
  const int code = WaitInSlices(
      -1, [&](double slice_s) { return farandole_gradients_compare(handle, slice_s); });
  Check(code);
}

void Gradients::CheckSent(bool is_left_to_user) {
  const py::object owner = Owner();
  for (size_t i = 0; owner && i < slots_.size(); ++i) {
    if (farandole_gradients_marked(get(), static_cast<int32_t>(i)) == 0) continue;
    const GradientSlot& slot = *slots_[i];
    if (slot.HasChanged() || (is_left_to_user && !ReadDirectly(slot, slot.gradient())))
      owner.attr("check")(slots_[i]);
  }
}

void Gradients::End(bool is_left_to_user) {
  CheckSent(is_left_to_user);
  const std::optional<farandole_stream> stream = StreamNow();
  for (int32_t i = farandole_gradients_next(get()); i >= 0; i = farandole_gradients_next(get())) {
    slots_[static_cast<size_t>(i)]->made_in = stream;
    Send(i);
  }
  if (HasSparse()) Check(farandole_gradients_raise_flag(get()));
  Check(farandole_gradients_end(get(), nullptr));
}

void Gradients::Fail(const std::string& why) { Check(farandole_gradients_end(get(), why.c_str())); }

void Gradients::NoteFailure(const std::optional<std::string>& why) {
  if (!is_gone()) Check(farandole_gradients_note_failure(handle_, why ? why->c_str() : nullptr));
}

void Gradients::Forget() {
  farandole_gradients* const handle = is_gone() ? unbound_ : handle_;
  if (handle != nullptr) Check(farandole_gradients_forget(handle));
}

void Gradients::Wait() {
  farandole_gradients* const handle = get();
  const WaitGuard guard(waiting_);
  const std::optional<farandole_stream> stream = StreamNow();
  const int code = WaitInSlices(-1, [&](double slice_s) {
    return farandole_gradients_wait(handle, stream ? &*stream : nullptr, slice_s);
  });
  Check(code);
}

/// farandole_allocator::allocate, of the engine's thread, without the GIL.
void* Gradients::AllocateResult(void* gradients, int32_t i, const int64_t*, int32_t, int64_t) {
  auto& self = *static_cast<Gradients*>(gradients);
  std::unique_lock lock(self.new_results_mutex_);
  const NewResult& result = self.new_results_[static_cast<size_t>(i)];
  const DLDataType dtype = result.dtype;
  const std::vector<int64_t> shape = result.shape;
  lock.unlock();  // torch's allocator may wait for whoever has the GIL
  ManagedTensor tensor = Allocate(*self.type_, self.device_, dtype, shape);
  if (tensor == nullptr) return nullptr;
  void* const address = AddressOf(tensor->dl_tensor);
  lock.lock();
  self.new_results_[static_cast<size_t>(i)].tensor = std::move(tensor);
  return address;
}

/// The result of a gradient that this rank had not, as it travelled.
py::object Gradients::TakeNew(int32_t index) {
  NewResult& result = new_results_[static_cast<size_t>(index)];
  if (result.tensor != nullptr) return Adopted(*type_, std::move(result.tensor));
  const py::object on = is_cuda() ? like_ : slots_[static_cast<size_t>(index)]->parameter;
  const py::object dtype = py::module_::import("torch").attr(NameOf(result.dtype).c_str());
  const auto new_empty = [&](const py::tuple& shape) -> py::object {
    return on.attr("new_empty")(shape, py::arg("dtype") = dtype);
  };
  if (std::ranges::find(result.shape, 0) != result.shape.end())  // no memory was asked for
    return new_empty(py::tuple(py::cast(result.shape)));
  farandole_buffer* buffer = nullptr;
  Check(farandole_gradients_take_result(get(), index, &buffer));
  Array like;
  like.device = device_;
  like.dtype = result.dtype;
  const auto memory = std::make_shared<ResultMemory>(buffer, like, result.shape);
  return ResultMemory::ToArray(memory, TypeOf(on), new_empty(py::make_tuple(0)));
}

void Gradients::ReceiveOne(int32_t index, py::list& in_place) {
  const std::shared_ptr<GradientSlot> slot = slots_[static_cast<size_t>(index)];
  const py::object sent = std::exchange(slot->sent, py::object());
  const py::object buffer = std::exchange(slot->buffer, py::object());
  if (Skipped(index)) return;
  const py::object owner = Owner();
  if (!buffer) {
    if (owner) owner.attr("receive_new")(slot, TakeNew(index));
  } else if (!buffer.is(sent)) {
    if (owner) owner.attr("receive")(slot, buffer, sent ? sent : py::object(py::none()));
  } else {
    if (slot->sent_version) in_place.append(sent);
    if (is_cuda() && !IsSameStream(slot->made_in, StreamNow()))
      (void)TypeOf(sent).library.attr("use_here")(sent, sent);
  }
}

void Gradients::Receive(const py::object& increment_versions, bool keeps_reduced) {
  KeepMemory();
  py::list in_place;
  for (size_t i = 0; i < slots_.size(); ++i) ReceiveOne(static_cast<int32_t>(i), in_place);
  increment_versions(in_place);  // before versions are noted
  for (const auto& slot : slots_) slot->NoteReduced(keeps_reduced);
}

void Gradients::Stepped() {
  if (!is_gone()) Check(farandole_gradients_stepped(get()));
}

bool Gradients::Skipped(int32_t i) const { return farandole_gradients_skipped(get(), i) != 0; }

void Gradients::Drop() {
  KeepMemory();
  for (const auto& slot : slots_)
    slot->sent = slot->buffer = slot->sparse = slot->reduced = py::object();
}

std::shared_ptr<GradientSlot> Gradients::FindAssigned() const {
  const auto assigned = std::find_if(slots_.begin(), slots_.end(), [](const auto& slot) {
    const py::object now = slot->gradient();
    return !now.is_none() && !slot->HoldsReduced(now);
  });
  return assigned == slots_.end() ? nullptr : *assigned;
}

void Gradients::ForgetReduced() {
  for (const auto& slot : slots_) slot->reduced = py::object();
}

void Gradients::ReleaseSparse() {
  for (const auto& slot : slots_) slot->sparse = py::object();
}

/// On a GPU what was sent may be in use after the round was waited for. Not once the device has
/// failed.
void Gradients::KeepMemory() {
  if (!is_cuda()) return;
  if (CompleteRounds()) kept_.emplace_back(Status().rounds, Memory());
}

py::list Gradients::Memory() const {
  py::list memory;
  for (const auto& slot : slots_)
    for (const py::object& object : {slot->sent, slot->buffer})
      if (object) memory.append(object);
  return memory;
}

farandole_round_status Gradients::Status() const {
  farandole_round_status status{};
  status.struct_size = sizeof status;
  const farandole_gradients* const handle = is_gone() ? unbound_ : handle_;
  if (handle != nullptr) Check(farandole_gradients_status(handle, &status));
  return status;
}

/// nullopt: after the context's end, or the device has failed; nothing touches memory any more.
std::optional<int64_t> Gradients::CompleteRounds() const {
  int64_t rounds = 0;
  if (is_gone() || farandole_gradients_complete(handle_, &rounds) != FARANDOLE_OK)
    return std::nullopt;
  return rounds;
}

bool Gradients::IsComplete() const {
  const std::optional<int64_t> complete = CompleteRounds();
  return !complete || *complete == Status().rounds;
}

void Gradients::ReleaseCompleted() {
  if (kept_.empty()) return;
  const int64_t complete = CompleteRounds().value_or(INT64_MAX);
  while (!kept_.empty() && kept_.front().first <= complete) {
    const py::object memory = std::move(kept_.front().second);  // May call Python when it goes.
    kept_.pop_front();
  }
}

/// Whether the round that was ended last has finished; its failure was reported already.
bool Gradients::HasEnded() {
  return is_gone() || Status().is_pending == 0 ||
         farandole_gradients_wait(handle_, nullptr, 0) != FARANDOLE_PENDING;
}

void Gradients::Detach() {
  const bool is_pending = Status().is_pending != 0;
  if (is_gone() || (kept_.empty() && !is_pending)) return;
  if (is_pending) kept_.emplace_back(INT64_MAX, Memory());
  context_->detached_.push_back(shared_from_this());
  Clear();
}

bool Gradients::HasSparse() const {
  return std::any_of(slots_.begin(), slots_.end(), [](const auto& slot) {
    return slot->is_present && (slot->was_sparse || slot->sparse);
  });
}

int Gradients::Traverse(visitproc visit, void* argument) const {
  for (const auto& slot : slots_)
    for (const py::object* object : {&slot->parameter, &slot->codec, &slot->sent, &slot->buffer,
                                     &slot->sparse, &slot->reduced})
      if (const int code = Visit(*object, visit, argument); code != 0) return code;
  return Visit(like_, visit, argument);
}

void Gradients::Clear() {
  const std::vector<std::shared_ptr<GradientSlot>> gone = std::exchange(slots_, {});
  const py::object like = std::exchange(like_, py::none());
}

}  // namespace farandole::python
