// The C ABI's functions: life cycle, collectives, observation. Nothing throws past this file.
#include "bindings/c/farandole.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/c/handles.h"

using farandole::Engine;
using farandole::FromHandle;
using farandole::Generation;
using farandole::Report;
using farandole::ReportException;
using farandole::ReportNull;
using farandole::Result;
using farandole::Status;
using farandole::Work;

const char* farandole_version(void) { return FARANDOLE_BUILD_ID; }
int farandole_abi_version(void) { return FARANDOLE_ABI_VERSION; }

namespace {

constexpr size_t kLongestValue = 4096;

/// A caller's store. Called on his thread: see Bootstrap.
class CallersStore final : public farandole::Store {
 public:
  explicit CallersStore(const farandole_store& store) : store_(store) {}

  Status Set(const std::string& key, const std::string& value) override {
    return Check(store_.set(store_.user, key.c_str(), value.data(), value.size()), "set", key);
  }
  Result<std::string> Get(const std::string& key, int64_t timeout_ns) override {
    const double timeout_s =
        static_cast<double>(timeout_ns) / static_cast<double>(farandole::kNsPerSecond);
    const int code = store_.wait(store_.user, key.c_str(), timeout_s);
    FARANDOLE_RETURN_IF_ERROR(Check(code, "wait", key));
    std::string value(kLongestValue, '\0');
    size_t size = 0;
    const int got = store_.get(store_.user, key.c_str(), value.data(), value.size(), &size);
    FARANDOLE_RETURN_IF_ERROR(Check(got, "get", key));
    if (size > value.size())
      return farandole::Unavailable("init: store: \"" + key + "\" is too long");
    value.resize(size);
    return value;
  }

 private:
  // PENDING: it is asked again.
  static Status Check(int code, const char* function, const std::string& key) {
    if (code == FARANDOLE_OK) return {};
    if (code == FARANDOLE_PENDING) return farandole::Timeout("\"" + key + "\" is not there yet");
    return farandole::Unavailable(std::string("init: ") + function + "(\"" + key +
                                  "\") of the store failed with code " + std::to_string(code));
  }
  const farandole_store store_;
};

Result<farandole::InitOptions> ToInitOptions(const farandole_init_options* options) {
  farandole::InitOptions init;
  if (options == nullptr) return init;
  FARANDOLE_RETURN_IF_ERROR(FARANDOLE_CHECK_STRUCT(farandole_init_options, *options));
  init.rank = options->rank;
  init.size = options->size;
  init.local_rank = options->local_rank;
  init.apart = options->apart != 0;
  if (!(options->timeout_s >= 0 && options->timeout_s <= farandole::kMostSettingSeconds)) {
    return farandole::InvalidArgument("init: timeout_s is " + std::to_string(options->timeout_s) +
                                      "; expected 0 to " +
                                      std::to_string(farandole::kMostSettingSeconds));
  }
  init.timeout_s = options->timeout_s;
  init.in_order = options->in_order != 0;
  if (options->address != nullptr) init.address = options->address;
  if (const farandole_store* store = options->store) {
    if (store->set == nullptr || store->wait == nullptr || store->get == nullptr) {
      return farandole::InvalidArgument("init: a store needs set, wait and get");
    }
    init.store = std::make_shared<CallersStore>(*store);
  }
  return init;
}

}  // namespace

int farandole_init(const farandole_init_options* options, farandole_context** out) {
  if (out == nullptr) return ReportNull("out");
  *out = nullptr;
  return farandole_init_for(options, -1, out);
}

int farandole_init_for(const farandole_init_options* options, double timeout_s,
                       farandole_context** context) try {
  if (context == nullptr) return ReportNull("context");
  if (*context == nullptr) {
    const Result<farandole::InitOptions> init = ToInitOptions(options);
    if (!init.ok()) return Report(init.status());
    Result<std::unique_ptr<Generation>> begun = Generation::Begin(init.value());
    if (!begun.ok()) return Report(begun.status());
    *context = new farandole_context{std::move(begun).value(), {}, {}};
  }
  // The handle is the state of the call: it stays in *context while the answer is PENDING.
  Result<bool> joined = (*context)->generation->Joined(farandole::TimeoutNs(timeout_s));
  if (joined.ok()) return joined.value() ? FARANDOLE_OK : FARANDOLE_PENDING;
  farandole_release(std::exchange(*context, nullptr));
  return Report(joined.status());
} catch (...) {
  const int code = ReportException();
  farandole_release(std::exchange(*context, nullptr));
  return code;
}

int farandole_init_in_process(int size, farandole_context** out) try {
  if (out == nullptr) return ReportNull("out");
  Result<std::vector<std::unique_ptr<Generation>>> contexts = Generation::InProcess(size);
  if (!contexts.ok()) return Report(contexts.status());
  for (std::unique_ptr<Generation>& context : contexts.value())
    *out++ = new farandole_context{std::move(context), {}, {}};
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_shutdown(farandole_context* context) { return farandole_shutdown_for(context, -1); }

int farandole_shutdown_for(farandole_context* context, double timeout_s) {
  return farandole_leave_at_exit(context, FARANDOLE_EXIT_BY_OTHER, nullptr, timeout_s);
}

int farandole_leave_at_exit(farandole_context* context, int32_t reason, const char* cause,
                            double timeout_s) try {
  if (context == nullptr) return ReportNull("context");
  if (reason < FARANDOLE_EXIT_OPEN || reason > FARANDOLE_EXIT_BY_OTHER) {
    return Report(farandole::InvalidArgument("reason " + std::to_string(reason)));
  }
  farandole::Lifecycle::Parting parting;
  parting.is_final = reason != FARANDOLE_EXIT_OPEN;
  if (cause != nullptr) parting.failure.cause = cause;
  if (reason == FARANDOLE_EXIT_BY_ERROR) parting.failure.kind = farandole::FailureKind::kError;
  const int64_t timeout_ns = farandole::TimeoutNs(timeout_s);
  if (!context->generation->Shutdown(timeout_ns, std::move(parting))) return FARANDOLE_PENDING;
  // Who has been told by an operation, and shuts down to go on, need not be told again.
  const bool goes_on = reason == FARANDOLE_EXIT_BY_OTHER && cause == nullptr;
  if (goes_on && context->generation->has_told()) return FARANDOLE_OK;
  return Report(context->generation->shutdown_status());
} catch (...) {
  return ReportException();
}

void farandole_release(farandole_context* context) {
  if (context == nullptr) return;
  context->generation->Close();
  // Leaked on purpose where a thread that was left behind may return into it, as this one does when
  // a callback calls this.
  if (context->generation->given_up() || context->generation->IsInCallback()) return;
  farandole::World::Get().Retire(std::move(context->generation));
  delete context;
}

int farandole_check(const farandole_context* context) try {
  if (context == nullptr) return ReportNull("context");
  const Engine& engine = context->generation->engine();
  return Report(engine, engine.operations().FindSet(farandole::kGlobalSet).status());
} catch (...) {
  return ReportException();
}

int farandole_get_topology(const farandole_context* context, farandole_topology* out) try {
  if (context == nullptr || out == nullptr) return ReportNull("context or out");
  const Engine& engine = context->generation->engine();
  const farandole::Rendezvous& rendezvous = context->generation->rendezvous();
  *out = {engine.rank(),         engine.size(),         rendezvous.local_rank,
          rendezvous.local_size, rendezvous.cross_rank, rendezvous.cross_size};
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

// On the caller's thread, under the registry's mutex. Nothing is sent: other ranks learn of the
// operation when it is started.
int farandole_prepare(farandole_context* context, const farandole_params* params, const char* name,
                      const farandole_tensor* tensors, int32_t count, farandole_operation** out,
                      uint32_t* version) try {
  if (context == nullptr || params == nullptr || out == nullptr)
    return ReportNull("context, params or out");
  Result<farandole::Signature> signature = farandole::ToSignature(*params);
  if (!signature.ok()) return Report(signature.status());
  Result<std::vector<farandole::TensorSignature>> signatures =
      farandole::ToTensorSignatures(tensors, count);
  if (!signatures.ok()) return Report(signatures.status());
  signature.value().tensors = std::move(signatures).value();
  Engine& engine = context->generation->engine();
  uint32_t uid = 0;
  if (const int code = farandole::FromSetHandle(*context->generation, params->set, &uid))
    return code;
  // After the tensors, whose number says how many splits there are.
  const Result<std::vector<int64_t>> splits =
      farandole::ToSplits(*params, engine, uid, signature.value().tensors.size());
  if (!splits.ok()) return Report(engine, splits.status());
  const auto kind = static_cast<farandole::OpKind>(params->kind);
  Result<farandole::Operation*> prepared =
      name == nullptr ? engine.operations().PrepareUnnamed(uid, kind, signature.value(), version,
                                                           splits.value())
                      : engine.operations().Prepare({uid, kind, name}, signature.value(), version,
                                                    splits.value());
  if (!prepared.ok()) return Report(engine, prepared.status());
  if (prepared.value() == nullptr) return FARANDOLE_PENDING;
  context->generation->CountHandles(1);
  *out = farandole::ToHandle(prepared.value());
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

void farandole_operation_release(farandole_operation* operation) {
  if (operation == nullptr) return;
  const Engine& engine = *FromHandle(operation)->engine;
  farandole::ReleaseOperation()(FromHandle(operation));
  Generation::Of(engine).CountHandles(-1);
}

namespace {

/// In a Vote an empty text means that nothing failed, so a failure without a text gets one. The
/// masks get memory only where a bit is set: an ordinary start allocates none.
Result<farandole::Vote> ToVote(const farandole::Operation& operation, const uint8_t* votes,
                               const char* failed) {
  farandole::Vote vote;
  if (failed != nullptr) vote.failed = *failed == '\0' ? "unknown error" : failed;
  const int count = static_cast<int>(operation.signature.tensors.size());
  for (int i = 0; votes != nullptr && i < count; ++i) {
    if (votes[i] > FARANDOLE_CLEAN) {
      return farandole::InvalidArgument("vote of tensor " + std::to_string(i) + " is " +
                                        std::to_string(votes[i]) + "; expected 0 to 2");
    }
    if (votes[i] == FARANDOLE_ABSENT) farandole::SetBit(vote.absent, i, count);
    if (votes[i] == FARANDOLE_CLEAN) farandole::SetBit(vote.clean, i, count);
  }
  return vote;
}

/// Arguments of a start. Borrowed for the call; the tensors' memory until the work has finished.
struct Request {
  uint32_t version;       // of the description the caller prepared; 0: any
  const void* const* in;  // one address per tensor
  void* const* out;       // likewise; nullptr with an allocator
  const uint8_t* votes;   // one per tensor; nullptr: all present
  const char* failed;     // nullptr: nothing failed
  std::span<const farandole::ProducerStream> producers;  // of a GPU; else empty
  std::shared_ptr<farandole::ResultAllocator> allocator = nullptr;
  const farandole_output* into = nullptr;  // one per tensor, instead of `out`; nullptr: `out`
};

/// Puts addresses or an allocator in the place of `request.into`. @return InvalidArgument.
Status UseOutputs(const farandole::Operation& operation, Request& request,
                  std::vector<void*>& addresses) {
  if (farandole::RowsMayDiffer(operation.name.kind)) {
    auto results = farandole::OutputResults::Create(operation, request.in, request.into);
    if (!results.ok()) return results.status();
    request.allocator = std::move(results).value();
    return {};
  }
  Result<std::vector<void*>> given = farandole::ToAddresses(operation, request.in, request.into);
  if (!given.ok()) return given.status();
  addresses = std::move(given).value();
  request.out = addresses.data();
  return {};
}

/// Claims the operation before it reads its signature or its name. Until StartClaimed or Release
/// no other thread can redefine it, nor make it an operation of another set once its own has ended.
Result<std::shared_ptr<Work>> StartOn(farandole::Operation& operation, Request request,
                                      bool notify) {
  Engine& engine = *operation.engine;
  engine.EnterCaller();
  FARANDOLE_RETURN_IF_ERROR(engine.operations().Claim(operation, request.version));
  farandole::ClaimedOperation claimed(operation);
  if (request.version == 0 && operation.name.set != farandole::kGlobalSet) {
    return farandole::InvalidArgument(
        "version is 0; expected the one that farandole_prepare gave, because an operation of a "
        "process set may be another one's when that has ended");
  }
  const size_t count = operation.signature.tensors.size();
  Result<farandole::Vote> vote = ToVote(operation, request.votes, request.failed);
  Status good = vote.status();
  if (good.ok() && request.allocator != nullptr && !farandole::RowsMayDiffer(operation.name.kind)) {
    good = farandole::InvalidArgument(farandole::Describe(operation.name) +
                                      ": its results have a size that is known; expected "
                                      "farandole_start, or an allgather or alltoall");
  }
  const bool has_results =
      request.out != nullptr || request.into != nullptr || request.allocator != nullptr;
  if (good.ok() && count > 0 && (request.in == nullptr || !has_results))
    good = farandole::InvalidArgument("in and out must have one pointer per tensor");
  std::vector<void*> addresses;
  if (good.ok() && request.into != nullptr) good = UseOutputs(operation, request, addresses);
  if (!good.ok()) return good;
  claimed.HandOn();
  const bool allocates = request.allocator != nullptr;
  return engine.StartClaimed(operation, {request.in, count}, {request.out, allocates ? 0 : count},
                             vote.value(), notify, request.producers, std::move(request.allocator));
}

int StartWork(farandole_operation* handle, const Request& request, farandole_work** work) {
  if (handle == nullptr || work == nullptr) return ReportNull("operation or work");
  farandole::Operation& operation = *FromHandle(handle);
  auto owned = std::make_unique<farandole_work>();  // before anything is in flight
  Result<std::shared_ptr<Work>> started = StartOn(operation, request, true);
  if (!started.ok()) return Report(*operation.engine, started.status());
  *owned = {std::move(started).value(), operation.engine};
  *work = owned.release();
  return FARANDOLE_OK;
}

/// Starts without notifying the engine's thread: this thread waits at once and runs the engine
/// itself if it can, which spares two wake-ups. A handle is allocated only if time runs out.
int RunWork(farandole_operation* handle, const Request& request, double timeout_s,
            farandole_work** work) {
  if (handle == nullptr || work == nullptr) return ReportNull("operation or work");
  *work = nullptr;
  farandole::Operation& operation = *FromHandle(handle);
  Result<std::shared_ptr<Work>> started = StartOn(operation, request, false);
  if (!started.ok()) return Report(*operation.engine, started.status());
  const int code = farandole::WaitFor(*operation.engine, *started.value(), timeout_s);
  if (code == FARANDOLE_PENDING)
    *work = new farandole_work{std::move(started).value(), operation.engine};
  return code;
}

/// The library's own results, of a GPU where there is a stream.
Result<std::shared_ptr<farandole::LibraryResults>> MakeResults(
    Engine& engine, const farandole::ProducerStream* stream) {
  farandole::Device* device = nullptr;
  if (stream != nullptr) {
    const Result<farandole::Device*> gpu = engine.GpuOf(*stream);
    if (!gpu.ok()) return gpu.status();
    device = gpu.value();
  }
  return std::make_shared<farandole::LibraryResults>(device);
}

}  // namespace

int farandole_start(farandole_operation* handle, uint32_t version, const void* const* in,
                    void* const* out, const uint8_t* votes, const char* failed,
                    farandole_work** work) try {
  return StartWork(handle, {version, in, out, votes, failed, {}}, work);
} catch (...) {
  return ReportException();
}

// The stream is used during the call only, to record the event after which inputs may be read.
int farandole_start_on(farandole_operation* handle, uint32_t version, const void* const* in,
                       void* const* out, const uint8_t* votes, const char* failed,
                       const farandole_stream* stream, farandole_work** work) try {
  Result<farandole::ProducerStream> producer = farandole::ToStream(stream);
  if (!producer.ok()) return Report(producer.status());
  return StartWork(handle, {version, in, out, votes, failed, {&producer.value(), 1}}, work);
} catch (...) {
  return ReportException();
}

int farandole_start_allocating(farandole_operation* handle, uint32_t version, const void* const* in,
                               const farandole_allocator* allocator, const farandole_stream* stream,
                               farandole_work** work) try {
  return farandole_start_allocating_on(handle, version, in, allocator, stream, nullptr, work);
} catch (...) {
  return ReportException();
}

int farandole_start_allocating_on(farandole_operation* handle, uint32_t version,
                                  const void* const* in, const farandole_allocator* allocator,
                                  const farandole_stream* stream,
                                  const farandole_stream* memory_stream,
                                  farandole_work** work) try {
  if (handle == nullptr || work == nullptr) return ReportNull("operation or work");
  std::vector<farandole::ProducerStream> producers;
  // The last one is where the allocator's memory is free.
  for (const farandole_stream* const one : {stream, memory_stream}) {
    if (one == nullptr) continue;
    const Result<farandole::ProducerStream> producer = farandole::ToStream(one);
    if (!producer.ok()) return Report(producer.status());
    if (producers.empty() || producers.back() != producer.value())
      producers.push_back(producer.value());
  }
  // The operation holds the allocator until it has finished; the handle holds the library's results
  // until the caller has taken them, which may be after that.
  std::shared_ptr<farandole::LibraryResults> results;
  std::shared_ptr<farandole::ResultAllocator> memory;
  if (allocator == nullptr) {
    auto made =
        MakeResults(*FromHandle(handle)->engine, producers.empty() ? nullptr : producers.data());
    if (!made.ok()) return Report(made.status());
    memory = results = std::move(made).value();
  } else {
    if (const Status checked = farandole::CheckAllocator(*allocator); !checked.ok())
      return Report(checked);
    memory = std::make_shared<farandole::CallbackResults>(*allocator);
  }
  const int code = StartWork(
      handle, {version, in, nullptr, nullptr, nullptr, producers, std::move(memory)}, work);
  if (code == FARANDOLE_OK) (*work)->results = std::move(results);
  return code;
} catch (...) {
  return ReportException();
}

int farandole_received_rows(const farandole_work* work, int32_t i, int64_t* rows,
                            int32_t ranks) try {
  if (work == nullptr || rows == nullptr) return ReportNull("work or rows");
  // Until the work is done the engine may be writing the rows. A negative i becomes a number that
  // no tensor has, for which rows() is empty.
  const auto received =
      work->work->done() ? work->work->rows(static_cast<size_t>(i)) : std::span<const int64_t>();
  if (std::ssize(received) != ranks) {
    return Report(farandole::InvalidArgument(
        "rows of tensor " + std::to_string(i) + " came from " + std::to_string(received.size()) +
        " ranks; expected room for as many, got " + std::to_string(ranks)));
  }
  std::ranges::copy(received, rows);
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_take_result(farandole_work* work, int32_t i, farandole_buffer** result) try {
  if (work == nullptr || result == nullptr) return ReportNull("work or result");
  // done() acquires what the engine's thread wrote, so the results may be looked at only after it.
  const bool done = work->work->done() && work->work->status().ok() && work->results != nullptr;
  *result = done ? work->results->Take(static_cast<size_t>(i)).release() : nullptr;
  if (*result != nullptr) return FARANDOLE_OK;
  return Report(
      farandole::InvalidArgument("tensor " + std::to_string(i) +
                                 " has no result in the library's memory, or it was taken before"));
} catch (...) {
  return ReportException();
}

int farandole_buffer_allocate(farandole_context* context, int64_t bytes,
                              farandole_buffer** out) try {
  if (context == nullptr || out == nullptr) return ReportNull("context or out");
  if (bytes < 0) {
    return Report(farandole::InvalidArgument("a buffer of " + std::to_string(bytes) +
                                             " bytes; expected at least 0"));
  }
  Result<std::shared_ptr<std::byte>> memory = context->generation->AllocateShared(bytes);
  if (memory.value() == nullptr) memory = farandole::AllocateZeroes(bytes);
  if (!memory.ok()) return Report(memory.status());
  *out = new farandole_buffer(std::move(memory).value(), bytes);
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

void* farandole_buffer_data(const farandole_buffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->data;
}

int64_t farandole_buffer_bytes(const farandole_buffer* buffer) {
  return buffer == nullptr ? 0 : buffer->bytes;
}

void farandole_buffer_release(farandole_buffer* buffer) { delete buffer; }

int farandole_wait_on(farandole_work* work, const farandole_stream* stream, double timeout_s) try {
  if (work == nullptr) return ReportNull("work");
  Result<farandole::ProducerStream> waiting = farandole::ToStream(stream);
  if (!waiting.ok()) return Report(waiting.status());
  // On a GPU this returns when all is launched. Before that there is no end event to wait for.
  const int code = farandole::WaitFor(*work->engine, *work->work, timeout_s);
  if (code != FARANDOLE_OK) return code;
  return Report(*work->engine, work->engine->MakeWait(work->work->end(), waiting.value()));
} catch (...) {
  return ReportException();
}

int farandole_is_complete(const farandole_work* work) {
  if (work == nullptr) return ReportNull("work");
  if (!work->work->done()) return FARANDOLE_PENDING;
  if (!work->work->status().ok()) return Report(*work->engine, work->work->status());
  // It ran on the CPU, where done means complete, or nothing had to run.
  if (work->work->end() == nullptr) return FARANDOLE_OK;
  Result<bool> complete = work->work->end()->IsComplete();
  if (!complete.ok()) return Report(complete.status());
  return complete.value() ? FARANDOLE_OK : FARANDOLE_PENDING;
}

int farandole_run(farandole_operation* handle, uint32_t version, const void* const* in,
                  void* const* out, double timeout_s, farandole_work** work) try {
  return RunWork(handle, {version, in, out, nullptr, nullptr, {}}, timeout_s, work);
} catch (...) {
  return ReportException();
}

int farandole_start_into(farandole_operation* handle, uint32_t version, const void* const* in,
                         const farandole_output* out, const farandole_stream* stream,
                         farandole_work** work) try {
  Result<farandole::ProducerStream> producer = farandole::ProducerStream();
  if (stream != nullptr) producer = farandole::ToStream(stream);
  if (!producer.ok()) return Report(producer.status());
  const size_t streams = stream != nullptr ? 1 : 0;
  return StartWork(
      handle, {version, in, nullptr, nullptr, nullptr, {&producer.value(), streams}, nullptr, out},
      work);
} catch (...) {
  return ReportException();
}

int farandole_run_into(farandole_operation* handle, uint32_t version, const void* const* in,
                       const farandole_output* out, double timeout_s, farandole_work** work) try {
  return RunWork(handle, {version, in, nullptr, nullptr, nullptr, {}, nullptr, out}, timeout_s,
                 work);
} catch (...) {
  return ReportException();
}

int farandole_wait(farandole_work* work, double timeout_s) try {
  if (work == nullptr) return ReportNull("work");
  return farandole::WaitFor(*work->engine, *work->work, timeout_s);
} catch (...) {
  return ReportException();
}

int farandole_when_finished(farandole_work* work, farandole_finished call, void* user) try {
  if (work == nullptr || call == nullptr) return ReportNull("work or call");
  // `work` may be released by the call, or meanwhile by another thread.
  const std::shared_ptr<Work> waited = work->work;
  Engine& engine = *work->engine;
  engine.WhenDone(
      waited, [call, user, &engine](const Status& status) { call(user, Report(engine, status)); });
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

void farandole_wait_in_slices(int32_t threads, int32_t helpers) {
  farandole::CallerThreads::WaitInSlices(threads, helpers);
}

void farandole_describe_with(farandole_describe describe) {
  farandole::SetDescribeProgram(describe);
}

int farandole_poll(farandole_work* work) {
  return work != nullptr && work->engine->Poll(*work->work) ? 1 : 0;
}

int farandole_skipped(const farandole_work* work, int32_t i) try {
  return work != nullptr && work->work->done() && work->work->skipped(i) ? 1 : 0;
} catch (...) {
  return ReportException();
}

void farandole_work_release(farandole_work* work) { delete work; }

int farandole_join(farandole_context* context, double timeout_s, int* last_rank) try {
  if (context == nullptr || last_rank == nullptr) return ReportNull("context or last_rank");
  Engine& engine = context->generation->engine();
  // The join goes on between calls, so that a call after PENDING waits for the same one. The mutex
  // is held while this thread sleeps: a second caller waits for it, too.
  std::lock_guard lock(context->join_mutex);
  if (context->joining == nullptr) {
    Result<std::shared_ptr<Work>> joined = engine.Join();
    if (!joined.ok()) return Report(engine, joined.status());
    context->joining = std::move(joined).value();
  }
  // Not WaitFor, which may run the engine on this thread: a join ends in time even if that is
  // stuck.
  if (!context->joining->SleepUntilDoneFor(farandole::TimeoutNs(timeout_s)))
    return FARANDOLE_PENDING;
  const int code = Report(engine, context->joining->status());
  context->joining = nullptr;
  *last_rank = engine.lifecycle().last_joined();
  return code;
} catch (...) {
  return ReportException();
}

int32_t farandole_counters(const farandole_context* context, const char** names, int64_t* values,
                           int32_t capacity) {
  if (context == nullptr) return 0;
  context->generation->CountWakeUps();
  int32_t count = 0;
  for (const farandole::NamedCount& one :
       farandole::Snapshot(context->generation->engine().counters())) {
    if (count < capacity) {
      // With a NUL behind it, as CounterName gives literals.
      if (names != nullptr) names[count] = one.name.data();
      if (values != nullptr) values[count] = one.value;
    }
    ++count;
  }
  return count;
}

int farandole_timeline_start(farandole_context* context, const char* path, int marks_cycles) try {
  if (context == nullptr || path == nullptr) return ReportNull("context or path");
  return Report(context->generation->timeline().Start(path, marks_cycles != 0));
} catch (...) {
  return ReportException();
}

int farandole_timeline_stop(farandole_context* context) try {
  if (context == nullptr) return ReportNull("context");
  return Report(context->generation->timeline().Stop());
} catch (...) {
  return ReportException();
}

int farandole_get_setting(const farandole_context* context, const char* name,
                          const char** value) try {
  if (context == nullptr || name == nullptr || value == nullptr)
    return ReportNull("context, name or value");
  // For each thread, so that no other thread's call changes the text that this caller reads.
  thread_local std::string text;
  for (farandole::SettingText& setting : farandole::Describe(context->generation->config())) {
    if (setting.name != name) continue;
    text = std::move(setting.value);
    *value = text.c_str();
    return FARANDOLE_OK;
  }
  return Report(farandole::InvalidArgument(std::string(name) + " is not a setting of Farandole"));
} catch (...) {
  return ReportException();
}
