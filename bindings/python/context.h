// Python's owners of the C ABI's handles: a context and what was made from it.
//
// Thread safety: every member function needs the GIL; the blocking ones release it while they
// block. Invariant: a C handle is used only while its context is open and the process is the one
// that made it (a forked child finds every context closed and finalises nothing). Lifetime: each
// Work and Gradients keeps its Context object alive; Context::Close gives their handles back first,
// whatever Python still refers to. What the engine reads and writes is held by the Work that
// borrowed it, and the context holds every Work until its memory is touched no more.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "bindings/python/arrays.h"

namespace farandole::python {

/// What all ranks must agree on besides the tensors: farandole_params without pointers.
struct Options {
  farandole_params params;
  std::string function;  ///< What the user called, where this is a part of it; may be empty.

  /// The name of the function for messages.
  const char* FunctionName() const;
};

class Child;
class Work;
class Gradients;
using WorkList = std::list<std::shared_ptr<Work>, Pooled<std::shared_ptr<Work>>>;

/// One call of a collective. Its caller keeps what it refers to.
struct Submission {
  const Options& options;
  pybind11::handle
      tensors;            ///< An array; of a group a list of them, decided and finished together.
  pybind11::handle name;  ///< str; None: matched by the order of unnamed calls.
  bool is_group = false;
  bool in_place = false;     ///< Results go where the tensors are.
  bool blocks = false;       ///< Gives the result instead of the work.
  bool is_internal = false;  ///< No user called it: its failure needs no warning at the end.
  /// In place, on memory: ranks match by the number of elements, whatever the shapes, and the
  /// frontend is not told of the write.
  bool is_raw = false;
  pybind11::handle finish;  ///< None, or makes of the results (and received rows) what users get.
  pybind11::handle labels;  ///< None, or the tensors' names for messages; None: numbered.
  pybind11::handle failed;  ///< None, or this rank's error text: refused on every rank with it.
  /// Of an alltoall: per tensor and rank, how many rows go to it; nullopt: as many to each.
  std::optional<std::vector<int64_t>> splits = {};
  pybind11::handle out = Py_None;  ///< None, or as `tensors`: where the results go.
  /// With `out`, of an allgather or alltoall: per tensor and rank, how many rows must come from it;
  /// empty: as many as `out` has in all.
  std::vector<int64_t> rows = {};
};

/// What the caller of init says; None where he leaves it to the launcher.
struct InitArguments {
  std::optional<int> rank, size, local_rank;
  std::optional<std::string> address;
  pybind11::object store;   ///< None, or _store.StoreCalls.
  bool apart = false;       ///< No launcher is asked.
  double timeout_s = 0;     ///< As in farandole_init_options.
  bool in_order = false;    ///< As there.
  int slots = 0;            ///< As there.
  bool is_elastic = false;  ///< As there, like the next.
  std::optional<std::string> members;
};

/// One rank's engine.
class Context : public std::enable_shared_from_this<Context> {
 public:
  /// farandole_init, interruptibly: after an exception of a signal handler the next call goes on,
  /// with the arguments of the first; not from two threads at once, unless the job is apart. The
  /// store's functions are called on this thread.
  static std::shared_ptr<Context> Init(const InitArguments& arguments);
  /// farandole_reinit, interruptibly: this context ends as by Close. After an exception the process
  /// has left the job.
  std::shared_ptr<Context> Reinit();
  uint64_t GenerationNumber() const;
  bool IsChangeDue() const;
  std::string Members(int rank) const;
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
  /// Throws what is said of a handle whose context is closed.
  [[noreturn]] void ThrowClosed() const;
  /// @throw HorovodInternalError when closed.
  farandole_context* get() const;
  /// Leaves the job, releases all handles made from this context, then the context. Idempotent.
  /// Interruptible: after an exception of a signal handler it is neither open nor closed, and the
  /// next call goes on.
  void Close();
  /// Close, for up to `limit_s` (< 0: no limit). @return false if not all other ranks have left or
  /// ended by then: call it again, or CloseAtExit. `reason`, `cause`: see farandole_leave_at_exit.
  bool CloseWithin(double limit_s, int reason = FARANDOLE_EXIT_BY_OTHER,
                   const char* cause = nullptr);
  /// Close, for up to `limit_s`; then it is closed for Python, and the C library's exit handler
  /// ends it when the exit code is known.
  void CloseAtExit(double limit_s, int reason, const std::string& cause);
  /// @throw the error with which the job has ended, as every new operation would.
  void RaiseIfEnded() const;
  pybind11::tuple Topology() const;
  std::pair<int, int> SlotRange() const;
  pybind11::dict Counters() const;
  /// The value of FARANDOLE_...; @throw ValueError if there is no such setting.
  std::string Setting(const std::string& name) const;
  /// All: name, value, default.
  std::vector<std::array<std::string, 3>> Settings() const;
  void StartTimeline(const std::string& path, bool mark_cycles);
  void StopTimeline();
  void SetTimeout(double timeout_s);
  int Join();

  /// Bytes where an allreduce in place needs no copies: farandole_buffer_allocate.
  std::shared_ptr<ResultMemory> Allocate(int64_t bytes);
  /// Starts a collective. Gives its Work, or its result if `submission.blocks`.
  /// @throw ValueError or TypeError for what is wrong with the call; HorovodInternalError.
  pybind11::object Submit(const Submission& submission);
  /// Releases the memory of what is complete, oldest first; notes failures that nobody has seen.
  void ReleaseCompleted();
  /// Of works that hold memory for the engine, and of detached gradients.
  size_t in_flight() const { return in_flight_.size() + detached_.size(); }
  /// Why works failed that nobody has waited for, each once.
  std::vector<std::string> TakeUnseenFailures();
  /// The work of the last blocking call of that name (None: of any) that an exception ended and
  /// that was not waited for since; None if there is none.
  pybind11::object FindInterrupted(const pybind11::object& name) const;

  /// Whether an operation of that name is in flight, started by whatever thread.
  bool IsInFlight(const pybind11::object& name) const;

  /// A new process set, collectively; its uid.
  uint32_t AddSet(const std::vector<int32_t>& ranks);
  void RemoveSet(uint32_t uid);
  /// How many ranks are in a set, and this rank's number in it (-1: it is no member).
  struct SetInfo {
    int32_t size;
    int32_t rank;
  };
  SetInfo InfoOf(uint32_t set) const;

 private:
  friend class Child;
  friend class CallGuard;
  friend class Work;
  friend class Gradients;
  struct Described {
    std::string label;
    int32_t dtype;
    std::vector<int64_t> shape;  // [elements] of a raw one in place
  };
  static constexpr size_t kPrepared = 2048;  // names
  /// A prepared operation and what it was prepared for.
  struct Prepared {
    farandole_params params{};
    std::vector<int64_t> splits;
    std::vector<Described> tensors;
    bool has_labels = false;  // Of its caller: described each time.
    std::shared_ptr<farandole_operation> handle;
    uint32_t version = 0;
    bool is_used = true;  // since DropUnused
  };
  void Release();
  int Start(const Submission& submission, const std::shared_ptr<Work>& work);
  /// What a prepared operation is found by. The hash is that which Python keeps in a string.
  struct Name {
    pybind11::object text;  // no subclass of str
    int32_t kind;
    uint32_t set;
    std::string function;
    bool operator==(const Name& other) const;
    struct Hash {
      size_t operator()(const Name& name) const;
    };
  };
  void DropUnused();
  Prepared& PreparedFor(const Submission& submission, Work& work, Prepared& unnamed);
  pybind11::object RunBlocking(const std::shared_ptr<Work>& work, int code);
  [[noreturn]] void ThrowNotStarted(int code, const Work& work);
  void Hold(const std::shared_ptr<Work>& work);
  void Forget(Work& work);
  void WaitForSet(farandole_work* work);

  farandole_context* handle_;
  bool closing_ = false;
  int made_at_end_ = 0;  // how many contexts had been made when this one was closed
  int generation_;
  int calls_ = 0;  // C calls in flight without the GIL that name the handle
  farandole_topology topology_{};
  Child* children_ = nullptr;  // the newest
  std::unordered_map<Name, Prepared, Name::Hash> prepared_;
  size_t drop_above_ = kPrepared;               // of prepared_
  std::unordered_map<uint32_t, SetInfo> sets_;  // without that of all ranks
  WorkList in_flight_;                          // oldest first
  std::list<std::shared_ptr<Gradients>> detached_;
  std::map<uint64_t, std::string> unseen_failures_;  // by the works' numbers
  std::deque<std::shared_ptr<Work>> interrupted_;    // the last 16
  uint64_t works_ = 0;
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

/// Something that must be released before its context.
class Child {
 public:
  explicit Child(std::shared_ptr<Context> context) { Join(std::move(context)); }
  virtual ~Child() { Leave(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// Gives the C handle back if nobody waits on it. Returns whether it is gone.
  virtual bool Release() = 0;

 protected:
  /// Of another context, after the release.
  void MoveTo(std::shared_ptr<Context> context);

  std::shared_ptr<Context> context_;

 private:
  friend class Context;
  void Join(std::shared_ptr<Context> context);
  void Leave();

  Child* newer_ = nullptr;
  Child* older_ = nullptr;
};

}  // namespace farandole::python
