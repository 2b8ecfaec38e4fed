// What stands behind the C ABI's opaque handles, and how a Status leaves through it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bindings/c/context.h"
#include "bindings/c/farandole.h"
#include "bindings/c/result_memory.h"
#include "coordinator/gradients/gradient_round.h"

struct farandole_context {
  std::unique_ptr<farandole::Context> context;
  std::mutex join_mutex;
  std::shared_ptr<farandole::Work> joining;  ///< Until its outcome has been returned.
};

struct farandole_work {
  std::shared_ptr<farandole::Work> work;
  farandole::Engine* engine;
  /// Of farandole_start_allocating without an allocator.
  std::shared_ptr<farandole::LibraryResults> results = nullptr;
};

struct farandole_gradients {
  farandole::GradientRound round;
  /// Where no allocator was given.
  std::shared_ptr<farandole::LibraryResults> results;
};

namespace farandole {

/// Remembers the error message for farandole_last_error and gives the code. OK leaves the last
/// error as it is.
int Report(const Status& status);
/// InvalidArgument for a null pointer.
int ReportNull(const char* what);
/// In a handler: reports what was thrown, for want of memory or of a thread, as ResourceExhausted.
int ReportException() noexcept;

inline farandole_operation* ToHandle(Operation* operation) {
  return reinterpret_cast<farandole_operation*>(operation);
}
inline Operation* FromHandle(farandole_operation* handle) {
  return reinterpret_cast<Operation*>(handle);
}

/// Seconds to nanoseconds; negative: no limit.
int64_t TimeoutNs(double timeout_s);

/// Waits and gives the work's outcome or PENDING.
int WaitFor(Engine& engine, const Work& work, double timeout_s);

/// @return InvalidArgument for a struct that says it is shorter than this library's.
Status CheckStruct(const char* type, size_t struct_size, size_t expected);
#define FARANDOLE_CHECK_STRUCT(type, value) \
  ::farandole::CheckStruct(#type, (value).struct_size, sizeof(type))
/// @return InvalidArgument for a short struct, or one without a function.
Status CheckAllocator(const farandole_allocator& allocator);
/// @return InvalidArgument for NULL or a struct of another size.
Result<ProducerStream> ToStream(const farandole_stream* stream);

/// Checks enumerations and sizes as they come from C. The result has no tensors.
Result<Signature> ToSignature(const farandole_params& params);
/// params.splits of `tensors` tensors. @return InvalidArgument for another kind than alltoall.
Result<std::vector<int64_t>> ToSplits(const farandole_params& params, const Engine& engine,
                                      size_t tensors);
Result<std::vector<TensorSignature>> ToTensorSignatures(const farandole_tensor* tensors,
                                                        int32_t count);

}  // namespace farandole
