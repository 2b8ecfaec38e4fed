#include "bindings/python/gradients.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;

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

Gradients::Gradients(std::shared_ptr<Context> context, const farandole_params& params,
                     const char* prefix, const TensorList& tensors, int64_t group_bytes)
    : Child(std::move(context)) {
  Check(farandole_gradients_create(context_->get(), &params, prefix, tensors.data(),
                                   tensors.count(), group_bytes, &handle_));
}

Gradients::~Gradients() { Release(); }

bool Gradients::Release() {
  if (waiting_ > 0) return false;
  if (!is_gone()) farandole_gradients_release(handle_);
  handle_ = nullptr;
  return true;
}

farandole_gradients* Gradients::get() const {
  if (is_gone()) ThrowInternal(kClosed);
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

void Gradients::MarkMemory(int32_t i, void* memory, farandole_vote vote) {
  Check(farandole_gradients_mark(get(), i, memory, memory, vote));
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

bool Gradients::IsComplete() {
  return is_gone() || farandole_gradients_is_complete(handle_) != FARANDOLE_PENDING;
}

void Gradients::Keep(const py::object& memory) {
  int64_t waited = 0;
  int64_t complete = 0;
  if (is_gone() || farandole_gradients_rounds(handle_, &waited, &complete) != FARANDOLE_OK)
    return;  // The device has failed, or there is none any more: nothing touches the memory.
  kept_.emplace_back(waited, memory);
}

void Gradients::ReleaseCompleted() {
  if (kept_.empty()) return;
  int64_t waited = 0;
  int64_t complete = 0;
  if (is_gone() || farandole_gradients_rounds(handle_, &waited, &complete) != FARANDOLE_OK)
    complete = INT64_MAX;
  while (!kept_.empty() && kept_.front().first <= complete) {
    const py::object memory = std::move(kept_.front().second);  // May call Python when it goes.
    kept_.pop_front();
  }
}

void Gradients::Detach(const py::object& memory, bool is_pending) {
  if (is_gone() || (kept_.empty() && !is_pending)) return;
  has_ended_ = !is_pending;
  if (is_pending) kept_.emplace_back(INT64_MAX, memory);
  context_->detached_.push_back(shared_from_this());
}

/// Whether the round that was ended last has finished; its failure was reported already.
bool Gradients::HasEnded() {
  if (!has_ended_)
    has_ended_ = is_gone() || farandole_gradients_wait(handle_, 0) != FARANDOLE_PENDING;
  return has_ended_;
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
