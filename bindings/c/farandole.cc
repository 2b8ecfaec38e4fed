// The C ABI's functions: life cycle, collectives, observation. Nothing throws past this file.
#include "bindings/c/farandole.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/c/handles.h"
#include "coordinator/protocol/splits.h"
#include "core/net/job_key.h"
#include "core/slots.h"

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

farandole::Status CheckTimeout(const char* function, double timeout_s) {
  if (timeout_s >= 0 && timeout_s <= farandole::kMostSettingSeconds) return {};
  return farandole::InvalidArgument(std::string(function) + ": timeout_s is " +
                                    std::to_string(timeout_s) + "; expected 0 to " +
                                    std::to_string(farandole::kMostSettingSeconds));
}

Result<farandole::InitOptions> ToInitOptions(const farandole_init_options* options) {
  farandole::InitOptions init;
  if (options == nullptr) return init;
  FARANDOLE_RETURN_IF_ERROR(FARANDOLE_CHECK_STRUCT(farandole_init_options, *options));
  init.rank = options->rank;
  init.size = options->size;
  init.local_rank = options->local_rank;
  init.apart = options->apart != 0;
  FARANDOLE_RETURN_IF_ERROR(CheckTimeout("init", options->timeout_s));
  init.timeout_s = options->timeout_s;
  init.in_order = options->in_order != 0;
  FARANDOLE_RETURN_IF_ERROR(
      farandole::CheckRange("init: slots", options->slots, farandole::kMostSlots));
  init.slots = options->slots;
  init.is_elastic = options->is_elastic != 0;
  if (options->members != nullptr) init.members = options->members;
  if (options->address != nullptr) init.address = options->address;
  if (const farandole_store* store = options->store) {
    if (store->set == nullptr || store->wait == nullptr || store->get == nullptr) {
      return farandole::InvalidArgument("init: a store needs set, wait and get");
    }
    init.store = std::make_shared<CallersStore>(*store);
  }
  return init;
}

/// The handle is the state of the call: it stays in *context while the answer is PENDING.
int JoinFor(int64_t timeout_ns, farandole_context** context) {
  Result<bool> joined = (*context)->generation->Joined(timeout_ns);
  if (joined.ok()) return joined.value() ? FARANDOLE_OK : FARANDOLE_PENDING;
  farandole_release(std::exchange(*context, nullptr));
  return Report(joined.status());
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
  const int code = JoinFor(farandole::TimeoutNs(timeout_s), context);
  if (code == FARANDOLE_OK) (*context)->generation->NotifyLauncher();
  return code;
} catch (...) {
  const int code = ReportException();
  farandole_release(std::exchange(*context, nullptr));
  return code;
}

// As in farandole_init_for the handle of the next generation is the state of the call.
int farandole_reinit(farandole_context* old, const farandole_reinit_options* options,
                     farandole_context** next) try {
  if (old == nullptr || next == nullptr) return ReportNull("old or next");
  if (options != nullptr) {
    const Status checked = FARANDOLE_CHECK_STRUCT(farandole_reinit_options, *options);
    if (!checked.ok()) return Report(checked);
  }
  const int64_t timeout_ns = options == nullptr ? -1 : farandole::TimeoutNs(options->timeout_s);
  if (*next == nullptr) {
    if (!old->generation->EndForNext(timeout_ns)) return FARANDOLE_PENDING;
    Result<std::unique_ptr<Generation>> begun = Generation::BeginNext(*old->generation);
    if (!begun.ok()) return Report(begun.status());
    *next = new farandole_context{std::move(begun).value(), {}, {}};
  }
  return JoinFor(timeout_ns, next);
} catch (...) {
  const int code = ReportException();
  farandole_release(std::exchange(*next, nullptr));
  return code;
}

int farandole_generation_number(const farandole_context* context, uint64_t* number) {
  if (context == nullptr || number == nullptr) return ReportNull("context or number");
  *number = context->generation->number_in_job();
  return FARANDOLE_OK;
}

int farandole_change_is_due(const farandole_context* context, int* is_due) try {
  if (context == nullptr || is_due == nullptr) return ReportNull("context or is_due");
  *is_due = context->generation->change_is_due() ? 1 : 0;
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_members(const farandole_context* context, int rank, const char** members) try {
  if (context == nullptr || members == nullptr) return ReportNull("context or members");
  const int size = context->generation->engine().size();
  if (rank < -1 || rank >= size) {
    return Report(farandole::InvalidArgument("members of rank " + std::to_string(rank) +
                                             "; expected -1 to " + std::to_string(size - 1)));
  }
  thread_local std::string text;
  text = context->generation->members(rank);
  *members = text.c_str();
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
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

int farandole_slot_range(const farandole_context* context, int* begin, int* end) try {
  if (context == nullptr || begin == nullptr || end == nullptr)
    return ReportNull("context, begin or end");
  const Engine& engine = context->generation->engine();
  const auto slots = static_cast<int>(context->generation->config().slots);
  if (slots == 0) {
    return Report(farandole::InvalidArgument("this job has no slots; expected init with slots"));
  }
  const farandole::SlotRange mine =
      farandole::SlotRanges(slots, engine.size())[static_cast<size_t>(engine.rank())];
  *begin = mine.begin;
  *end = mine.end;
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

/// What a request has besides addresses: checked, before its operation is claimed.
struct Request {
  std::array<farandole::ProducerStream, 2> streams;
  size_t stream_count = 0;
  std::shared_ptr<farandole::ResultAllocator> allocator;
  std::shared_ptr<farandole::LibraryResults> results;  // the same, where it is the library's
};

/// The last stream is where the allocator's memory is free. They are used during the call only, to
/// record the events after which the memory may be used.
Status ReadStreams(const farandole_request& given, Request& request) {
  for (const farandole_stream* const one : {given.stream, given.memory_stream}) {
    if (one == nullptr) continue;
    const Result<farandole::ProducerStream> producer = farandole::ToStream(one);
    if (!producer.ok()) return producer.status();
    if (request.stream_count == 0 || request.streams[0] != producer.value())
      request.streams[request.stream_count++] = producer.value();
  }
  return {};
}

/// The library's own results are on a GPU where there is a stream. The operation holds an allocator
/// until it has finished; the handle holds the library's until the caller has taken them.
Status MakeAllocator(Engine& engine, const farandole_request& given, Request& request) {
  if (given.allocator != nullptr) {
    FARANDOLE_RETURN_IF_ERROR(farandole::CheckAllocator(*given.allocator));
    request.allocator = std::make_shared<farandole::CallbackResults>(*given.allocator);
  }
  if (given.in_library == 0) return {};
  farandole::Device* device = nullptr;
  if (request.stream_count > 0) {
    const Result<farandole::Device*> gpu = engine.GpuOf(request.streams[0]);
    if (!gpu.ok()) return gpu.status();
    device = gpu.value();
  }
  request.allocator = request.results = std::make_shared<farandole::LibraryResults>(device);
  return {};
}

/// @return InvalidArgument unless there are inputs, and one place for the results.
Status CheckPlaces(const farandole::Operation& operation, const farandole_request& given) {
  const bool any_size = given.allocator != nullptr || given.in_library != 0;
  if (any_size && !farandole::RowsMayDiffer(operation.name.kind)) {
    return farandole::InvalidArgument(farandole::Describe(operation.name) +
                                      ": its results have a size that is known; expected addresses "
                                      "in out, or an allgather or alltoall");
  }
  if (operation.signature.tensors.empty()) return {};
  const int places = (given.out != nullptr ? 1 : 0) + (given.outputs != nullptr ? 1 : 0) +
                     (given.allocator != nullptr ? 1 : 0) + (given.in_library != 0 ? 1 : 0);
  if (given.in != nullptr && places == 1) return {};
  if (places > 1) {
    return farandole::InvalidArgument(
        farandole::Describe(operation.name) + ": its results go to " + std::to_string(places) +
        " places; expected one of out, outputs, allocator and in_library");
  }
  return farandole::InvalidArgument("in and out must have one pointer per tensor");
}

/// Puts addresses or an allocator in the place of `outputs`. @return InvalidArgument.
Status UseOutputs(const farandole::Operation& operation, const farandole_request& given,
                  Request& request, std::vector<void*>& addresses) {
  if (farandole::RowsMayDiffer(operation.name.kind)) {
    auto results = farandole::OutputResults::Create(operation, given.in, given.outputs);
    if (!results.ok()) return results.status();
    request.allocator = std::move(results).value();
    return {};
  }
  Result<std::vector<void*>> found = farandole::ToAddresses(operation, given.in, given.outputs);
  if (!found.ok()) return found.status();
  addresses = std::move(found).value();
  return {};
}

/// Claims the operation before it reads its signature or its name: no other thread can then
/// redefine it, nor make it an operation of another set once its own has ended. `notify` false:
/// this thread waits at once and runs the engine itself if it can, which spares two wake-ups.
Result<std::shared_ptr<Work>> StartOn(farandole::Operation& operation,
                                      const farandole_request& given, Request& request,
                                      bool notify) {
  Engine& engine = *operation.engine;
  if (given.stream != nullptr || given.memory_stream != nullptr)
    FARANDOLE_RETURN_IF_ERROR(ReadStreams(given, request));
  if (given.allocator != nullptr || given.in_library != 0)
    FARANDOLE_RETURN_IF_ERROR(MakeAllocator(engine, given, request));
  engine.EnterCaller();
  FARANDOLE_RETURN_IF_ERROR(engine.operations().Claim(operation, given.version));
  farandole::ClaimedOperation claimed(operation);
  if (given.version == 0 && operation.name.set != farandole::kGlobalSet) {
    return farandole::InvalidArgument(
        "version is 0; expected the one that farandole_prepare gave, because an operation of a "
        "process set may be another one's when that has ended");
  }
  const Result<farandole::Vote> vote = ToVote(operation, given.votes, given.failed);
  if (!vote.ok()) return vote.status();
  FARANDOLE_RETURN_IF_ERROR(CheckPlaces(operation, given));
  std::vector<void*> addresses;
  if (given.outputs != nullptr && given.failed == nullptr)
    FARANDOLE_RETURN_IF_ERROR(UseOutputs(operation, given, request, addresses));
  const size_t count = operation.signature.tensors.size();
  void* const* const out = addresses.empty() ? given.out : addresses.data();
  return engine.StartClaimed(claimed, {given.in, count}, {out, out == nullptr ? 0 : count},
                             vote.value(), notify, {request.streams.data(), request.stream_count},
                             std::move(request.allocator));
}

/// @return false for what is NULL or too short, which it has reported.
bool IsGood(const farandole_operation* handle, const farandole_request* given,
            farandole_work** work) {
  if (handle == nullptr || given == nullptr || work == nullptr)
    return ReportNull("operation, request or work") == FARANDOLE_OK;
  return Report(FARANDOLE_CHECK_STRUCT(farandole_request, *given)) == FARANDOLE_OK;
}

}  // namespace

int farandole_start_request(farandole_operation* handle, const farandole_request* given,
                            farandole_work** work) try {
  if (!IsGood(handle, given, work)) return FARANDOLE_INVALID_ARGUMENT;
  farandole::Operation& operation = *FromHandle(handle);
  auto owned = std::make_unique<farandole_work>();  // before anything is in flight
  Request request;
  Result<std::shared_ptr<Work>> started = StartOn(operation, *given, request, true);
  if (!started.ok()) return Report(*operation.engine, started.status());
  *owned = {std::move(started).value(), operation.engine, std::move(request.results)};
  *work = owned.release();
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

// A handle is allocated only if time runs out.
int farandole_run_request(farandole_operation* handle, const farandole_request* given,
                          double timeout_s, farandole_work** work) try {
  if (!IsGood(handle, given, work)) return FARANDOLE_INVALID_ARGUMENT;
  *work = nullptr;
  if (given->stream != nullptr || given->in_library != 0) {
    return Report(
        farandole::InvalidArgument("farandole_run_request with a stream or in_library; expected "
                                   "farandole_start_request, whose "
                                   "work says when the results are complete"));
  }
  farandole::Operation& operation = *FromHandle(handle);
  Request request;
  Result<std::shared_ptr<Work>> started = StartOn(operation, *given, request, false);
  if (!started.ok()) return Report(*operation.engine, started.status());
  const int code = farandole::WaitFor(*operation.engine, *started.value(), timeout_s);
  if (code == FARANDOLE_PENDING)
    *work = new farandole_work{std::move(started).value(), operation.engine};
  return code;
} catch (...) {
  return ReportException();
}

int farandole_output_rows(const farandole_context* context, int32_t kind, uint32_t set,
                          int64_t rows, int64_t* out) try {
  if (context == nullptr || out == nullptr) return ReportNull("context or out");
  if (kind < 0 || kind > FARANDOLE_BARRIER)
    return Report(farandole::InvalidArgument("collective kind " + std::to_string(kind)));
  if (const int code = farandole::FromSetHandle(*context->generation, set, &set)) return code;
  const Engine& engine = context->generation->engine();
  const Result<farandole::ProcessSetInfo> found = engine.operations().FindSet(set);
  if (!found.ok()) return Report(engine, found.status());
  *out = farandole::ResultRows(static_cast<farandole::OpKind>(kind), rows, found.value().ranks,
                               engine.rank());
  return FARANDOLE_OK;
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

void farandole_leave_thread(void) { farandole::CallerThreads::Leave(); }

void farandole_count_waiting_threads(void) { farandole::CallerThreads::CountOnlyWaiting(); }

void farandole_note_time(int what, int64_t ns) {
  using farandole::TimeOf;
  if (what == FARANDOLE_TIME_INPUT) farandole::NoteTime(TimeOf::kInput, ns);
  if (what == FARANDOLE_TIME_GARBAGE_COLLECTION)
    farandole::NoteTime(TimeOf::kGarbageCollection, ns);
}

void farandole_end_step(farandole_context* context) {
  if (context == nullptr) return;
  farandole::Engine& engine = context->generation->engine();
  engine.EndStep(engine.lifecycle().joins());  // as rounds do, which may end steps, too
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

int farandole_set_timeout(farandole_context* context, double timeout_s) try {
  if (context == nullptr) return ReportNull("context");
  const farandole::Status status = CheckTimeout("set_timeout", timeout_s);
  if (status.ok()) context->generation->SetTimeout(timeout_s);
  return Report(status);
} catch (...) {
  return ReportException();
}

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

int farandole_setting_at(const farandole_context* context, int64_t index, const char** name,
                         const char** value, const char** initial) try {
  if (context == nullptr || name == nullptr || value == nullptr || initial == nullptr)
    return ReportNull("context, name, value or initial");
  thread_local std::vector<farandole::SettingText> texts;  // as that of farandole_get_setting
  texts = farandole::Describe(context->generation->config());
  *name = nullptr;
  if (static_cast<size_t>(index) >= texts.size()) return FARANDOLE_OK;
  const farandole::SettingText& setting = texts[static_cast<size_t>(index)];
  *name = setting.name.c_str();
  *value = setting.value.c_str();
  *initial = setting.initial.c_str();
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_sha256(const void* data, size_t size, uint8_t* digest) {
  if (digest == nullptr || (data == nullptr && size > 0)) return ReportNull("data or digest");
  const farandole::ByteSpan bytes(static_cast<const std::byte*>(data), size);
  const farandole::Digest made = farandole::Sha256({bytes});
  std::memcpy(digest, made.data(), made.size());
  return FARANDOLE_OK;
}
