// libfarandole_xla.so: collectives that an XLA program calls.
//
// A thread of XLA's that blocks keeps what XLA has queued on it from running, which another rank
// may wait for. So a handler waits briefly, as small collectives need, and otherwise gives
// XLA a future, which the library's own thread fulfils. What XLA still runs one after the other, as
// it does in small programs, is the same order on all ranks that run the same program;
// farandole.jax chains all calls of a program by a token besides. If ranks wait for different ones
// nevertheless, Watch makes that an error.
//
// Thread safety: XLA calls the handler on any of its threads, for each of its devices; Python calls
// the rest.
#include <unistd.h>

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "bindings/c/farandole.h"
#include "bindings/xla/call.h"
#include "bindings/xla/call_frame.h"
#include "bindings/xla/shared_call.h"
#include "bindings/xla/watch.h"

namespace farandole::xla {
namespace {

XLA_FFI_Error* Run(XLA_FFI_CallFrame* frame, const Attributes& attributes, Arrays arrays) {
  std::shared_ptr<void> in_flight = Watch::Get().Enter();
  WorkHandle work;
  Prepared prepared;
  const Outcome outcome = Start(attributes, &arrays, &prepared, &work);
  if (outcome.code == FARANDOLE_OK) {
    Complete(arrays);
    return nullptr;
  }
  Promise promise;
  if (XLA_FFI_Error* error = promise.Begin(frame)) {
    if (work != nullptr) farandole_wait(work.get(), -1);  // it uses XLA's memory
    return error;
  }
  Continue(attributes, outcome, prepared, work,
           [promise, arrays, in_flight = std::move(in_flight)](const Outcome& ended) mutable {
             if (ended.code == FARANDOLE_OK) Complete(arrays);
             promise.Fulfil(ended);
             in_flight.reset();
           });
  return nullptr;
}

XLA_FFI_Error* Collective(XLA_FFI_CallFrame* frame) {
  if (AnswerMetadata(*frame)) return nullptr;
  Attributes attributes{};
  if (!Read(frame->attrs, &attributes))
    return MakeError(frame->api, FARANDOLE_INVALID_ARGUMENT,
                     "the attributes are not those of this version of farandole.jax");
  if (attributes.number < 0)
    return MakeError(frame->api, FARANDOLE_INVALID_ARGUMENT,
                     "\"" + attributes.name +
                         "\": the program was lowered in a way that farandole.jax does not know, "
                         "and its collectives have no order");
  if (TheCurrent().process != getpid())  // where nothing runs that could fulfil a promise
    return MakeError(frame->api, FARANDOLE_ABORTED,
                     "Farandole is not initialized, or was before this process was forked");
  if (attributes.number > 0) attributes.name += "#" + std::to_string(attributes.number);
  Arrays arrays;
  if (const char* wrong = Read(*frame, attributes.devices == 0, &arrays))
    return MakeError(frame->api, FARANDOLE_INVALID_ARGUMENT, wrong);
  if (attributes.devices == 0) attributes.name += ".device" + std::to_string(arrays.device);
  if (attributes.devices <= 1) return Run(frame, attributes, std::move(arrays));
  return SharedCall::Find(RunIdOf(*frame), attributes.name, attributes.devices)
      ->Join(frame, attributes, std::move(arrays));
}

}  // namespace
}  // namespace farandole::xla

extern "C" {

/// The handler "farandole_collective"; see farandole/jax/_primitives.py for what it is given.
FARANDOLE_API XLA_FFI_Error* farandole_xla_collective(XLA_FFI_CallFrame* frame) {
  try {
    return farandole::xla::Collective(frame);
  } catch (const std::exception& error) {  // no memory or no thread
    return farandole::xla::MakeError(frame->api, FARANDOLE_RESOURCE_EXHAUSTED, error.what());
  }
}

/// Programs run in `context` from now on; nullptr: in none. Afterwards no handler uses the previous
/// one except through works that it has started.
FARANDOLE_API void farandole_xla_use_context(farandole_context* context) {
  farandole::xla::Current& current = farandole::xla::TheCurrent();
  const std::unique_lock lock(current.mutex);
  current.context = context;
  current.process = getpid();
}

/// After a call of Python's, which may wait for a program next: see farandole_leave_thread.
FARANDOLE_API void farandole_xla_leave_thread(void) { farandole_leave_thread(); }

/// Of Watch.
FARANDOLE_API bool farandole_xla_may_run(void) { return farandole::xla::Watch::Get().MayRun(); }
FARANDOLE_API bool farandole_xla_is_in_flight(void) {
  return farandole::xla::Watch::Get().IsInFlight();
}
FARANDOLE_API bool farandole_xla_has_pending(void) {
  return farandole::xla::Watch::Get().HasPending();
}
FARANDOLE_API bool farandole_xla_has_run(void) { return farandole::xla::Watch::Get().HasRun(); }
FARANDOLE_API bool farandole_xla_is_quiet(void) { return farandole::xla::Watch::Get().IsQuiet(); }
FARANDOLE_API void farandole_xla_set_threads(const int64_t* daemons, int64_t daemon_count,
                                             const int64_t* others, int64_t other_count,
                                             bool has_callback) {
  farandole::xla::Watch::Get().SetThreads(
      {{daemons, daemons + daemon_count}, {others, others + other_count}, has_callback});
}

}  // extern "C"
