#include "bindings/xla/call.h"

#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "core/huge_pages.h"

namespace farandole::xla {
namespace {

/// Of the calling thread's last farandole call.
Outcome OutcomeOf(int code) {
  return code == FARANDOLE_OK ? Outcome{} : Outcome{code, farandole_last_error()};
}

/// How long a handler blocks at most: about as long as the data take where nobody is late. Two
/// ranks of a host need 3 us for a small array.
double BlockSeconds(const Arrays& arrays) {
  int64_t bytes = 0;
  for (const farandole_output& output : arrays.out) bytes += output.bytes;
  return 100e-6 + static_cast<double>(bytes) / 1e9;
}

farandole_params ToParams(const Attributes& attributes) {
  return {sizeof(farandole_params),
          static_cast<int32_t>(attributes.kind),
          static_cast<int32_t>(attributes.op),
          attributes.prescale,
          attributes.postscale,
          attributes.kind == FARANDOLE_BROADCAST ? static_cast<int32_t>(attributes.root) : -1,
          static_cast<int32_t>(attributes.wire),
          static_cast<uint32_t>(attributes.set),
          0,
          FARANDOLE_CPU,
          0,
          nullptr,
          nullptr};
}

/// Whether only another rank gets the result of an allreduce.
bool IsForAnother(const farandole_context* context, const Attributes& attributes) {
  if (attributes.kind != FARANDOLE_ALLREDUCE || attributes.root < 0) return false;
  farandole_topology topology{};
  return farandole_get_topology(context, &topology) == FARANDOLE_OK &&
         topology.rank != attributes.root;
}

/// The tensors as the Python frontends describe them, so that calls in and outside of programs
/// meet: those of a group are called "0", "1" and so on, and complex ones are summed as pairs of
/// numbers.
class Description {
 public:
  Description(const Attributes& attributes, const Arrays& arrays) : tensors_(arrays.tensors) {
    const bool reduces =
        attributes.kind == FARANDOLE_ALLREDUCE || attributes.kind == FARANDOLE_REDUCESCATTER;
    const bool adds = attributes.op == FARANDOLE_SUM || attributes.op == FARANDOLE_AVERAGE;
    names_.reserve(tensors_.size());
    shapes_.reserve(tensors_.size());
    for (farandole_tensor& tensor : tensors_) {
      names_.push_back(std::to_string(names_.size()));
      if (tensors_.size() > 1) tensor.name = names_.back().c_str();
      if (reduces && adds) MakePairs(tensor);
    }
  }
  Description(const Description&) = delete;  // tensors_ refers to the others
  Description& operator=(const Description&) = delete;
  const std::vector<farandole_tensor>& tensors() const { return tensors_; }

 private:
  void MakePairs(farandole_tensor& tensor) {
    const bool is_double = tensor.dtype == FARANDOLE_COMPLEX128;
    if (!is_double && tensor.dtype != FARANDOLE_COMPLEX64) return;
    std::vector<int64_t>& shape = shapes_.emplace_back(tensor.shape, tensor.shape + tensor.ndim);
    shape.push_back(2);
    tensor.dtype = is_double ? FARANDOLE_FLOAT64 : FARANDOLE_FLOAT32;
    tensor.shape = shape.data();
    ++tensor.ndim;
  }

  std::vector<farandole_tensor> tensors_;
  std::vector<std::string> names_;
  std::vector<std::vector<int64_t>> shapes_;
};

Outcome Prepare(const Attributes& attributes, Arrays* arrays, Prepared* prepared) {
  const farandole_params params = ToParams(attributes);
  Current& current = TheCurrent();
  const std::shared_lock lock(current.mutex);
  if (current.context == nullptr)
    return {FARANDOLE_ABORTED,
            "Farandole is not initialized, or was shut down; use farandole.jax.init()"};
  int64_t size = 0;
  const auto set = static_cast<uint32_t>(attributes.set);
  const int known = farandole_output_rows(current.context, FARANDOLE_ALLGATHER, set, 1, &size);
  if (known == FARANDOLE_OK && size != attributes.size)
    return {FARANDOLE_INVALID_ARGUMENT, "\"" + attributes.name + "\": the program was traced for " +
                                            std::to_string(attributes.size) +
                                            " ranks, and there are " + std::to_string(size) +
                                            "; call jax.clear_caches()"};
  farandole_topology topology{};
  if (attributes.kind == FARANDOLE_REDUCESCATTER && set == 0 &&
      farandole_get_topology(current.context, &topology) == FARANDOLE_OK &&
      topology.rank != attributes.rank)  // whose rows are as many as that rank's
    return {FARANDOLE_INVALID_ARGUMENT,
            "\"" + attributes.name + "\": the program was traced for rank " +
                std::to_string(attributes.rank) + ", and this is rank " +
                std::to_string(topology.rank) + "; call jax.clear_caches()"};
  farandole_operation* operation = nullptr;
  const Description description(attributes, *arrays);
  const int code = farandole_prepare(
      current.context, &params, attributes.name.c_str(), description.tensors().data(),
      static_cast<int32_t>(description.tensors().size()), &operation, &prepared->version);
  if (operation != nullptr) prepared->operation.reset(operation, &farandole_operation_release);
  prepared->tensors = arrays->tensors.size();
  arrays->become_zero = IsForAnother(current.context, attributes);
  return OutcomeOf(code);
}

/// In place of an operation that this rank cannot prepare, by the same name.
Prepared PrepareStandIn(const Attributes& attributes) {
  farandole_params params = ToParams(attributes);
  params.kind = FARANDOLE_ALLREDUCE;
  params.op = FARANDOLE_SUM;
  params.wire = 0;
  const farandole_tensor one{nullptr, FARANDOLE_FLOAT32, 0, nullptr};
  Prepared made;
  Current& current = TheCurrent();
  const std::shared_lock lock(current.mutex);
  farandole_operation* operation = nullptr;
  if (current.context != nullptr)
    farandole_prepare(current.context, &params, attributes.name.c_str(), &one, 1, &operation,
                      &made.version);
  if (operation != nullptr) made.operation.reset(operation, &farandole_operation_release);
  made.tensors = 1;
  return made;
}

/// The names whose calls this rank has yet to refuse. Later calls of the name are refused too, as
/// the other ranks' count.
struct Refused {
  std::mutex mutex;
  std::multiset<std::string> names;
};
Refused& TheRefused() {
  static Refused& refused = *new Refused;
  return refused;
}
bool IsRefused(const std::string& name) {
  Refused& refused = TheRefused();
  const std::lock_guard lock(refused.mutex);
  return refused.names.contains(name);
}

/// How many rows of each result come from each rank: all ranks run the same program.
std::vector<int64_t> RowsOf(const Attributes& attributes, const Arrays& arrays) {
  std::vector<int64_t> rows;
  if (attributes.kind == FARANDOLE_ALLGATHER || attributes.kind == FARANDOLE_ALLTOALL)
    for (const int64_t all : arrays.rows)
      for (int64_t rank = 0; rank < attributes.size; ++rank)
        rows.push_back(all / attributes.size + (rank < all % attributes.size ? 1 : 0));
  return rows;
}

/// One call that goes on after its handler.
struct Pending {
  WorkHandle work;
  std::function<void(const Outcome&)> finish;
};

void Finished(void* user, int code) {
  const std::unique_ptr<Pending> pending(static_cast<Pending*>(user));
  Watch::Get().Remove(pending->work);
  pending->finish(OutcomeOf(code));
}

/// Calls `finish` when the work has ended.
void CallWhenFinished(const WorkHandle& work, std::function<void(const Outcome&)> finish) {
  auto pending = std::make_unique<Pending>(Pending{work, std::move(finish)});
  Watch::Get().Add(work);
  const int code = farandole_when_finished(work.get(), &Finished, pending.get());
  if (code == FARANDOLE_OK)
    static_cast<void>(pending.release());
  else  // no thread: this one has to wait
    Finished(pending.release(), farandole_wait(work.get(), -1));
}

/// The other ranks wait for a call that this one could not make: they get its error. Where an
/// earlier call of the name is in flight that has to end first.
void Refuse(const std::string& name, const Prepared& prepared, const Outcome& why,
            const std::function<void(const Outcome&)>& finish) {
  Refused& refused = TheRefused();
  {
    const std::lock_guard lock(refused.mutex);
    refused.names.insert(name);
  }
  Watch::Get().Repeat([=, &refused] {
    farandole_work* started = nullptr;
    std::vector<void*> none(prepared.tensors);  // it reads and writes nothing
    const int code = prepared.operation == nullptr
                         ? FARANDOLE_ABORTED
                         : farandole_start(prepared.operation.get(), prepared.version, none.data(),
                                           none.data(), nullptr, why.message.c_str(), &started);
    const Outcome outcome = OutcomeOf(code);
    farandole_leave_thread();
    if (code == FARANDOLE_INVALID_ARGUMENT &&
        outcome.message.find("\" is already in flight") != std::string::npos)
      return false;
    {
      const std::lock_guard lock(refused.mutex);
      refused.names.erase(refused.names.find(name));
    }
    if (code == FARANDOLE_OK)
      CallWhenFinished(WorkHandle(started, &farandole_work_release), [=](const Outcome& ended) {
        finish(ended.code == FARANDOLE_ABORTED ? why : ended);  // which says more here
      });
    else
      finish(why);
    return true;
  });
}

}  // namespace

Current& TheCurrent() {
  static Current& current = *new Current;  // XLA's threads may outlive static objects
  return current;
}

XLA_FFI_Error* Promise::Begin(XLA_FFI_CallFrame* frame) {
  api_ = frame->api;
  XLA_FFI_Future_Create_Args args{XLA_FFI_Future_Create_Args_STRUCT_SIZE, nullptr, nullptr};
  if (XLA_FFI_Error* error = api_->XLA_FFI_Future_Create(&args)) return error;
  future_ = frame->future = args.future;
  return nullptr;
}

void Promise::Fulfil(const Outcome& outcome) const {
  SetFuture(outcome);
  farandole_leave_thread();  // what XLA ran may have entered it
}

void Promise::SetFuture(const Outcome& outcome) const {
  if (outcome.code == FARANDOLE_OK) {
    XLA_FFI_Future_SetAvailable_Args args{XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, nullptr,
                                          future_};
    api_->XLA_FFI_Future_SetAvailable(&args);
    return;
  }
  XLA_FFI_Future_SetError_Args args{XLA_FFI_Future_SetError_Args_STRUCT_SIZE, nullptr, future_,
                                    MakeError(api_, outcome.code, outcome.message)};
  api_->XLA_FFI_Future_SetError(&args);
}

Outcome Start(const Attributes& attributes, Arrays* arrays, Prepared* prepared, WorkHandle* work) {
  Outcome outcome = Prepare(attributes, arrays, prepared);
  if (outcome.code != FARANDOLE_OK) return outcome;
  const std::string& name = attributes.name;
  if (IsRefused(name)) return {FARANDOLE_INVALID_ARGUMENT, "\"" + name + "\" is already in flight"};
  for (const farandole_output& output : arrays->out)
    UseHugePages(output.data, static_cast<size_t>(output.bytes));
  farandole_work* started = nullptr;
  farandole_operation* const operation = prepared->operation.get();
  const double block_s = BlockSeconds(*arrays);
  const std::vector<int64_t> rows = RowsOf(attributes, *arrays);
  for (size_t i = 0; i < arrays->out.size() && !rows.empty(); ++i)
    arrays->out[i].rows = &rows[i * static_cast<size_t>(attributes.size)];
  const int code =
      arrays->out.empty()
          ? farandole_run(operation, prepared->version, nullptr, nullptr, block_s, &started)
          : farandole_run_into(operation, prepared->version, arrays->in.data(), arrays->out.data(),
                               block_s, &started);
  if (started != nullptr) work->reset(started, &farandole_work_release);
  outcome = OutcomeOf(code);
  for (farandole_output& output : arrays->out) output.rows = nullptr;  // which was copied
  farandole_leave_thread();
  return outcome;
}

void Continue(const Attributes& attributes, const Outcome& outcome, Prepared prepared,
              const WorkHandle& work, std::function<void(const Outcome&)> finish) {
  if (outcome.code == FARANDOLE_PENDING) return CallWhenFinished(work, std::move(finish));
  if (outcome.code != FARANDOLE_INVALID_ARGUMENT) return finish(outcome);
  if (prepared.operation == nullptr) prepared = PrepareStandIn(attributes);
  Refuse(attributes.name, prepared, outcome, finish);
}

void Complete(const Arrays& arrays) {
  for (const farandole_output& output : arrays.out)
    if (arrays.become_zero && output.bytes > 0)
      std::memset(output.data, 0, static_cast<size_t>(output.bytes));
}

}  // namespace farandole::xla
