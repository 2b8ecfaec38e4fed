// What stands behind the C ABI's opaque handles, and how a Status leaves through it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "bindings/c/result_memory.h"
#include "coordinator/gradients/gradient_round.h"
#include "coordinator/job/generation.h"
#include "coordinator/job/world.h"

namespace farandole {

/// The engine that a handle names. Its generation stays in memory as long as the handle, also when
/// it has ended and its context is released.
class HeldEngine {
 public:
  HeldEngine(Engine* engine = nullptr) : engine_(engine) { Count(1); }  // NOLINT: by intent
  HeldEngine(HeldEngine&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  HeldEngine& operator=(HeldEngine other) noexcept {
    std::swap(engine_, other.engine_);
    return *this;
  }
  ~HeldEngine() { Count(-1); }
  Engine& operator*() const { return *engine_; }
  Engine* operator->() const { return engine_; }

 private:
  void Count(int64_t change) {
    if (engine_ != nullptr) Generation::Of(*engine_).CountHandles(change);
  }
  Engine* engine_;
};

}  // namespace farandole

struct farandole_context {
  std::shared_ptr<farandole::Generation> generation;
  std::mutex join_mutex;
  std::shared_ptr<farandole::Work> joining;  ///< Until its outcome has been returned.
};

struct farandole_work {
  std::shared_ptr<farandole::Work> work;
  farandole::HeldEngine engine;
  /// Of farandole_request::in_library.
  std::shared_ptr<farandole::LibraryResults> results = nullptr;
};

struct farandole_gradients {
  farandole::HeldEngine engine;  ///< Outlives the round.
  farandole::GradientRound round;
  /// Where no allocator was given.
  std::shared_ptr<farandole::LibraryResults> results;
};

namespace farandole {

/// Remembers the error message for farandole_last_error and gives the code. OK leaves the last
/// error as it is.
int Report(const Status& status);
/// The same of a call through a handle of `engine`: GENERATION_ENDED for a failure once another
/// generation has begun.
int Report(const Engine& engine, const Status& status);
/// InvalidArgument for a null pointer.
int ReportNull(const char* what);
/// A set's uid as C has it: it names its generation, too. So that of an earlier one, on this rank,
/// is never taken for another set.
uint32_t ToSetHandle(const Generation& generation, uint32_t uid);
/// @return OK with *uid; GENERATION_ENDED, or InvalidArgument for what no generation has given, as
/// reported.
int FromSetHandle(const Generation& generation, uint32_t set, uint32_t* uid);
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
/// params.splits of `tensors` tensors on the set with that uid. @return InvalidArgument for another
/// kind than alltoall.
Result<std::vector<int64_t>> ToSplits(const farandole_params& params, const Engine& engine,
                                      uint32_t uid, size_t tensors);
Result<std::vector<TensorSignature>> ToTensorSignatures(const farandole_tensor* tensors,
                                                        int32_t count);

}  // namespace farandole
