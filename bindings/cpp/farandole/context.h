/// @file
/// One rank of a job, and its collectives. Start here.
#pragma once

#include <farandole/calls.h>
#include <farandole/device.h>
#include <farandole/farandole.h>
#include <farandole/options.h>
#include <farandole/result.h>
#include <farandole/row_collectives.h>
#include <farandole/span.h>
#include <farandole/work.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace farandole {

/// @cond internal
namespace detail {

/// A context of the C ABI.
struct OwnedContext {
  explicit OwnedContext(farandole_context* context) : handle(context) {}
  struct Release {
    void operator()(farandole_context* context) const { farandole_release(context); }
  };
  std::unique_ptr<farandole_context, Release> handle;
};

}  // namespace detail
/// @endcond

/// One rank of a job.
///
/// Example (C++17, run by `mpirun -np 2`):
/// @code
/// farandole::Context context = farandole::Context::init();
/// std::vector<float> loss = {0.5f};
/// context.allreduce(loss);  // the mean over all ranks
/// @endcode
/// Thread safety: any member from any thread. Lifetime: it must outlive its Works; an optimizer
/// that outlives it throws invalid_argument. Works and optimizers stay valid when it is moved. Its
/// destructor leaves the job and waits for the other ranks as shutdown() does.
class Context : public RowCollectives<Context> {
 public:
  /// Joins the job of this process, as the launcher or `options` say; without either, a job of one
  /// rank. Settings come from FARANDOLE_* variables. Collective. @throws Error invalid_argument (an
  /// invalid setting; header and library do not match), unavailable, mismatch (ranks have different
  /// versions or settings), timeout.
  static Context init(const InitOptions& options = {}) { return try_init(options).value(); }
  /// As init(), but returns the failure.
  static Result<Context> try_init(const InitOptions& options = {}) {
    if (Result<void> fits = check_abi(); !fits.ok()) return fits.error();
    farandole_context* context = nullptr;
    farandole_init_options c_options = FARANDOLE_INIT_OPTIONS;
    c_options.rank = options.rank;
    c_options.size = options.size;
    c_options.local_rank = options.local_rank;
    c_options.apart = options.apart ? 1 : 0;
    if (!options.address.empty()) c_options.address = options.address.c_str();
    c_options.store = options.store;
    c_options.timeout_s = options.timeout_s;
    c_options.in_order = options.in_order ? 1 : 0;
    c_options.slots = options.slots;
    c_options.is_elastic = options.is_elastic ? 1 : 0;
    if (!options.members.empty()) c_options.members = options.members.c_str();
    if (const int code = farandole_init(&c_options, &context); code != FARANDOLE_OK)
      return detail::last_error(code);
    return Context(context);
  }
  /// Goes on in an elastic job with the ranks that are left and those that have come, as
  /// farandole_reinit says: all ranks call it, while no other call of theirs is going on. Rank,
  /// size and slots are new; optimizers and process sets have to be made again. @throws Error
  /// halted: others may go on without this process, which should end with exit code 75;
  /// invalid_argument: the job is not elastic. After another error this rank has left the job.
  void reinit() {
    farandole_context* next = nullptr;
    detail::check(farandole_reinit(handle(), nullptr, &next)).value();
    *this = Context(next);
  }
  /// `size` ranks inside this process, for tests. Each may be used by a thread of its own, which
  /// should also shut it down, because leaving waits for the other ranks.
  /// @throws Error invalid_argument.
  static std::vector<Context> in_process(int size) {
    check_abi().value();
    std::vector<farandole_context*> handles(size > 0 ? static_cast<std::size_t>(size) : 1);
    detail::check(farandole_init_in_process(size, handles.data())).value();
    std::vector<Context> contexts;
    for (farandole_context* handle : handles) contexts.push_back(Context(handle));
    return contexts;
  }

  int rank() const { return topology_.rank; }              ///< 0 <= rank() < size().
  int size() const { return topology_.size; }              ///< Ranks of the job.
  int local_rank() const { return topology_.local_rank; }  ///< Among the ranks of this host.
  int local_size() const { return topology_.local_size; }  ///< Ranks on this host.
  int cross_rank() const { return topology_.cross_rank; }  ///< Among those with this local_rank().
  int cross_size() const { return topology_.cross_size; }  ///< Hosts that have this local_rank().
  /// The slots of this rank, first to last - 1: see farandole_slot_range. @throws Error
  /// invalid_argument if the job has none.
  std::pair<int, int> slot_range() const {
    std::pair<int, int> slots;
    detail::check(farandole_slot_range(handle(), &slots.first, &slots.second)).value();
    return slots;
  }

  /// Which generation of the job this is: 1, then growing numbers, alike on all ranks.
  std::uint64_t generation() const {
    std::uint64_t number = 0;
    detail::check(farandole_generation_number(handle(), &number)).value();
    return number;
  }
  /// Whether processes wait to be let into this elastic job, as reinit() of all ranks does. Rank 0
  /// is sure to know.
  bool change_is_due() const {
    int is_due = 0;
    detail::check(farandole_change_is_due(handle(), &is_due)).value();
    return is_due != 0;
  }
  /// Where `rank`, or -1: all ranks, of this elastic job listen for newcomers, as
  /// InitOptions::members has it; empty if it is not elastic. @throws Error invalid_argument (no
  /// such rank).
  std::string members(int rank = -1) const {
    const char* addresses = nullptr;
    detail::check(farandole_members(handle(), rank, &addresses)).value();
    return addresses;
  }

  /// `count` zeroes in memory where an allreduce needs no copies, if all ranks have their data in
  /// such memory: see farandole_buffer_allocate. @throws Error resource_exhausted.
  template <class T>
  std::shared_ptr<T[]> buffer(std::size_t count) {
    farandole_buffer* made = nullptr;
    const auto bytes = static_cast<std::int64_t>(count * sizeof(T));
    detail::check(farandole_buffer_allocate(handle(), bytes, &made)).value();
    return std::shared_ptr<T[]>(static_cast<T*>(farandole_buffer_data(made)),
                                [made](T*) { farandole_buffer_release(made); });
  }

  /// Reduces `data` (any container or Span) over all ranks, in place.
  /// @throws Error mismatch (ranks differ in count, type or options; the message names both),
  /// aborted, ...
  template <class Data>
  void allreduce(Data&& data, const Options& options = {}) {
    try_allreduce(std::forward<Data>(data), options).value();
  }
  /// As allreduce(), but returns the failure.
  template <class Data>
  Result<void> try_allreduce(Data&& data, const Options& options = {}) {
    return run(FARANDOLE_ALLREDUCE, -1, Span(data), options);
  }
  /// Starts an allreduce in place; `data` is borrowed until the Work is complete.
  template <class Data>
  [[nodiscard]] Work allreduce_async(Data&& data, const Options& options = {}) {
    return start(FARANDOLE_ALLREDUCE, -1, Span(data), options).value();
  }

  /// Reduces memory of a GPU over all ranks, in place and in the order of `stream`: after what the
  /// stream holds now, and before what is put into it later. The host returns when all is launched.
  /// A context has one GPU, that of the first such call.
  /// @code
  /// context.allreduce(farandole::DeviceSpan<float>(gradient, count), {0, stream});
  /// @endcode
  /// @throws Error as for host memory; invalid_argument (another device, or a stream that is
  /// being captured into a graph); unavailable (no GPU can be used; the message says why).
  template <class T>
  void allreduce(DeviceSpan<T> data, const Stream& stream, const Options& options = {}) {
    try_allreduce(data, stream, options).value();
  }
  /// As allreduce() in a stream, but returns the failure.
  template <class T>
  Result<void> try_allreduce(DeviceSpan<T> data, const Stream& stream,
                             const Options& options = {}) {
    return run(FARANDOLE_ALLREDUCE, -1, data, stream, options);
  }
  /// Starts an allreduce after what `stream` holds now; Work::wait(stream) orders a stream after
  /// it. `data` is borrowed until the Work is complete. @throws Error as allreduce() in a stream.
  template <class T>
  [[nodiscard]] Work allreduce_async(DeviceSpan<T> data, const Stream& stream,
                                     const Options& options = {}) {
    return start(FARANDOLE_ALLREDUCE, -1, data, stream, options).value();
  }

  /// Copies `data` of rank `root` (global number) to all ranks of the set, in place.
  /// @throws Error as allreduce(); invalid_argument if there is no such rank in the set.
  template <class Data>
  void broadcast(Data&& data, int root, const Options& options = {}) {
    try_broadcast(std::forward<Data>(data), root, options).value();
  }
  /// As broadcast(), but returns the failure.
  template <class Data>
  Result<void> try_broadcast(Data&& data, int root, const Options& options = {}) {
    return run(FARANDOLE_BROADCAST, root, Span(data), options);
  }
  /// Starts a broadcast in place; `data` is borrowed until the Work is complete.
  template <class Data>
  [[nodiscard]] Work broadcast_async(Data&& data, int root, const Options& options = {}) {
    return start(FARANDOLE_BROADCAST, root, Span(data), options).value();
  }

  /// Copies memory of a GPU from rank `root` (global number) to all ranks of the set, in place and
  /// in the order of `stream`. @throws Error as allreduce() in a stream; invalid_argument if there
  /// is no such rank in the set.
  template <class T>
  void broadcast(DeviceSpan<T> data, int root, const Stream& stream, const Options& options = {}) {
    try_broadcast(data, root, stream, options).value();
  }
  /// As broadcast() in a stream, but returns the failure.
  template <class T>
  Result<void> try_broadcast(DeviceSpan<T> data, int root, const Stream& stream,
                             const Options& options = {}) {
    return run(FARANDOLE_BROADCAST, root, data, stream, options);
  }
  /// Starts a broadcast after what `stream` holds now; `data` is borrowed until the Work is
  /// complete.
  /// @throws Error as broadcast() in a stream.
  template <class T>
  [[nodiscard]] Work broadcast_async(DeviceSpan<T> data, int root, const Stream& stream,
                                     const Options& options = {}) {
    return start(FARANDOLE_BROADCAST, root, data, stream, options).value();
  }

  /// Returns when every rank of the set has called it. @throws Error aborted, ...
  void barrier(const Options& options = {}) {
    const farandole_params params = detail::params_of(FARANDOLE_BARRIER, FARANDOLE_CPU, options);
    auto prepared = detail::prepare(handle(), params, options.name, nullptr, 0);
    if (!prepared.ok()) throw prepared.error();
    detail::run(prepared.value(), nullptr, nullptr).value();
  }
  /// Takes part in the other ranks' collectives without a contribution, until every rank has
  /// joined.
  /// @return the rank that joined last.
  int join() {
    int last = -1;
    detail::check(farandole_join(handle(), -1, &last)).value();
    return last;
  }

  /// Creates a process set. Collective over all ranks, members or not: all ranks must call
  /// add_process_set() with the same ranks in the same order. @throws Error invalid_argument;
  /// mismatch, on all ranks, if they differ; then no set is created.
  ProcessSet add_process_set(const std::vector<int>& ranks) {
    farandole_work* adding = nullptr;
    const auto count = static_cast<std::int32_t>(ranks.size());
    detail::check(farandole_set_add(handle(), ranks.data(), count, &adding)).value();
    Work(adding).wait();
    ProcessSet set{0, ranks};
    std::sort(set.ranks.begin(), set.ranks.end());
    detail::check(farandole_set_find(handle(), ranks.data(), count, &set.id)).value();
    return set;
  }
  /// Removes a process set. Collective over all ranks, in the same order, as add_process_set(). It
  /// frees all that the set needed, so a job may create sets without limit. @throws Error
  /// invalid_argument, mismatch.
  void remove_process_set(const ProcessSet& set) {
    farandole_work* removing = nullptr;
    detail::check(farandole_set_remove(handle(), set.id, &removing)).value();
    Work(removing).wait();
  }

  /// The engine's counters by name: messages, batches, bytes, wake-ups.
  std::map<std::string, std::int64_t> counters() const {
    const std::int32_t count = farandole_counters(handle(), nullptr, nullptr, 0);
    std::vector<const char*> names(static_cast<std::size_t>(count));
    std::vector<std::int64_t> values(names.size());
    (void)farandole_counters(handle(), names.data(), values.data(), count);
    std::map<std::string, std::int64_t> counted;
    for (std::size_t i = 0; i < names.size(); ++i) counted[names[i]] = values[i];
    return counted;
  }
  /// The value of a setting such as "FARANDOLE_FUSION_THRESHOLD", as text. @throws Error
  /// invalid_argument.
  std::string setting(const std::string& name) const {
    const char* value = nullptr;
    detail::check(farandole_get_setting(handle(), name.c_str(), &value)).value();
    return value;
  }

  /// Starts to write a timeline for chrome://tracing into a file. "{rank}" in the path becomes this
  /// rank's number; without it only rank 0 writes. `mark_cycles`: also rank 0's decisions. @throws
  /// Error invalid_argument (another file is being written), unavailable.
  void start_timeline(const std::string& path, bool mark_cycles = false) {
    detail::check(farandole_timeline_start(handle(), path.c_str(), mark_cycles ? 1 : 0)).value();
  }
  /// Writes the rest and closes the file. @throws Error unavailable.
  void stop_timeline() { detail::check(farandole_timeline_stop(handle())).value(); }

  /// Leaves the job and waits until all ranks have left; pending work ends with `aborted`. Without
  /// this call the destructor does it.
  /// @throws Error timeout naming who is missing, or the context's final error.
  void shutdown() { detail::check(farandole_shutdown(handle())).value(); }

  /// @cond internal
  /// What optimizers watch: it ends with this object, wherever that was moved to.
  std::weak_ptr<const detail::OwnedContext> owned() const { return owned_; }
  /// @endcond

  /// The C ABI's handle, for calls of farandole.h. Borrowed.
  farandole_context* handle() const { return owned_ ? owned_->handle.get() : nullptr; }

 private:
  explicit Context(farandole_context* context)
      : owned_(std::make_shared<detail::OwnedContext>(context)) {
    detail::check(farandole_get_topology(context, &topology_)).value();
  }

  static Result<void> check_abi() {
    const int library = farandole_abi_version();
    if (library == FARANDOLE_ABI_VERSION) return {};
    return Error(Code::invalid_argument, "this program was compiled for Farandole's ABI " +
                                             std::to_string(FARANDOLE_ABI_VERSION) +
                                             ", but libfarandole.so " + farandole_version() +
                                             " has ABI " + std::to_string(library) +
                                             "; compile it with that library's headers");
  }

  template <class T>
  Result<detail::Prepared> prepare(farandole_kind kind, int root, std::size_t elements,
                                   farandole_device device, const Options& options) {
    static_assert(!std::is_const_v<T>, "the result is written in place");
    farandole_params params = detail::params_of(kind, device, options);
    params.root = root;
    const detail::Shape shape(static_cast<std::int64_t>(elements), 1);
    const farandole_tensor tensor = shape.describe(nullptr, data_type_of<T>());
    return detail::prepare(handle(), params, options.name, &tensor, 1);
  }

  template <class T>
  Result<void> run(farandole_kind kind, int root, Span<T> data, const Options& options) {
    Result<detail::Prepared> prepared = prepare<T>(kind, root, data.size(), FARANDOLE_CPU, options);
    if (!prepared.ok()) return prepared.error();
    const void* const in = data.data();
    void* const out = data.data();
    return detail::run(prepared.value(), &in, &out);
  }

  template <class T>
  Result<Work> start(farandole_kind kind, int root, Span<T> data, const Options& options) {
    Result<detail::Prepared> prepared = prepare<T>(kind, root, data.size(), FARANDOLE_CPU, options);
    if (!prepared.ok()) return prepared.error();
    return detail::start(prepared.value(), data.data(), data.data());
  }

  template <class T>
  Result<void> run(farandole_kind kind, int root, DeviceSpan<T> data, const Stream& stream,
                   const Options& options) {
    Result<Work> started = start(kind, root, data, stream, options);
    if (!started.ok()) return started.error();
    return started.value().try_hand_over(stream);
  }

  template <class T>
  Result<Work> start(farandole_kind kind, int root, DeviceSpan<T> data, const Stream& stream,
                     const Options& options) {
    Result<detail::Prepared> prepared =
        prepare<T>(kind, root, data.size(), FARANDOLE_CUDA, options);
    if (!prepared.ok()) return prepared.error();
    return detail::start(prepared.value(), data.address(), data.address(), &stream);
  }

  std::shared_ptr<detail::OwnedContext> owned_;  // its only owner; null once it was moved away
  farandole_topology topology_{};
};

}  // namespace farandole
