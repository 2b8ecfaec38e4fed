#include "bindings/python/context.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "bindings/python/arrays.h"
#include "bindings/python/errors.h"
#include "bindings/python/gradients.h"
#include "bindings/python/work.h"

namespace farandole::python {
namespace py = pybind11;
namespace {

// Guarded by the GIL.
int current_generation = 0;  // Counts forks.
int contexts_made = 0;

/// A store of Python's for the library, which calls it on the thread that is inside Init. What its
/// functions raise ends Init. They give None, or False, if they take longer: they are asked again.
class PythonStore {
 public:
  explicit PythonStore(py::object calls) : calls_(std::move(calls)) {}

  farandole_store ForC() { return {this, &Set, &Wait, &Get}; }

  /// Throws what a function has raised, if any.
  void Rethrow() {
    if (error_) throw std::exchange(error_, std::nullopt).value();
  }

 private:
  // What is raised is kept, as no exception may pass the C ABI. PENDING: an interrupted call, which
  // is made again.
  template <class Call>
  static int Guard(void* user, const Call& call) {
    const py::gil_scoped_acquire acquire;
    auto& self = *static_cast<PythonStore*>(user);
    try {
      return call(self.calls_);
    } catch (py::error_already_set& error) {
      const bool is_error = error.matches(PyExc_Exception);
      self.error_.emplace(std::move(error));
      return is_error ? FARANDOLE_INTERNAL : FARANDOLE_PENDING;
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
      self.error_.emplace();
      return FARANDOLE_INTERNAL;
    }
  }
  static int Set(void* user, const char* key, const void* value, size_t size) {
    return Guard(user, [&](const py::object& calls) {
      const py::object done =
          calls.attr("set")(key, py::bytes(static_cast<const char*>(value), size));
      return done.cast<bool>() ? FARANDOLE_OK : FARANDOLE_PENDING;
    });
  }
  static int Wait(void* user, const char* key, double timeout_s) {
    return Guard(user, [&](const py::object& calls) {
      return calls.attr("wait")(key, timeout_s).cast<bool>() ? FARANDOLE_OK : FARANDOLE_PENDING;
    });
  }
  static int Get(void* user, const char* key, void* value, size_t capacity, size_t* size) {
    return Guard(user, [&](const py::object& calls) {
      const py::object got = calls.attr("get")(key);
      if (got.is_none()) return FARANDOLE_PENDING;
      const auto bytes = got.cast<std::string>();
      *size = bytes.size();
      std::memcpy(value, bytes.data(), std::min(capacity, bytes.size()));
      return FARANDOLE_OK;
    });
  }

  py::object calls_;
  std::optional<py::error_already_set> error_;
};

/// @param handle  Of a join that was begun, if an exception ends this.
std::shared_ptr<Context> JoinJob(const InitArguments& arguments, farandole_context*& handle) {
  farandole_init_options options = FARANDOLE_INIT_OPTIONS;
  options.rank = arguments.rank.value_or(-1);
  options.size = arguments.size.value_or(-1);
  options.local_rank = arguments.local_rank.value_or(-1);
  options.apart = arguments.apart ? 1 : 0;
  options.timeout_s = arguments.timeout_s;
  options.in_order = arguments.in_order ? 1 : 0;
  options.slots = arguments.slots;
  options.is_elastic = arguments.is_elastic ? 1 : 0;
  if (arguments.members) options.members = arguments.members->c_str();
  if (arguments.address) options.address = arguments.address->c_str();
  PythonStore python_store(arguments.store);
  const farandole_store store = python_store.ForC();
  if (!arguments.store.is_none()) options.store = &store;
  int code = FARANDOLE_PENDING;
  while (code == FARANDOLE_PENDING) {
    code = WaitInSlices(kSliceSeconds, [&](double slice_s) {
      return farandole_init_for(&options, slice_s, &handle);
    });
    python_store.Rethrow();  // before the library's error, which comes of it
  }
  Check(code);
  return std::make_shared<Context>(std::exchange(handle, nullptr));
}

}  // namespace

Context::Context(farandole_context* handle) : handle_(handle), generation_(current_generation) {
  ++contexts_made;
  Check(farandole_get_topology(handle, &topology_));
}

// Waits for the other ranks no longer than a rank that is alone needs: Ctrl-C could not end it.
Context::~Context() {
  try {
    CloseAtExit(1, FARANDOLE_EXIT_BY_OTHER, "");
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("farandole._core.Context");
  }
}

// Any number of threads may be joining jobs apart.
std::shared_ptr<Context> Context::Init(const InitArguments& arguments) {
  farandole_context* handle = nullptr;
  try {
    return JoinJob(arguments, handle);
  } catch (...) {
    py::gil_scoped_release release;
    farandole_release(handle);
    throw;
  }
}

std::shared_ptr<Context> Context::Reinit() {
  farandole_context* const handle = get();
  for (const std::shared_ptr<Work>& work : in_flight_) work->NoteFailure();
  farandole_context* next = nullptr;
  int code = FARANDOLE_PENDING;
  closing_ = true;
  try {
    const CallGuard guard(*this);
    while (code == FARANDOLE_PENDING) {
      code = WaitInSlices(kSliceSeconds, [&](double slice_s) {
        const farandole_reinit_options options = {sizeof options, slice_s};
        return farandole_reinit(handle, &options, &next);
      });
    }
  } catch (...) {
    py::gil_scoped_release release;
    farandole_release(next);
    throw;
  }
  if (code == FARANDOLE_INVALID_ARGUMENT) closing_ = false;  // nothing has begun
  if (code != FARANDOLE_INVALID_ARGUMENT && !is_closed()) Release();
  Check(code);
  return std::make_shared<Context>(next);
}

uint64_t Context::GenerationNumber() const {
  uint64_t number = 0;
  Check(farandole_generation_number(get(), &number));
  return number;
}

bool Context::IsChangeDue() const {
  int is_due = 0;
  Check(farandole_change_is_due(get(), &is_due));
  return is_due != 0;
}

std::string Context::Members(int rank) const {
  const char* members = "";
  Check(farandole_members(get(), rank, &members));
  return members;
}

std::vector<std::shared_ptr<Context>> Context::InProcess(int size) {
  if (size < 1) throw py::value_error("size must be at least 1");
  std::vector<farandole_context*> handles(static_cast<size_t>(size));
  Check(farandole_init_in_process(size, handles.data()));
  std::vector<std::shared_ptr<Context>> contexts;
  for (farandole_context* handle : handles) contexts.push_back(std::make_shared<Context>(handle));
  return contexts;
}

void Context::ForgetAll() {
  ++current_generation;
  DescribeThreads();
  ForgetCallbacks();
}

bool Context::is_forgotten() const { return generation_ != current_generation; }

bool Context::is_open() const { return !closing_ && !is_closed(); }

bool Context::is_closed() const { return handle_ == nullptr || is_forgotten(); }

farandole_context* Context::get() const {
  if (!is_open()) ThrowClosed();
  return handle_;
}

void Context::ThrowClosed() const {
  const bool is_past = handle_ == nullptr && !is_forgotten() && contexts_made > made_at_end_;
  if (!is_past) ThrowInternal(kClosed);
  ThrowAs(
      FARANDOLE_GENERATION_ENDED,
      "this is of a generation of the job that has been shut down, and init() has begun another "
      "one: make it again there");
}

void Context::Close() { (void)CloseWithin(-1); }  // true: there is no limit

void Context::CloseAtExit(double limit_s, int reason, const std::string& cause) {
  if (CloseWithin(limit_s, reason, cause.c_str())) return;
  handle_ = nullptr;
  // The engine may still use the memory of what is in flight: leaked.
  (void)new auto(std::exchange(in_flight_, {}));
  (void)new auto(std::exchange(detached_, {}));
}

bool Context::CloseWithin(double limit_s, int reason, const char* cause) {
  if (is_closed()) return true;
  if (!closing_)
    for (const std::shared_ptr<Work>& work : in_flight_) work->NoteFailure();
  closing_ = true;
  farandole_context* const handle = handle_;
  int code = FARANDOLE_OK;
  {
    const CallGuard guard(*this);
    code = WaitInSlices(limit_s, [&](double slice_s) {
      return farandole_leave_at_exit(handle, reason, cause, slice_s);
    });
  }
  if (code == FARANDOLE_PENDING) return false;
  if (!is_closed()) Release();  // else another thread has
  Check(code);
  return true;
}

void Context::Release() {
  farandole_context* const handle = std::exchange(handle_, nullptr);
  made_at_end_ = contexts_made;
  prepared_.clear();
  bool all_released = true;
  for (Child* child = children_; child != nullptr; child = child->older_)
    all_released = child->Release() && all_released;
  // A thread still inside a call keeps everything: a small leak instead of a dangling handle.
  if (all_released && calls_ == 0) {
    py::gil_scoped_release release;
    farandole_release(handle);
  }
  for (const std::shared_ptr<Work>& work : in_flight_) work->is_held_ = false;
  // Last: what goes with them may call Python.
  const auto works = std::exchange(in_flight_, {});
  const auto detached = std::exchange(detached_, {});
  const auto interrupted = std::exchange(interrupted_, {});
}

void Context::RaiseIfEnded() const { Check(farandole_check(get())); }

py::tuple Context::Topology() const {
  const farandole_topology& t = topology_;
  return py::make_tuple(t.rank, t.size, t.local_rank, t.local_size, t.cross_rank, t.cross_size);
}

std::pair<int, int> Context::SlotRange() const {
  std::pair<int, int> slots;
  Check(farandole_slot_range(get(), &slots.first, &slots.second));
  return slots;
}

py::dict Context::Counters() const {
  std::array<const char*, 128> names{};
  std::array<int64_t, 128> values{};
  const int32_t capacity = static_cast<int32_t>(names.size());
  const int32_t count = farandole_counters(get(), names.data(), values.data(), capacity);
  py::dict counters;
  for (size_t i = 0; i < static_cast<size_t>(std::min(count, capacity)); ++i)
    counters[names[i]] = values[i];
  return counters;
}

std::shared_ptr<ResultMemory> Context::Allocate(int64_t bytes) {
  farandole_context* handle = get();
  const CallGuard guard(*this);
  farandole_buffer* buffer = nullptr;
  int code = FARANDOLE_OK;
  {
    py::gil_scoped_release release;  // many fresh pages take a while
    code = farandole_buffer_allocate(handle, bytes, &buffer);
  }
  Check(code);
  return std::make_shared<ResultMemory>(buffer);
}

std::string Context::Setting(const std::string& name) const {
  const char* value = nullptr;
  Check(farandole_get_setting(get(), name.c_str(), &value));
  return value;
}

std::vector<std::array<std::string, 3>> Context::Settings() const {
  std::vector<std::array<std::string, 3>> all;
  const char* name = nullptr;
  const char* value = nullptr;
  const char* initial = nullptr;
  for (int64_t index = 0;; ++index) {
    Check(farandole_setting_at(get(), index, &name, &value, &initial));
    if (name == nullptr) return all;
    all.push_back({name, value, initial});
  }
}

void Context::StartTimeline(const std::string& path, bool mark_cycles) {
  farandole_context* handle = get();
  const CallGuard guard(*this);
  int code = FARANDOLE_OK;
  {
    py::gil_scoped_release release;  // a file may be slow
    code = farandole_timeline_start(handle, path.c_str(), mark_cycles ? 1 : 0);
  }
  Check(code);
}

void Context::StopTimeline() {
  farandole_context* handle = get();
  const CallGuard guard(*this);
  int code = FARANDOLE_OK;
  {
    py::gil_scoped_release release;
    code = farandole_timeline_stop(handle);
  }
  Check(code);
}

void Context::SetTimeout(double timeout_s) { Check(farandole_set_timeout(get(), timeout_s)); }

int Context::Join() {
  farandole_context* handle = get();
  const CallGuard guard(*this);
  int last_rank = -1;
  Check(WaitInSlices(-1,
                     [&](double slice_s) { return farandole_join(handle, slice_s, &last_rank); }));
  return last_rank;
}

void Child::Join(std::shared_ptr<Context> context) {
  context_ = std::move(context);
  newer_ = nullptr;
  older_ = std::exchange(context_->children_, this);
  if (older_ != nullptr) older_->newer_ = this;
}

void Child::Leave() {
  if (older_ != nullptr) older_->newer_ = newer_;
  (newer_ != nullptr ? newer_->older_ : context_->children_) = older_;
}

void Child::MoveTo(std::shared_ptr<Context> context) {
  Leave();
  Join(std::move(context));
}

void Context::ReleaseCompleted() {
  while (!in_flight_.empty()) {
    const std::shared_ptr<Work> oldest = in_flight_.front();
    if (oldest->waiting_ > 0 || !oldest->IsComplete()) break;
    oldest->NoteFailure();
    Forget(*oldest);
    if (oldest->is_spent_) oldest->DropMemory();
  }
  std::list<std::shared_ptr<Gradients>> gone;  // What goes with them may call Python.
  for (auto it = detached_.begin(); it != detached_.end();) {
    const auto next = std::next(it);
    Gradients& gradients = **it;
    if (gradients.handle_ == nullptr || (gradients.HasEnded() && gradients.IsComplete()))
      gone.splice(gone.end(), detached_, it);
    it = next;
  }
  for (const std::shared_ptr<Gradients>& gradients : gone)
    const auto memory = std::exchange(gradients->kept_, {});
}

std::vector<std::string> Context::TakeUnseenFailures() {
  std::vector<std::string> texts;
  for (auto& [_, text] : std::exchange(unseen_failures_, {})) texts.push_back(std::move(text));
  return texts;
}

py::object Context::FindInterrupted(const py::object& name) const {
  for (auto it = interrupted_.rbegin(); it != interrupted_.rend(); ++it)
    if (!(*it)->is_spent_ && (name.is_none() || (*it)->Matches(name))) return ToPython(*it);
  return py::none();
}

bool Context::IsInFlight(const py::object& name) const {
  return std::ranges::any_of(in_flight_, [&](const std::shared_ptr<Work>& work) {
    return work->Matches(name) && !work->IsComplete();
  });
}

void Context::Hold(const std::shared_ptr<Work>& work) {
  work->held_at_ = in_flight_.insert(in_flight_.end(), work);
  work->is_held_ = true;
}

void Context::Forget(Work& work) {
  if (!work.is_held_) return;
  work.is_held_ = false;
  const std::shared_ptr<Work> last = std::move(*work.held_at_);
  in_flight_.erase(work.held_at_);
}

Context::SetInfo Context::InfoOf(uint32_t set) const {
  if (set == 0) return {topology_.size, topology_.rank};
  const auto found = sets_.find(set);
  return found == sets_.end() ? SetInfo{topology_.size, topology_.rank} : found->second;
}

void Context::WaitForSet(farandole_work* work) {
  const CallGuard guard(*this);
  const struct Released {
    farandole_work* work;
    const Context& context;
    ~Released() {
      if (!context.is_closed()) farandole_work_release(work);
    }
  } released{work, *this};
  Check(WaitInSlices(-1, [&](double slice_s) { return farandole_wait(work, slice_s); }));
}

uint32_t Context::AddSet(const std::vector<int32_t>& ranks) {
  farandole_work* work = nullptr;
  const auto count = static_cast<int32_t>(ranks.size());
  Check(farandole_set_add(get(), ranks.data(), count, &work));
  WaitForSet(work);
  uint32_t uid = 0;
  if (farandole_set_find(get(), ranks.data(), count, &uid) != FARANDOLE_OK)
    ThrowAs(FARANDOLE_ABORTED,
            "the new process set has ended already: one of its ranks left the job");
  SetInfo info{count, -1};
  int32_t below = 0;
  for (const int32_t rank : ranks) {
    if (rank < topology_.rank) ++below;
    if (rank == topology_.rank) info.rank = 0;
  }
  if (info.rank == 0) info.rank = below;
  sets_[uid] = info;
  return uid;
}

void Context::RemoveSet(uint32_t uid) {
  farandole_work* work = nullptr;
  Check(farandole_set_remove(get(), uid, &work));
  WaitForSet(work);
  std::erase_if(prepared_, [uid](const auto& item) { return item.second.params.set == uid; });
  sets_.erase(uid);
}

const char* Options::FunctionName() const {
  static constexpr std::array<const char*, 6> kKinds = {"allreduce",     "broadcast", "allgather",
                                                        "reducescatter", "alltoall",  "barrier"};
  return function.empty() ? kKinds.at(static_cast<size_t>(params.kind)) : function.c_str();
}

namespace {

/// The name without a subclass of str, which may compare as it likes; null for None.
/// @throw TypeError
py::object ExactText(py::handle name) {
  if (PyUnicode_CheckExact(name.ptr())) return py::reinterpret_borrow<py::object>(name);
  if (name.is_none()) return {};
  if (!PyUnicode_Check(name.ptr()))
    throw py::type_error("name must be a str or None, not " + std::string(py::repr(name)));
  auto text = py::reinterpret_steal<py::object>(PyUnicode_FromObject(name.ptr()));
  if (!text) throw py::error_already_set();
  return text;
}

/// Its UTF-8 text; null for null.
/// @throw ValueError
const char* NameText(const py::object& name) {
  if (!name) return nullptr;
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text != nullptr && std::memchr(text, '\0', static_cast<size_t>(size)) == nullptr) return text;
  PyErr_Clear();
  throw py::value_error("name " + std::string(py::repr(name)) +
                        " must not hold NUL or lone surrogates");
}

/// Of Options, whose pointers are null. All bytes, so that a new field counts: the struct has no
/// padding, and where a value has several representations the core compares once more.
bool IsSame(const farandole_params& a, const farandole_params& b) {
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof a) == 0;
}

int64_t CountOf(const Array& array) {
  return std::accumulate(array.shape, array.shape + array.ndim, int64_t{1}, std::multiplies<>());
}

/// What the core is told of an element: itself, or the two parts of a complex one.
int64_t PartsOf(int32_t kind, DLDataType dtype) { return TravelsAsPairs(kind, dtype) ? 2 : 1; }

/// The dtype that the core is told.
std::optional<int32_t> NumberFor(int32_t kind, DLDataType dtype) {
  if (!TravelsAsPairs(kind, dtype)) return ToNumber(dtype);
  return ToNumber({kDLFloat, static_cast<uint8_t>(dtype.bits / 2), 1});
}

/// The shape that the core is told. @param is_flat  The ranks' shapes may differ.
std::vector<int64_t> ShapeFor(int32_t kind, const Array& array, bool is_flat) {
  const int64_t parts = PartsOf(kind, array.dtype);
  if (is_flat) return {parts * CountOf(array)};
  std::vector<int64_t> shape(array.shape, array.shape + array.ndim);
  if (parts > 1) shape.push_back(parts);
  return shape;
}

bool IsLike(int32_t kind, const Array& array, int32_t dtype, const std::vector<int64_t>& shape,
            bool is_flat) {
  if (NumberFor(kind, array.dtype) != dtype) return false;
  const int64_t parts = PartsOf(kind, array.dtype);
  if (is_flat) return shape.size() == 1 && shape[0] == parts * CountOf(array);
  return std::ssize(shape) == array.ndim + parts - 1 &&
         std::equal(array.shape, array.shape + array.ndim, shape.begin());
}

std::string LabelOf(const Submission& submission, size_t i, size_t count) {
  if (!submission.labels.is_none()) return OptionalText(submission.labels[py::int_(i)]).c_str();
  return count > 1 ? std::to_string(i) : std::string();
}

/// Of an alltoall, in Horovod's words; the core checks the rest.
/// @param splits  Empty: the same number of rows to each rank.
/// @throw ValueError
void CheckRows(const Arrays& arrays, const std::vector<int64_t>& splits, size_t size) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    const int64_t rows = arrays[i].shape[0];
    if (splits.empty()) {
      if (rows % static_cast<int64_t>(size) == 0) continue;
      throw py::value_error(
          "alltoall: splits not provided, but first dimension of tensor is not an even multiple of "
          "the number of workers: " +
          std::to_string(rows) + " rows for " + std::to_string(size) + " ranks");
    }
    int64_t left = rows;
    for (size_t r = 0; r < size && left >= 0; ++r) {
      const int64_t split = splits[i * size + r];
      if (split < 0)
        throw py::value_error("alltoall: splits must not be negative: " +
                              std::string(py::str(py::cast(splits))));
      left -= split;
    }
    if (left >= 0) continue;
    throw py::value_error(
        "alltoall: Sum of splits entries is greater than the first dimension of tensor: " +
        std::string(py::str(py::cast(splits))) + " for " + std::to_string(rows) + " rows");
  }
}

/// farandole_prepare, which an unnamed operation may have to wait for, interruptibly.
int Prepare(farandole_context* context, const farandole_params& params, const char* name,
            const std::vector<farandole_tensor>& tensors, farandole_operation** operation,
            uint32_t* version) {
  const auto count = static_cast<int32_t>(tensors.size());
  return WaitInSlices(-1, [&](double slice_s) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(slice_s);
    for (;;) {
      const int code =
          farandole_prepare(context, &params, name, tensors.data(), count, operation, version);
      if (code != FARANDOLE_PENDING || std::chrono::steady_clock::now() >= end) return code;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
}

}  // namespace

bool Context::Name::operator==(const Name& other) const {
  return kind == other.kind && set == other.set && function == other.function &&
         (text.is(other.text) || PyUnicode_Compare(text.ptr(), other.text.ptr()) == 0);
}

size_t Context::Name::Hash::operator()(const Name& name) const {
  const size_t number = (size_t{name.set} << 8) + static_cast<size_t>(name.kind);
  return static_cast<size_t>(PyObject_Hash(name.text.ptr())) ^ (number * 0x9e3779b97f4a7c15U);
}

/// Names may be new all the time: those that were not used since the last call of this go. A
/// quarter more names than are left call it again; were it twice as many, each call would leave as
/// many as the last one did and those in use just then, without end.
void Context::DropUnused() {
  std::erase_if(prepared_, [](const auto& one) { return !one.second.is_used; });
  for (auto& [_, prepared] : prepared_) prepared.is_used = false;
  drop_above_ = prepared_.size() + std::max(kPrepared, prepared_.size() / 4);
}

/// The operation prepared for this call: found by its name where it was last described likewise,
/// else prepared.
Context::Prepared& Context::PreparedFor(const Submission& submission, Work& work,
                                        Prepared& unnamed) {
  farandole_params params = submission.options.params;
  params.device = work.is_cuda() ? FARANDOLE_CUDA : FARANDOLE_CPU;
  std::vector<int64_t> splits = submission.splits.value_or(std::vector<int64_t>());
  if (params.kind == FARANDOLE_ALLTOALL)
    CheckRows(work.sources_, splits, static_cast<size_t>(InfoOf(params.set).size));
  Prepared* prepared = &unnamed;
  Name name{ExactText(submission.name), params.kind, params.set, submission.options.function};
  if (name.text) {
    const auto found = prepared_.find(name);
    if (found != prepared_.end()) prepared = &found->second;
  }
  const Arrays& arrays = work.sources_;
  const bool is_flat = submission.is_raw && submission.in_place;
  if (prepared->handle != nullptr && submission.labels.is_none() && !prepared->has_labels &&
      IsSame(prepared->params, params) && prepared->splits == splits &&
      std::equal(arrays.begin(), arrays.end(), prepared->tensors.begin(), prepared->tensors.end(),
                 [&](const Array& array, const Described& one) {
                   return IsLike(params.kind, array, one.dtype, one.shape, is_flat);
                 })) {
    (void)get();  // reading the arrays may have run Python: another thread may have closed this
    prepared->is_used = true;
    return *prepared;
  }
  const char* const text = NameText(name.text);
  std::vector<Described> described;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Array& array = arrays[i];
    described.push_back({LabelOf(submission, i, arrays.size()),
                         *NumberFor(params.kind, array.dtype),
                         ShapeFor(params.kind, array, is_flat)});
  }
  std::vector<farandole_tensor> tensors;
  for (const Described& one : described)
    tensors.push_back({one.label.empty() ? nullptr : one.label.c_str(), one.dtype,
                       static_cast<int32_t>(one.shape.size()), one.shape.data()});
  farandole_params asked = params;
  asked.splits = submission.splits ? splits.data() : nullptr;
  asked.function =
      submission.options.function.empty() ? nullptr : submission.options.function.c_str();
  farandole_operation* operation = nullptr;
  uint32_t version = 0;
  const CallGuard guard(*this);
  const int code = Prepare(get(), asked, text, tensors, &operation, &version);
  if (code != FARANDOLE_OK) ThrowNotStarted(code, work);
  // Looked up again: another thread may have prepared the same name meanwhile, or closed this.
  unnamed = {params,
             std::move(splits),
             std::move(described),
             !submission.labels.is_none(),
             {operation, &farandole_operation_release},
             version};
  get();
  if (!name.text) return unnamed;
  prepared_[std::move(name)] = unnamed;
  if (prepared_.size() > drop_above_) DropUnused();
  return unnamed;
}

/// Starts the work, or runs it where the caller waits and nothing but waiting is to be done.
int Context::Start(const Submission& submission, const std::shared_ptr<Work>& work) {
  Prepared unnamed;
  const Prepared& prepared = PreparedFor(submission, *work, unnamed);
  // Another thread may drop it while this one is in the library.
  const std::shared_ptr<farandole_operation> held = prepared.handle;
  farandole_operation* const operation = held.get();
  farandole_request request{};
  request.struct_size = sizeof request;
  request.version = prepared.version;
  std::array<const void*, 8> few_in{};
  std::array<void*, 8> few_out{};
  const size_t count = work->sources_.size();
  std::vector<const void*> many_in(count > few_in.size() ? count : 0);
  std::vector<void*> many_out(many_in.size());
  const void** const in = many_in.empty() ? few_in.data() : many_in.data();
  void** const out = many_in.empty() ? few_out.data() : many_out.data();
  for (size_t i = 0; i < count; ++i) {
    in[i] = work->sources_[i].data;
    if (work->allocates()) continue;
    out[i] = work->in_place_ ? work->sources_[i].data : work->results_[i].data;
  }
  request.in = in;
  const OptionalText failed(submission.failed);
  request.failed = failed.c_str();
  farandole_stream stream{};
  if (work->is_cuda()) {
    stream = work->StreamNow();
    request.stream = &stream;
  }
  // A thread of the library allocates, whose current stream is the device's default one.
  const farandole_stream order{sizeof order, stream.device, nullptr};
  const farandole_allocator allocator{sizeof allocator, work.get(), &Work::AllocateResult};
  const std::vector<farandole_output> outputs = work->Outputs();
  if (!outputs.empty()) {
    request.outputs = outputs.data();
  } else if (!work->allocates()) {
    request.out = out;
  } else {
    if (work->is_cuda()) request.memory_stream = &order;
    request.in_library = work->uses_frontends_memory() ? 0 : 1;
    if (request.in_library == 0) request.allocator = &allocator;
  }
  // What comes after the result may be interrupted, and is then asked for once more: by the work.
  const bool is_plain = submission.finish.is_none() && request.failed == nullptr;
  if (!submission.blocks || !is_plain || work->allocates() || work->is_cuda())
    return farandole_start_request(operation, &request, &work->handle_);
  const CallGuard guard(*this);
  const py::gil_scoped_release release;
  return farandole_run_request(operation, &request, kSliceSeconds, &work->handle_);
}

py::object Context::Submit(const Submission& submission) {
  get();
  ReleaseCompleted();
  const auto work =
      std::allocate_shared<Work>(Pooled<Work>(), shared_from_this(), submission, works_++);
  const int code = Start(submission, work);
  if (work->handle_ != nullptr) Hold(work);
  if (submission.blocks) return RunBlocking(work, code);
  if (code != FARANDOLE_OK) ThrowNotStarted(code, *work);
  return ToPython(work);
}

/// An exception of a signal handler leaves what is in flight with its memory, to be found again.
py::object Context::RunBlocking(const std::shared_ptr<Work>& work, int code) {
  const auto remember = [&] {
    if (work->is_spent_ || work->handle_ == nullptr) return;
    interrupted_.push_back(work);
    if (interrupted_.size() > 16) interrupted_.pop_front();
  };
  if (work->handle_ == nullptr) {
    if (code != FARANDOLE_OK) ThrowNotStarted(code, *work);
    work->is_spent_ = true;
    return work->TakeResults();
  }
  try {
    return work->Wait();
  } catch (...) {
    remember();
    throw;
  }
}

void Context::ThrowNotStarted(int code, const Work& work) {
  if (code != FARANDOLE_INVALID_ARGUMENT) Check(code);
  const std::string text = farandole_last_error();
  if (code == FARANDOLE_OK) ThrowInternal(text.c_str());
  for (const std::shared_ptr<Work>& known : interrupted_) {
    if (known->is_spent_ || known->function_ != work.function_ || work.name_.is_none() ||
        !known->Matches(work.name_) || known->Poll())
      continue;
    const std::string name = py::repr(work.name_);
    throw py::value_error(text + "; an interrupted call of " + work.function_ +
                          " left it in flight: farandole.synchronize(farandole.interrupted(" +
                          name + ")) waits for it and gives its result");
  }
  ThrowAs(code, text.c_str());
}

}  // namespace farandole::python
