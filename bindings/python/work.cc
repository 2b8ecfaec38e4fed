#include "bindings/python/work.h"

#include <pybind11/stl.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;
namespace {

/// What users get of a result for `target`.
py::object Converted(const py::object& made, const py::object& target) {
  const ArrayType& type = TypeOf(target);
  return type.converts_results ? type.library.attr("result")(made, target) : made;
}

bool IsLike(const Array& array, const Array& source, const std::vector<int64_t>& shape) {
  return IsSame(array.dtype, source.dtype) &&
         array.device.device_type == source.device.device_type &&
         array.device.device_id == source.device.device_id &&
         std::ranges::equal(std::span(array.shape, static_cast<size_t>(array.ndim)), shape);
}

int64_t SizeOf(const Array& array) {
  const int64_t count = std::accumulate(array.shape, array.shape + array.ndim, int64_t{1},
                                        std::multiplies<int64_t>());
  return count * array.dtype.bits / 8;
}

std::string DescribeShape(std::span<const int64_t> shape, bool has_any_rows = false) {
  std::string text;
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i > 0 ? ", " : "") + (i == 0 && has_any_rows ? "rows" : std::to_string(shape[i]));
  return "[" + text + "]";
}

/// Of what was given as out.
std::string Describe(const Array& array) {
  return NameOf(array.dtype) + " of shape " +
         DescribeShape({array.shape, static_cast<size_t>(array.ndim)}) + " on " +
         (array.is_cuda() ? "GPU " + std::to_string(array.device.device_id) : "the CPU") +
         (array.is_contiguous ? "" : ", not contiguous") +
         (array.is_writable && array.type->is_mutable ? "" : ", not writable");
}

std::vector<int64_t> ShapeOfRows(const Array& source, std::span<const int64_t> rows) {
  std::vector<int64_t> shape(source.shape, source.shape + source.ndim);
  shape[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  return shape;
}

Objects ToVector(py::handle objects) {
  Objects made;
  for (const py::handle object : objects)
    made.push_back(py::reinterpret_borrow<py::object>(object));
  return made;
}

py::list ToList(const Objects& objects) {
  py::list made(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) made[i] = objects[i];
  return made;
}

// Callbacks that run, and kStopped once none may begin. A thread that waits for the lock of an
// interpreter that has ended would never get it.
std::atomic<int> callbacks{0};
constexpr int kStopped = 1 << 30;

/// Calls `use` unless the interpreter ends.
template <class Use>
void InInterpreter(const Use& use) {
  if (callbacks.fetch_add(1) < kStopped) use();
  callbacks.fetch_sub(1);
}

/// What the interpreter knows of a thread of the library, from its first call to its end: to make
/// it anew for each call takes as long as the call.
struct KnownThread {
  const PyGILState_STATE before = PyGILState_Ensure();
  PyThreadState* const state = PyEval_SaveThread();
  KnownThread() = default;
  KnownThread(const KnownThread&) = delete;
  KnownThread& operator=(const KnownThread&) = delete;
  ~KnownThread() {
    InInterpreter([this] {
      PyEval_RestoreThread(state);
      PyGILState_Release(before);
    });
  }
};

void CallBack(void* call, int /*code*/) {
  InInterpreter([call] {  // else `call` is leaked
    if (PyGILState_GetThisThreadState() == nullptr) static thread_local const KnownThread known;
    const py::gil_scoped_acquire acquire;
    const auto function = py::reinterpret_steal<py::object>(static_cast<PyObject*>(call));
    try {
      function();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(function);
    }
  });
}

}  // namespace

/// Thread safety: as all of Python's, the GIL.
struct WorkObject {
  PyObject_HEAD;
  PyObject* weak_references;
  std::shared_ptr<Work> work;

  static Work& WorkOf(PyObject* self) { return *reinterpret_cast<WorkObject*>(self)->work; }
  static void Deallocate(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    auto& object = *reinterpret_cast<WorkObject*>(self);
    object.work->python_ = nullptr;  // first: the next may call Python, which may ask for it
    if (object.weak_references != nullptr) PyObject_ClearWeakRefs(self);
    object.~WorkObject();
    type->tp_free(self);
    Py_DECREF(type);
  }
  static PyObject* Wait(PyObject* self, PyObject*) {
    return Guarded([&] { return WorkOf(self).Wait(); });
  }
  static PyObject* Poll(PyObject* self, PyObject*) {
    return Guarded([&] { return py::bool_(WorkOf(self).Poll()); });
  }
  static PyObject* OrderStream(PyObject* self, PyObject*) {
    return Guarded([&] {
      WorkOf(self).OrderStream();
      return py::none();
    });
  }
  static PyObject* WhenDone(PyObject* self, PyObject* call) {
    return Guarded([&] {
      WorkOf(self).WhenDone(py::reinterpret_borrow<py::object>(call));
      return py::none();
    });
  }
  static PyObject* IsComplete(PyObject* self, void*) {
    return Guarded([&] { return py::bool_(WorkOf(self).IsComplete()); });
  }
  static PyTypeObject* MakeType();
  static PyTypeObject* Type() {
    static PyTypeObject* const type = MakeType();
    return type;
  }
  static py::object Make(const std::shared_ptr<Work>& work) {
    if (work->python_ != nullptr) return py::reinterpret_borrow<py::object>(work->python_);
    PyObject* const made = Type()->tp_alloc(Type(), 0);
    if (made == nullptr) throw py::error_already_set();
    new (&reinterpret_cast<WorkObject*>(made)->work) std::shared_ptr<Work>(work);
    work->python_ = made;
    return py::reinterpret_steal<py::object>(made);
  }
};

PyTypeObject* WorkObject::MakeType() {
  static std::array<PyMethodDef, 5> methods = {
      {{"wait", &Wait, METH_NOARGS, nullptr},
       {"poll", &Poll, METH_NOARGS, nullptr},
       {"order_stream", &OrderStream, METH_NOARGS, nullptr},
       {"when_done", &WhenDone, METH_O, nullptr},
       {nullptr, nullptr, 0, nullptr}}};
  static std::array<PyGetSetDef, 2> properties = {
      {{"is_complete", &IsComplete, nullptr, nullptr, nullptr},
       {nullptr, nullptr, nullptr, nullptr, nullptr}}};
  static std::array<PyMemberDef, 2> members = {
      {{"__weaklistoffset__", T_PYSSIZET, offsetof(WorkObject, weak_references), READONLY, nullptr},
       {nullptr, 0, 0, 0, nullptr}}};
  static std::array<PyType_Slot, 6> slots = {
      {{Py_tp_dealloc, reinterpret_cast<void*>(&Deallocate)},
       {Py_tp_methods, methods.data()},
       {Py_tp_getset, properties.data()},
       {Py_tp_members, members.data()},
       {Py_tp_doc, const_cast<char*>("One operation in flight.")},
       {0, nullptr}}};
  static PyType_Spec spec{"farandole._core.Work", sizeof(WorkObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots.data()};
  PyObject* const made = PyType_FromSpec(&spec);
  if (made == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(made);
}

py::object WorkType() {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(WorkObject::Type()));
}

py::object ToPython(const std::shared_ptr<Work>& work) { return WorkObject::Make(work); }

void StopCallingBack() {
  const py::gil_scoped_release release;
  callbacks.fetch_add(kStopped);
  for (int i = 0; i < 1000 && callbacks.load() != kStopped; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void ForgetCallbacks() { callbacks.store(0); }

Work::Work(std::shared_ptr<Context> context, const Submission& submission, uint64_t number)
    : Child(std::move(context)),
      number_(number),
      kind_(submission.options.params.kind),
      op_(submission.options.params.op),
      set_(submission.options.params.set),
      function_(submission.options.FunctionName()),
      name_(py::reinterpret_borrow<py::object>(submission.name)),
      in_place_(submission.in_place),
      is_group_(submission.is_group),
      is_raw_(submission.is_raw),
      is_news_(!submission.is_internal && submission.failed.is_none()),
      finish_(py::reinterpret_borrow<py::object>(submission.finish)) {
  ReadAll(submission);
  if (submission.out.is_none()) {
    MakeResults();
  } else {
    UseOutputs(submission);
  }
}

Work::~Work() { Release(); }

bool Work::RowsMayDiffer() const {
  return kind_ == FARANDOLE_ALLGATHER || kind_ == FARANDOLE_ALLTOALL;
}

/// Reads every tensor; where one cannot be taken as it is the library makes copies, or says why
/// not.
void Work::ReadAll(const Submission& submission) {
  if (submission.is_group) {
    targets_ = ToVector(submission.tensors);
  } else {
    targets_.push_back(py::reinterpret_borrow<py::object>(submission.tensors));
  }
  if (targets_.empty()) return;
  sources_ = ReadEach(targets_);
  if (!CanUse(sources_, in_place_)) {
    if (std::ranges::any_of(sources_, [this](const Array& one) { return IsNoSumOfPairs(one); }))
      Refuse(sources_);
    const py::object copies =
        TypeOf(targets_[0])
            .library.attr("canonical")(ToList(targets_), function_, in_place_, !Reduces(kind_));
    sources_ = ReadEach(ToVector(copies));
    if (!CanUse(sources_, false)) Refuse(sources_);
  }
  for (const Array& array : sources_) {
    if (array.ndim == 0 && kind_ != FARANDOLE_ALLREDUCE && kind_ != FARANDOLE_BROADCAST)
      throw py::value_error(function_ +
                            " does not support scalar inputs: a scalar has no rows; reshape it to "
                            "[1]");
  }
}

/// What the library has not refused: arrays that nothing can read, or of several devices.
void Work::Refuse(const Arrays& arrays) const {
  for (const Array& array : arrays) {
    if (IsNoSumOfPairs(array))
      throw py::value_error(function_ + ": " + NameOf(array.dtype) +
                            " is reduced by Sum and by Average only");
    if (!array.object)
      throw py::type_error(function_ + ": an array of type " +
                           std::string(py::str(py::type::of(targets_[0]).attr("__name__"))) +
                           " cannot be read");
    if (!CanTake(array.dtype))
      throw py::type_error(function_ + ": dtype " + NameOf(array.dtype) + " is not supported");
  }
  throw py::value_error(function_ + ": the " + std::to_string(arrays.size()) +
                        " arrays cannot travel together; those of one call must be on one device");
}

/// What cannot be read has no object.
Arrays Work::ReadEach(const Objects& objects) const {
  Arrays arrays;
  arrays.reserve(objects.size());
  for (const py::object& object : objects) {
    std::optional<Array> read = Read(object);
    arrays.push_back(read ? std::move(*read) : Array());
  }
  return arrays;
}

/// Complex numbers have no order, and no product as pairs.
bool Work::IsNoSumOfPairs(const Array& array) const {
  return array.object && TravelsAsPairs(kind_, array.dtype) && ToNumber(array.dtype) &&
         !CanTake(array.dtype);
}

bool Work::CanTake(DLDataType dtype) const {
  const std::optional<int32_t> number = ToNumber(dtype);
  if (TravelsAsPairs(kind_, dtype) && (op_ == FARANDOLE_SUM || op_ == FARANDOLE_AVERAGE))
    return number.has_value();
  return number && (!Reduces(kind_) || *number <= FARANDOLE_FLOAT64);
}

bool Work::CanUse(const Arrays& arrays, bool in_place) const {
  for (const Array& array : arrays) {
    if (!array.object || !array.is_contiguous) return false;
    if (in_place && (!array.is_writable || !array.type->is_mutable)) return false;
    if (!CanTake(array.dtype)) return false;
    const DLDevice device = array.device;
    const DLDevice first = arrays.front().device;
    if (device.device_type != first.device_type || device.device_id != first.device_id)
      return false;
  }
  return true;
}

void Work::MakeResults() {
  if (uses_frontends_memory()) allocated_.resize(sources_.size());
  if (in_place_ || allocates() || kind_ == FARANDOLE_BARRIER) return;
  results_.reserve(sources_.size());
  for (const Array& source : sources_) results_.push_back(MakeLike(source, ResultShape(source)));
}

/// Memory of the caller's, which is never copied: what cannot be used is refused. How many rows
/// come is known when the operation runs.
void Work::UseOutputs(const Submission& submission) {
  if (is_group_) {
    outputs_ = ToVector(submission.out);
  } else {
    outputs_.push_back(py::reinterpret_borrow<py::object>(submission.out));
  }
  rows_ = submission.rows;
  results_ = ReadEach(outputs_);
  if (results_.size() != sources_.size())
    throw py::value_error(function_ + ": " + std::to_string(results_.size()) +
                          " arrays as out for " + std::to_string(sources_.size()) + " tensors");
  for (size_t i = 0; i < results_.size(); ++i) {
    std::vector<int64_t> shape = ResultShape(sources_[i]);
    const Array& array = results_[i];
    const bool is_read = static_cast<bool>(array.object);
    if (is_read && RowsMayDiffer() && array.ndim > 0) shape[0] = array.shape[0];
    if (!is_read || !array.is_contiguous || !array.is_writable || !array.type->is_mutable ||
        !IsLike(array, sources_[i], shape))
      throw py::value_error(function_ + ": out cannot be used; expected a writable contiguous " +
                            NameOf(sources_[i].dtype) + " array of shape " +
                            DescribeShape(shape, RowsMayDiffer()) + " where the tensor is" +
                            (is_read ? ", got " + Describe(array) : std::string()));
  }
}

/// For the C ABI; none if the caller gave none.
std::vector<farandole_output> Work::Outputs() const {
  if (!has_outputs()) return {};
  std::vector<farandole_output> outputs;
  const size_t ranks = rows_.size() / results_.size();
  for (size_t i = 0; i < results_.size(); ++i) {
    const int64_t* const rows = rows_.empty() ? nullptr : &rows_[i * ranks];
    outputs.push_back({results_[i].data, SizeOf(results_[i]), rows});
  }
  return outputs;
}

/// Where rows may differ, that of as many rows as the source has.
std::vector<int64_t> Work::ResultShape(const Array& source) const {
  std::vector<int64_t> shape(source.shape, source.shape + source.ndim);
  if (kind_ == FARANDOLE_REDUCESCATTER)
    Check(farandole_output_rows(context_->get(), kind_, set_, shape[0], shape.data()));
  return shape;
}

py::object Work::Wait() {
  const auto self = shared_from_this();  // longer than the lock
  if (!wait_mutex_.try_lock()) {
    const WaitGuard guard(waiting_);
    WaitInSlices(-1, [&](double slice_s) {
      const auto slice = std::chrono::duration<double>(slice_s);
      return wait_mutex_.try_lock_for(slice) ? FARANDOLE_OK : FARANDOLE_PENDING;
    });
  }
  const std::lock_guard lock(wait_mutex_, std::adopt_lock);
  RefuseSpent();
  if (is_gone()) context_->ThrowClosed();
  try {
    py::object result;
    {
      const WaitGuard guard(waiting_);
      farandole_work* const handle = handle_;
      std::optional<farandole_stream> stream;
      if (is_cuda()) stream = StreamNow();
      const int known = stream ? FARANDOLE_PENDING : farandole_is_complete(handle);
      Check(known != FARANDOLE_PENDING ? known : WaitInSlices(-1, [&](double slice_s) {
        return stream ? farandole_wait_on(handle, &*stream, slice_s)
                      : farandole_wait(handle, slice_s);
      }));
      result = TakeResults();
    }
    Spend();
    return result;
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_Exception) && (is_gone() || farandole_poll(handle_) != 0)) Spend();
    throw;
  }
}

farandole_stream Work::StreamNow() const {
  const Array& array = sources_.front();
  return CurrentStream(*array.type, array.object, array.device);
}

void Work::RefuseSpent() const {
  if (is_spent_)
    throw py::value_error("Handle of " + Label() + " was not created or has been cleared.");
}

bool Work::Poll() const {
  RefuseSpent();
  return is_gone() || farandole_poll(handle_) != 0;
}

void Work::OrderStream() const {
  if (is_gone() || !is_cuda()) return;
  const farandole_stream stream = StreamNow();
  Check(farandole_wait_on(handle_, &stream, 0));
}

void Work::WhenDone(const py::object& call) {
  PyObject* const held = call.inc_ref().ptr();
  if (is_spent_ || is_gone()) return CallBack(held, FARANDOLE_OK);
  const int code = farandole_when_finished(handle_, &CallBack, held);
  if (code != FARANDOLE_OK) call.dec_ref();
  Check(code);
}

bool Work::IsComplete() const {
  return is_gone() || farandole_is_complete(handle_) != FARANDOLE_PENDING;
}

std::string Work::Label() const {
  return name_.is_none() ? function_ : function_ + " \"" + std::string(py::str(name_)) + "\"";
}

bool Work::Matches(const py::object& name) const { return !name_.is_none() && name_.equal(name); }

/// Where nothing was copied one call is enough for all, without one of Python's functions.
void Work::NoteWrites() {
  if (sources_.empty() || !sources_.front().type->notes_writes) return;
  const py::object& in_place = sources_.front().type->written_in_place;
  const auto is_target = [&](const Array& source) {
    return source.type->library.is(sources_.front().type->library) &&
           source.object.is(targets_[static_cast<size_t>(&source - sources_.data())]);
  };
  const bool is_copied = !std::ranges::all_of(sources_, is_target);
  if (is_raw_ && !is_copied) return;
  if (!in_place.is_none() && !is_copied) {
    const auto all =
        py::reinterpret_steal<py::object>(targets_.size() == 1 ? PyTuple_Pack(1, targets_[0].ptr())
                                                               : ToList(targets_).release().ptr());
    if (!all || !py::reinterpret_steal<py::object>(PyObject_CallOneArg(in_place.ptr(), all.ptr())))
      throw py::error_already_set();
    return;
  }
  for (size_t i = 0; i < sources_.size(); ++i) {
    const ArrayType& type = TypeOf(targets_[i]);
    if (is_raw_ && is_target(sources_[i])) continue;
    if (type.notes_writes) type.library.attr("written")(targets_[i], sources_[i].object);
  }
}

/// What the caller gets. May be asked again where it was interrupted.
py::object Work::TakeResults() {
  if (allocates()) return TakeAllocated();
  if (has_outputs()) return TakeOutputs();
  py::object result = py::none();
  if (in_place_) {
    NoteWrites();
    if (is_group_) {
      result = ToList(targets_);
    } else {
      result = targets_[0];
    }
  } else if (!results_.empty()) {
    py::list arrays;
    for (size_t i = 0; i < results_.size(); ++i) {
      py::object array = Converted(results_[i].object, targets_[i]);
      if (sources_[i].is_cuda() && py::hasattr(sources_[i].type->library, "use_here"))
        array = sources_[i].type->library.attr("use_here")(array, targets_[i]);
      if (!is_group_) {
        result = std::move(array);
        break;
      }
      arrays.append(array);
    }
    if (is_group_) result = std::move(arrays);
  }
  return finish_.is_none() ? result : finish_(result);
}

py::object Work::TakeOutputs() {
  for (size_t i = 0; i < results_.size(); ++i) {
    const ArrayType& type = *results_[i].type;
    if (type.notes_writes && !is_raw_)
      type.library.attr("written")(outputs_[i], results_[i].object);
  }
  py::object result = is_group_ ? py::object(ToList(outputs_)) : outputs_[0];
  if (finish_.is_none()) return result;
  if (!RowsMayDiffer()) return finish_(result);
  py::list all_rows;
  for (size_t i = 0; i < results_.size(); ++i) all_rows.append(py::cast(ReceivedRows(i)));
  return finish_(result, is_group_ ? py::object(all_rows) : py::object(all_rows[0]));
}

void* Work::AllocateResult(void* work, int32_t tensor, const int64_t* rows, int32_t ranks,
                           int64_t /*bytes*/) {
  auto& self = *static_cast<Work*>(work);
  const auto index = static_cast<size_t>(tensor);
  const Array& source = self.sources_[index];
  ManagedTensor& made = self.allocated_[index];
  made = Allocate(*source.type, source.device, source.dtype,
                  ShapeOfRows(source, {rows, static_cast<size_t>(ranks)}));
  return made == nullptr ? nullptr : AddressOf(made->dl_tensor);
}

std::vector<int64_t> Work::ReceivedRows(size_t index) const {
  const int32_t ranks = context_->InfoOf(set_).size;
  std::vector<int64_t> rows(static_cast<size_t>(ranks));
  Check(farandole_received_rows(handle_, static_cast<int32_t>(index), rows.data(), ranks));
  return rows;
}

/// Each part once, as it may be asked for again after an interruption.
Work::Received& Work::ReceivedOf(size_t index) {
  Received& received = received_[index];
  if (received.array) return received;
  received.rows = ReceivedRows(index);
  const Array& source = sources_[index];
  if (uses_frontends_memory()) {
    received.array = Adopted(*source.type, std::move(allocated_[index]));
    return received;
  }
  if (received.memory == nullptr) {
    farandole_buffer* buffer = nullptr;
    Check(farandole_take_result(handle_, static_cast<int32_t>(index), &buffer));
    received.memory =
        std::make_shared<ResultMemory>(buffer, source, ShapeOfRows(source, received.rows));
  }
  received.array = ResultMemory::ToArray(received.memory, TypeOf(targets_[index]), targets_[index]);
  return received;
}

py::object Work::TakeAllocated() {
  py::list arrays;
  py::list all_rows;
  for (size_t i = 0; i < sources_.size(); ++i) {
    const Received& received = ReceivedOf(i);
    py::object array = Converted(received.array, targets_[i]);
    if (received.memory == nullptr && py::hasattr(sources_[i].type->library, "use_here"))
      array = sources_[i].type->library.attr("use_here")(array, targets_[i]);
    arrays.append(array);
    all_rows.append(py::cast(received.rows));
  }
  py::object result = is_group_ ? py::object(arrays) : py::object(arrays[0]);
  if (finish_.is_none()) return result;
  return finish_(result, is_group_ ? py::object(all_rows) : py::object(all_rows[0]));
}

/// After the outcome has been seen. On a GPU the memory may be in use after that.
void Work::Spend() {
  const auto self = shared_from_this();
  is_spent_ = true;
  context_->unseen_failures_.erase(number_);
  finish_ = py::none();
  if (!IsComplete()) return;
  context_->Forget(*this);
  DropMemory();
}

void Work::DropMemory() {
  // What goes may call Python, which may call this again.
  const auto sources = std::exchange(sources_, {});
  const auto results = std::exchange(results_, {});
  const auto received = std::exchange(received_, {});
  const auto allocated = std::exchange(allocated_, {});
  const auto targets = std::exchange(targets_, {});
  const auto outputs = std::exchange(outputs_, {});
  Release();
}

/// A failure that nobody has seen is noted: this may be the last time anybody looks.
void Work::NoteFailure() {
  if (!is_news_ || is_spent_ || is_gone()) return;
  const int code = farandole_is_complete(handle_);
  if (code == FARANDOLE_OK || code == FARANDOLE_PENDING) return;
  const std::string error = std::string(ToText(farandole_last_error()));
  const bool says_name =
      name_.is_none() || error.find("\"" + std::string(py::str(name_)) + "\"") != std::string::npos;
  context_->unseen_failures_[number_] = says_name ? error : Label() + ": " + error;
}

bool Work::Release() {
  if (waiting_ > 0) return false;
  if (!is_gone()) farandole_work_release(handle_);
  handle_ = nullptr;
  return true;
}

}  // namespace farandole::python
