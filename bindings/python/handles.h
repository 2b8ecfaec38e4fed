// Python's owners of the C ABI's handles: a context and what was made from it.
//
// Thread safety: every member function needs the GIL; the blocking ones release it while they
// block. Invariant: a C handle is used only while its context is open and the process is the one
// that made it (a forked child finds every context closed and finalises nothing). Lifetime: each
// Operation, Work and Gradients keeps its Context object alive; Context::Close gives their handles
// back first, whatever Python still refers to.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"

namespace farandole::python {

/// Descriptions of tensors from a Python sequence of (name or None, dtype number, shape).
class TensorList {
 public:
  explicit TensorList(const pybind11::sequence& descriptions);
  const farandole_tensor* data() const { return tensors_.data(); }
  int32_t count() const { return static_cast<int32_t>(tensors_.size()); }

 private:
  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<farandole_tensor> tensors_;
};

/// The address behind `object`: None (null), an int, or an object with a contiguous buffer. The
/// caller keeps the memory alive.
/// @throw TypeError for anything else; BufferError or ValueError if `writable` and it is not.
void* Address(pybind11::handle object, bool writable);

/// None, or a pair (CUDA device number, stream handle as an int).
class Stream {
 public:
  explicit Stream(const pybind11::object& pair);
  /// nullptr for None.
  const farandole_stream* get() const { return given_ ? &stream_ : nullptr; }

 private:
  bool given_ = false;
  farandole_stream stream_{};
};

class Child;

/// One rank's engine.
class Context {
 public:
  /// farandole_init, interruptibly: after an exception of a signal handler the next call goes on.
  /// Not from two threads at once.
  static std::shared_ptr<Context> Init();
  /// `size` ranks inside this process.
  static std::vector<std::shared_ptr<Context>> InProcess(int size);
  /// From now on every existing context of this process is closed and stays untouched: for a child
  /// after fork, where the engine's threads do not exist.
  static void ForgetAll();

  explicit Context(farandole_context* handle);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  bool is_open() const;
  /// Close has ended, or this is a forked child.
  bool is_closed() const;
  /// Made before a fork of which this process is the child.
  bool is_forgotten() const;
  /// @throw HorovodInternalError when closed.
  farandole_context* get() const;
  /// Leaves the job, gives back all handles made from this context, then the context. Idempotent.
  /// Interruptible: after an exception of a signal handler it is neither open nor closed, and the
  /// next call goes on.
  void Close();
  pybind11::tuple Topology() const;
  pybind11::dict Counters() const;
  /// The value of FARANDOLE_...; @throw ValueError if there is no such setting.
  std::string Setting(const std::string& name) const;
  void StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline();
  int Join();

 private:
  friend class Child;
  friend class CallGuard;
  void CloseInSlices(bool interruptible);
  farandole_context* handle_;
  bool closing_ = false;
  int generation_;
  int calls_ = 0;  // C calls in flight without the GIL that name the handle
  std::unordered_set<Child*> children_;
};

/// Counts a C call that is in flight without the GIL, so that Close in another thread leaves the
/// handle alone. Made and destroyed with the GIL.
class CallGuard {
 public:
  explicit CallGuard(Context& context) : context_(context) { ++context_.calls_; }
  ~CallGuard() { --context_.calls_; }
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;

 private:
  Context& context_;
};

/// Something that must be given back before its context.
class Child {
 public:
  explicit Child(std::shared_ptr<Context> context);
  virtual ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// Gives the C handle back if nobody waits on it. Returns whether it is gone.
  virtual bool Release() = 0;

 protected:
  const std::shared_ptr<Context> context_;
};

/// A prepared collective; its C handle belongs to the context.
class Operation {
 public:
  /// Waits, interruptibly, while an unnamed operation has to (see farandole_prepare).
  Operation(std::shared_ptr<Context> context, const farandole_params& params, const char* name,
            const TensorList& tensors);

  const std::shared_ptr<Context>& context() const { return context_; }
  int32_t count() const { return count_; }
  farandole_operation* get() const;
  uint32_t version() const { return version_; }

 private:
  std::shared_ptr<Context> context_;
  farandole_operation* handle_ = nullptr;
  uint32_t version_ = 0;
  int32_t count_;
};

/// A tensor's result in the library's memory, which lives as long as this, also without a context.
/// Waits without the GIL for a GPU that still uses it.
class Result {
 public:
  Result(farandole_buffer* buffer, std::vector<int64_t> rows)
      : buffer_(buffer), rows_(std::move(rows)) {}
  ~Result();
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;

  void* data() const { return farandole_buffer_data(buffer_); }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data()); }
  int64_t bytes() const { return farandole_buffer_bytes(buffer_); }
  /// How many came from each rank.
  const std::vector<int64_t>& rows() const { return rows_; }

 private:
  farandole_buffer* const buffer_;
  const std::vector<int64_t> rows_;
};

/// One start of an operation. Does not keep the tensors' memory alive: its holder does.
class Work : public Child {
 public:
  /// All set the attribute `work` of `holder`, who keeps the memory alive, before any signal
  /// handler can run: an exception of one must not part a work from its memory.
  static void Start(const Operation& operation, const pybind11::sequence& in,
                    const pybind11::sequence& out, const pybind11::object& holder,
                    const pybind11::object& votes, const pybind11::object& failed,
                    const pybind11::object& stream);
  /// An allgather or alltoall whose results the library allocates; see TakeResult.
  static void StartAllocating(const Operation& operation, const pybind11::sequence& in,
                              const pybind11::object& holder, const pybind11::object& stream);
  /// Starts and waits up to 50 ms. @return true, and no attribute set, when it has finished well.
  static bool Run(const Operation& operation, const pybind11::sequence& in,
                  const pybind11::sequence& out, const pybind11::object& holder);
  ~Work() override;

  /// Whether it has finished; an outcome that is a failure is thrown. With a stream, that stream
  /// waits for the end on the device.
  bool Wait(double timeout_s, const pybind11::object& stream);
  bool Poll();
  /// Whether its memory is touched no more, well or not.
  bool Over();
  /// Why it failed; None if it did not, or has not finished.
  pybind11::object Error();
  bool Skipped(int32_t i) const;
  /// The same one each time, once it has finished well: an interrupted caller may ask again.
  std::shared_ptr<Result> TakeResult(int32_t i);
  bool Release() override;

 private:
  static void Hold(const pybind11::object& holder, const Operation& operation,
                   farandole_work* handle);
  Work(const Operation& operation, farandole_work* handle)
      : Child(operation.context()), handle_(handle) {}
  farandole_work* handle_ = nullptr;
  std::map<int32_t, std::shared_ptr<Result>> results_;
  int waiting_ = 0;
};

/// The gradients of one optimizer.
class Gradients : public Child {
 public:
  Gradients(std::shared_ptr<Context> context, const farandole_params& params, const char* prefix,
            const TensorList& tensors, int64_t group_bytes);
  ~Gradients() override;

  void Redefine(const TensorList& tensors);
  void Mark(int32_t i, const pybind11::object& in, const pybind11::object& out, int32_t vote,
            const pybind11::object& stream);
  /// Numbers as in farandole_step.
  void InStep(int64_t step, int32_t passes, int32_t no_sync_passes, int32_t previous_passes,
              int32_t previous_no_sync_passes);
  void AnnounceStep();
  bool Marked(int32_t i) const;
  void End(const pybind11::object& failed);
  bool Wait(double timeout_s, const pybind11::object& stream);
  bool Over();
  /// (rounds waited for, how many of these are over); all are when the device has failed.
  pybind11::tuple Rounds();
  bool Skipped(int32_t i) const;
  int32_t Groups() const;
  bool Release() override;

 private:
  farandole_gradients* get() const;
  farandole_gradients* handle_ = nullptr;
  int waiting_ = 0;
};

}  // namespace farandole::python
