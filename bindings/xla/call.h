// One collective that an XLA program calls, from its handler to its end.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <shared_mutex>
#include <string>

#include "bindings/c/farandole.h"
#include "bindings/xla/call_frame.h"
#include "bindings/xla/watch.h"

namespace farandole::xla {

/// The context that programs run in. Its owner replaces it before he releases it.
struct Current {
  std::shared_mutex mutex;  // shared while `context` is used, which never blocks
  farandole_context* context = nullptr;
  std::atomic<pid_t> process = 0;  // that has it; not its forked children
};
Current& TheCurrent();

/// How a collective ended: a farandole_code, with the message of an error.
struct Outcome {
  int code = FARANDOLE_OK;
  std::string message;
};

/// What XLA learns of a call that has not finished when its handler returns.
class Promise {
 public:
  /// Puts a future into the frame. @return nullptr: done; else the error to return.
  XLA_FFI_Error* Begin(XLA_FFI_CallFrame* frame);
  /// XLA may go on in the program before this returns, and so may wait for the other devices.
  void Fulfil(const Outcome& outcome) const;

 private:
  void SetFuture(const Outcome& outcome) const;

  const XLA_FFI_Api* api_ = nullptr;
  XLA_FFI_Future* future_ = nullptr;
};

/// An operation as it was prepared.
struct Prepared {
  std::shared_ptr<farandole_operation> operation;
  uint32_t version = 0;
  size_t tensors = 0;
};

/// Starts a collective and waits for it briefly.
/// @return PENDING with *work if it has not ended; INVALID_ARGUMENT if this rank did not start it.
Outcome Start(const Attributes& attributes, Arrays* arrays, Prepared* prepared, WorkHandle* work);
/// After Start: `finish` is called with the outcome, now or later.
void Continue(const Attributes& attributes, const Outcome& outcome, Prepared prepared,
              const WorkHandle& work, std::function<void(const Outcome&)> finish);
/// After the collective has succeeded.
void Complete(const Arrays& arrays);

}  // namespace farandole::xla
