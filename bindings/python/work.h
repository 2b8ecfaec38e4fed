// One start of a collective: a user's handle, and the owner of the memory that the engine borrows.
//
// Needs the GIL, as context.h says.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "bindings/python/arrays.h"
#include "bindings/python/context.h"

namespace farandole::python {

using Objects = std::vector<pybind11::object, Pooled<pybind11::object>>;

/// Whether collectives of this kind compute.
inline bool Reduces(int32_t kind) {
  return kind == FARANDOLE_ALLREDUCE || kind == FARANDOLE_REDUCESCATTER;
}

/// Complex numbers are summed as pairs of real ones, by one more dimension: the core knows no other
/// way.
inline bool TravelsAsPairs(int32_t kind, DLDataType dtype) {
  return dtype.code == kDLComplex && Reduces(kind);
}

/// One start of a collective, and a user's handle of it. Holds the memory that the engine borrows.
class Work : public Child, public std::enable_shared_from_this<Work> {
 public:
  /// Borrows what the submission names; nothing is started yet.
  Work(std::shared_ptr<Context> context, const Submission& submission, uint64_t number);
  ~Work() override;

  /// Waits and gives the result; after that the handle is spent. Of several threads that wait the
  /// first to come gets the result. On a GPU it waits until the work is launched, and the calling
  /// thread's current stream waits for the rest. Interruptible: the work goes on then.
  /// @throw The failure; ValueError if the handle is spent.
  pybind11::object Wait();
  /// Whether Wait would return at once; ValueError if the handle is spent.
  bool Poll() const;
  /// After Wait, on a GPU: the calling thread's current stream waits for the work, too.
  void OrderStream() const;
  /// Calls `call()` once when Wait would return at once: now, or on a thread of the library. What
  /// it raises is reported as unraisable. Once the interpreter ends nothing is called any more.
  void WhenDone(const pybind11::object& call);
  /// Whether its memory is touched no more, well or not.
  bool IsComplete() const;
  bool Release() override;

 private:
  /// Not started, or released; or it is the parent's, and this a forked child.
  bool is_gone() const { return handle_ == nullptr || context_->is_forgotten(); }
  friend class Context;
  friend struct WorkObject;
  void ReadAll(const Submission& submission);
  Arrays ReadEach(const Objects& objects) const;
  [[noreturn]] void Refuse(const Arrays& arrays) const;
  bool IsNoSumOfPairs(const Array& array) const;
  bool CanTake(DLDataType dtype) const;
  bool CanUse(const Arrays& arrays, bool in_place) const;
  void MakeResults();
  void UseOutputs(const Submission& submission);
  std::vector<farandole_output> Outputs() const;
  std::vector<int64_t> ResultShape(const Array& source) const;
  pybind11::object TakeResults();
  void NoteWrites();
  pybind11::object TakeAllocated();
  void RefuseSpent() const;
  pybind11::object TakeOutputs();
  void Spend();
  void DropMemory();
  void NoteFailure();
  bool Matches(const pybind11::object& name) const;
  bool is_cuda() const { return !sources_.empty() && sources_.front().is_cuda(); }
  farandole_stream StreamNow() const;
  bool RowsMayDiffer() const;
  bool has_outputs() const { return !outputs_.empty(); }
  bool allocates() const { return RowsMayDiffer() && !has_outputs(); }
  /// On a GPU, where the library would ask CUDA for memory, which waits for the device to free it.
  bool uses_frontends_memory() const {
    return allocates() && is_cuda() && sources_.front().type->api != nullptr;
  }
  /// farandole_allocator::allocate. Not under the GIL: its holder may wait for this thread.
  static void* AllocateResult(void* work, int32_t tensor, const int64_t* rows, int32_t ranks,
                              int64_t bytes);
  std::string Label() const;

  const uint64_t number_;
  const int32_t kind_, op_;
  const uint32_t set_;
  const std::string function_;
  const pybind11::object name_;
  const bool in_place_;
  const bool is_group_;
  const bool is_raw_;
  const bool is_news_;  // Its failure is worth a warning if nobody sees it.
  farandole_work* handle_ = nullptr;
  Objects targets_;            // What the user passed.
  Objects outputs_;            // And where the results go; empty: he did not say.
  std::vector<int64_t> rows_;  // As Submission::rows.
  pybind11::object finish_;
  Arrays sources_;
  Arrays results_;
  struct Received {
    std::vector<int64_t> rows;
    std::shared_ptr<ResultMemory> memory;  // nullptr: the frontend's
    pybind11::object array;
  };
  Received& ReceivedOf(size_t index);
  std::vector<int64_t> ReceivedRows(size_t index) const;
  std::map<size_t, Received> received_;
  std::vector<ManagedTensor> allocated_;  // by the engine, until they are received
  bool is_spent_ = false;
  bool is_held_ = false;  // By the context, at held_at_.
  std::list<std::shared_ptr<Work>>::iterator held_at_;
  PyObject* python_ = nullptr;  // what ToPython made, while that lives
  int waiting_ = 0;
  std::timed_mutex wait_mutex_;
};

/// farandole._core.Work, whose type is made by hand: pybind11 needs half of the time of a start to
/// make one of its own and to forget it.
pybind11::object WorkType();
/// The one object of Python's that holds it.
pybind11::object ToPython(const std::shared_ptr<Work>& work);

/// No call of WhenDone begins any more; waits up to 1 s until none runs. With the GIL, before the
/// interpreter ends.
void StopCallingBack();
/// In a forked child, which has none of these threads.
void ForgetCallbacks();

}  // namespace farandole::python
