#include "bindings/python/handles.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;
namespace {

constexpr const char* kClosed =
    "this Farandole context has been shut down, or belongs to the parent of a forked process";

// Both guarded by the GIL.
int current_generation = 0;            // Counts forks.
farandole_context* joining = nullptr;  // Of an Init that goes on, or was interrupted.

/// Counts a wait in flight, so that Close in another thread leaves the handle alone.
class WaitGuard {
 public:
  explicit WaitGuard(int& waiting) : waiting_(waiting) { ++waiting_; }
  ~WaitGuard() { --waiting_; }
  WaitGuard(const WaitGuard&) = delete;
  WaitGuard& operator=(const WaitGuard&) = delete;

 private:
  int& waiting_;
};

std::vector<void*> Addresses(const py::sequence& objects, int32_t count, bool writable) {
  if (static_cast<int32_t>(py::len(objects)) != count)
    throw py::value_error("expected " + std::to_string(count) + " tensors, got " +
                          std::to_string(py::len(objects)));
  std::vector<void*> addresses;
  addresses.reserve(static_cast<size_t>(count));
  for (const py::handle object : objects) addresses.push_back(Address(object, writable));
  return addresses;
}

/// Keeps a Python string's UTF-8 text alive; null for None. Lone surrogates, which UTF-8 does not
/// have and error texts about files may hold, become question marks.
class OptionalText {
 public:
  explicit OptionalText(const py::object& text) : given_(!text.is_none()) {
    if (!given_) return;
    if (!PyUnicode_Check(text.ptr())) throw py::type_error("expected a str or None");
    const auto bytes =
        py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
    if (!bytes) throw py::error_already_set();
    text_ = bytes;
  }
  const char* c_str() const { return given_ ? text_.c_str() : nullptr; }

 private:
  bool given_;
  std::string text_;
};

}  // namespace

TensorList::TensorList(const py::sequence& descriptions) {
  const size_t count = py::len(descriptions);
  names_.reserve(count);
  shapes_.reserve(count);
  tensors_.reserve(count);
  for (const py::handle item : descriptions) {
    const auto description = item.cast<py::tuple>();
    const OptionalText name(description[0]);
    names_.emplace_back(name.c_str() ? name.c_str() : "");
    shapes_.push_back(description[2].cast<std::vector<int64_t>>());
    tensors_.push_back({name.c_str() ? names_.back().c_str() : nullptr,
                        description[1].cast<int32_t>(), static_cast<int32_t>(shapes_.back().size()),
                        shapes_.back().data()});
  }
}

void* Address(py::handle object, bool writable) {
  if (object.is_none()) return nullptr;
  if (PyLong_Check(object.ptr())) {
    void* address = PyLong_AsVoidPtr(object.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return address;
  }
  Py_buffer view;
  const int flags = writable ? PyBUF_SIMPLE | PyBUF_WRITABLE : PyBUF_SIMPLE;
  if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) throw py::error_already_set();
  void* address = view.buf;
  PyBuffer_Release(&view);
  return address;
}

Stream::Stream(const py::object& pair) {
  if (pair.is_none()) return;
  const auto [device, handle] = pair.cast<std::pair<int32_t, uintptr_t>>();
  stream_ = {sizeof(farandole_stream), device, reinterpret_cast<void*>(handle)};
  given_ = true;
}

Context::Context(farandole_context* handle) : handle_(handle), generation_(current_generation) {}

Context::~Context() {
  try {
    CloseInSlices(false);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("farandole._core.Context");
  }
}

std::shared_ptr<Context> Context::Init() {
  Check(WaitInSlices(-1, [](double slice_s) { return farandole_init_for(slice_s, &joining); }));
  return std::make_shared<Context>(std::exchange(joining, nullptr));
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
  joining = nullptr;
}

bool Context::is_forgotten() const { return generation_ != current_generation; }

bool Context::is_open() const { return !closing_ && !is_closed(); }

bool Context::is_closed() const { return handle_ == nullptr || is_forgotten(); }

farandole_context* Context::get() const {
  if (!is_open()) ThrowInternal(kClosed);
  return handle_;
}

void Context::Close() { CloseInSlices(true); }

void Context::CloseInSlices(bool interruptible) {
  if (is_closed()) return;
  closing_ = true;
  farandole_context* const handle = handle_;
  int code = FARANDOLE_OK;
  {
    const CallGuard guard(*this);
    code = WaitInSlices(-1, [&](double slice_s) {
      return farandole_shutdown_for(handle, interruptible ? slice_s : -1);
    });
  }
  if (is_closed()) return Check(code);  // by another thread
  handle_ = nullptr;
  bool all_released = true;
  for (Child* child : children_) all_released = child->Release() && all_released;
  // A thread still inside a call keeps everything: a small leak instead of a dangling handle.
  if (all_released && calls_ == 0) {
    py::gil_scoped_release release;
    farandole_release(handle);
  }
  Check(code);
}

py::tuple Context::Topology() const {
  farandole_topology t{};
  Check(farandole_get_topology(get(), &t));
  return py::make_tuple(t.rank, t.size, t.local_rank, t.local_size, t.cross_rank, t.cross_size);
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

std::string Context::Setting(const std::string& name) const {
  const char* value = nullptr;
  Check(farandole_get_setting(get(), name.c_str(), &value));
  return value;
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

int Context::Join() {
  farandole_context* handle = get();
  const CallGuard guard(*this);
  int last_rank = -1;
  Check(WaitInSlices(-1,
                     [&](double slice_s) { return farandole_join(handle, slice_s, &last_rank); }));
  return last_rank;
}

Child::Child(std::shared_ptr<Context> context) : context_(std::move(context)) {
  context_->children_.insert(this);
}

Child::~Child() { context_->children_.erase(this); }

Operation::Operation(std::shared_ptr<Context> context, const farandole_params& params,
                     const char* name, const TensorList& tensors)
    : context_(std::move(context)), count_(tensors.count()) {
  farandole_context* handle = context_->get();
  const CallGuard guard(*context_);
  Check(WaitInSlices(-1, [&](double slice_s) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(slice_s);
    for (;;) {
      const int code =
          farandole_prepare(handle, &params, name, tensors.data(), count_, &handle_, &version_);
      if (code != FARANDOLE_PENDING || std::chrono::steady_clock::now() >= end) return code;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }));
}

farandole_operation* Operation::get() const {
  context_->get();
  return handle_;
}

void Work::Start(const Operation& operation, const py::sequence& in, const py::sequence& out,
                 const py::object& holder, const py::object& votes, const py::object& failed,
                 const py::object& stream) {
  const std::vector<void*> in_addresses = Addresses(in, operation.count(), false);
  const std::vector<void*> out_addresses = Addresses(out, operation.count(), true);
  const auto votes_text = votes.is_none() ? std::string() : votes.cast<std::string>();
  if (!votes.is_none() && votes_text.size() != in_addresses.size())
    throw py::value_error("votes: one byte per tensor");
  const auto* votes_data =
      votes.is_none() ? nullptr : reinterpret_cast<const uint8_t*>(votes_text.data());
  const OptionalText failure(failed);
  const Stream producer(stream);
  farandole_work* work = nullptr;
  Check(producer.get() == nullptr
            ? farandole_start(operation.get(), operation.version(), in_addresses.data(),
                              out_addresses.data(), votes_data, failure.c_str(), &work)
            : farandole_start_on(operation.get(), operation.version(), in_addresses.data(),
                                 out_addresses.data(), votes_data, failure.c_str(), producer.get(),
                                 &work));
  Hold(holder, operation, work);
}

void Work::StartAllocating(const Operation& operation, const py::sequence& in,
                           const py::object& holder, const py::object& stream) {
  const std::vector<void*> addresses = Addresses(in, operation.count(), false);
  const Stream producer(stream);
  farandole_work* work = nullptr;
  Check(farandole_start_allocating(operation.get(), operation.version(), addresses.data(), nullptr,
                                   producer.get(), &work));
  Hold(holder, operation, work);
}

void Work::Hold(const py::object& holder, const Operation& operation, farandole_work* handle) {
  holder.attr("work") = py::cast(std::shared_ptr<Work>(new Work(operation, handle)));
}

bool Work::Run(const Operation& operation, const py::sequence& in, const py::sequence& out,
               const py::object& holder) {
  const std::vector<void*> in_addresses = Addresses(in, operation.count(), false);
  const std::vector<void*> out_addresses = Addresses(out, operation.count(), true);
  farandole_operation* handle = operation.get();
  const uint32_t version = operation.version();
  const CallGuard guard(*operation.context());
  farandole_work* work = nullptr;
  int code = FARANDOLE_OK;
  {
    py::gil_scoped_release release;
    code = farandole_run(handle, version, in_addresses.data(), out_addresses.data(), kSliceSeconds,
                         &work);
  }
  if (code == FARANDOLE_PENDING) {
    Hold(holder, operation, work);
    return false;
  }
  Check(code);
  return true;
}

Work::~Work() { Release(); }

bool Work::Release() {
  if (waiting_ > 0) return false;
  if (handle_ != nullptr && !context_->is_forgotten()) farandole_work_release(handle_);
  handle_ = nullptr;
  return true;
}

bool Work::Wait(double timeout_s, const py::object& stream) {
  if (handle_ == nullptr) ThrowInternal(kClosed);
  const WaitGuard guard(waiting_);
  farandole_work* handle = handle_;
  const Stream waiting(stream);
  const int code = WaitInSlices(timeout_s, [&](double slice_s) {
    return waiting.get() == nullptr ? farandole_wait(handle, slice_s)
                                    : farandole_wait_on(handle, waiting.get(), slice_s);
  });
  if (code == FARANDOLE_PENDING) return false;
  Check(code);
  return true;
}

bool Work::Poll() { return handle_ == nullptr || farandole_poll(handle_) != 0; }

bool Work::Over() {
  return handle_ == nullptr || farandole_is_complete(handle_) != FARANDOLE_PENDING;
}

py::object Work::Error() {
  const int code = handle_ == nullptr ? FARANDOLE_OK : farandole_is_complete(handle_);
  if (code == FARANDOLE_OK || code == FARANDOLE_PENDING) return py::none();
  return ToText(farandole_last_error());
}

bool Work::Skipped(int32_t i) const {
  if (handle_ == nullptr) ThrowInternal(kClosed);
  return farandole_skipped(handle_, i) != 0;
}

std::shared_ptr<Result> Work::TakeResult(int32_t i) {
  if (handle_ == nullptr) ThrowInternal(kClosed);
  std::shared_ptr<Result>& result = results_[i];
  if (result != nullptr) return result;
  farandole_topology topology{};
  Check(farandole_get_topology(context_->get(), &topology));
  std::vector<int64_t> rows(static_cast<size_t>(topology.size));
  Check(farandole_received_rows(handle_, i, rows.data(), topology.size));
  farandole_buffer* buffer = nullptr;
  Check(farandole_take_result(handle_, i, &buffer));
  return result = std::make_shared<Result>(buffer, std::move(rows));
}

Result::~Result() {
  const py::gil_scoped_release release;
  farandole_buffer_release(buffer_);
}

Gradients::Gradients(std::shared_ptr<Context> context, const farandole_params& params,
                     const char* prefix, const TensorList& tensors, int64_t group_bytes)
    : Child(std::move(context)) {
  Check(farandole_gradients_create(context_->get(), &params, prefix, tensors.data(),
                                   tensors.count(), group_bytes, &handle_));
}

Gradients::~Gradients() { Release(); }

bool Gradients::Release() {
  if (waiting_ > 0) return false;
  if (handle_ != nullptr && !context_->is_forgotten()) farandole_gradients_release(handle_);
  handle_ = nullptr;
  return true;
}

farandole_gradients* Gradients::get() const {
  if (handle_ == nullptr) ThrowInternal(kClosed);
  return handle_;
}

void Gradients::Redefine(const TensorList& tensors) {
  Check(farandole_gradients_redefine(get(), tensors.data(), tensors.count()));
}

void Gradients::Mark(int32_t i, const py::object& in, const py::object& out, int32_t vote,
                     const py::object& stream) {
  const Stream producer(stream);
  void* const from = Address(in, false);
  void* const to = Address(out, true);
  Check(producer.get() == nullptr
            ? farandole_gradients_mark(get(), i, from, to, vote)
            : farandole_gradients_mark_on(get(), i, from, to, vote, producer.get()));
}

void Gradients::InStep(int64_t step, int32_t passes, int32_t no_sync_passes,
                       int32_t previous_passes, int32_t previous_no_sync_passes) {
  const farandole_step count{sizeof(farandole_step), step, passes, no_sync_passes, previous_passes,
                             previous_no_sync_passes};
  Check(farandole_gradients_in_step(get(), &count));
}

void Gradients::AnnounceStep() { Check(farandole_gradients_announce_step(get())); }

bool Gradients::Marked(int32_t i) const { return farandole_gradients_marked(get(), i) != 0; }

void Gradients::End(const py::object& failed) {
  Check(farandole_gradients_end(get(), OptionalText(failed).c_str()));
}

bool Gradients::Over() {
  return handle_ == nullptr || farandole_gradients_is_complete(handle_) != FARANDOLE_PENDING;
}

py::tuple Gradients::Rounds() {
  int64_t waited = 0;
  int64_t over = 0;
  if (handle_ == nullptr) return py::make_tuple(INT64_MAX, INT64_MAX);
  if (farandole_gradients_rounds(handle_, &waited, &over) != FARANDOLE_OK)
    return py::make_tuple(INT64_MAX, INT64_MAX);
  return py::make_tuple(waited, over);
}

bool Gradients::Wait(double timeout_s, const py::object& stream) {
  farandole_gradients* handle = get();
  const WaitGuard guard(waiting_);
  const Stream waiting(stream);
  const int code = WaitInSlices(timeout_s, [&](double slice_s) {
    return waiting.get() == nullptr ? farandole_gradients_wait(handle, slice_s)
                                    : farandole_gradients_wait_on(handle, waiting.get(), slice_s);
  });
  if (code == FARANDOLE_PENDING) return false;
  Check(code);
  return true;
}

bool Gradients::Skipped(int32_t i) const { return farandole_gradients_skipped(get(), i) != 0; }

int32_t Gradients::Groups() const { return farandole_gradients_groups(get()); }

}  // namespace farandole::python
