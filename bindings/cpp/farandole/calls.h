/// @file
/// Calls of the C ABI as the collectives of the C++ API make them. Included by
/// farandole/context.h.
#pragma once

#include <farandole/device.h>
#include <farandole/farandole.h>
#include <farandole/options.h>
#include <farandole/result.h>
#include <farandole/span.h>
#include <farandole/work.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

namespace farandole {

/// @cond internal
namespace detail {

struct ReleaseOperation {
  void operator()(farandole_operation* operation) const { farandole_operation_release(operation); }
};

/// An operation and which of its descriptions is meant.
struct Prepared {
  std::unique_ptr<farandole_operation, ReleaseOperation> operation;
  std::uint32_t version = 0;
};

/// One tensor: `rows` rows of `row` elements, a vector where a row is one element. Its description
/// points into it.
struct Shape {
  Shape(std::int64_t rows, std::int64_t row) : extents{rows, row}, dimensions(row == 1 ? 1 : 2) {}
  farandole_tensor describe(const char* name, DataType type) const {
    return {name, static_cast<std::int32_t>(type), dimensions, extents};
  }
  std::int64_t extents[2];
  std::int32_t dimensions;
};

inline farandole_params params_of(farandole_kind kind, farandole_device device,
                                  const Options& options) {
  const bool reduces = kind == FARANDOLE_ALLREDUCE || kind == FARANDOLE_REDUCESCATTER;
  farandole_params params{};
  params.struct_size = sizeof params;
  params.kind = kind;
  params.op = static_cast<std::int32_t>(reduces ? options.op : Op::sum);
  params.prescale = reduces ? options.prescale : 1.0;
  params.postscale = reduces ? options.postscale : 1.0;
  params.root = -1;
  params.wire = static_cast<std::int32_t>(reduces ? options.compression : Compression::none);
  params.set = options.set.id;
  params.device = device;
  return params;
}

/// `name` empty: the next unnamed operation. Waits while 256 of these are in flight.
inline Result<Prepared> prepare(farandole_context* context, const farandole_params& params,
                                const std::string& name, const farandole_tensor* tensors,
                                std::int32_t count) {
  const char* const c_name = name.empty() ? nullptr : name.c_str();
  Prepared prepared;
  farandole_operation* operation = nullptr;
  int code = FARANDOLE_PENDING;
  while (true) {
    code =
        farandole_prepare(context, &params, c_name, tensors, count, &operation, &prepared.version);
    if (code != FARANDOLE_PENDING) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (code != FARANDOLE_OK) return last_error(code);
  prepared.operation.reset(operation);
  return prepared;
}

/// A start of it, with inputs; where results go is not said yet.
inline farandole_request request_of(const Prepared& prepared, const void* const* in) {
  farandole_request request{};
  request.struct_size = sizeof request;
  request.version = prepared.version;
  request.in = in;
  return request;
}

/// Starts and waits.
inline Result<void> run(const Prepared& prepared, const void* const* in, void* const* out) {
  farandole_request request = request_of(prepared, in);
  request.out = out;
  farandole_work* work = nullptr;
  return check(farandole_run_request(prepared.operation.get(), &request, -1, &work));
}

/// `stream`: where the memory is on a GPU, else nullptr.
inline Result<Work> start(const Prepared& prepared, farandole_request request,
                          const Stream* stream) {
  const farandole_stream producer = stream == nullptr ? farandole_stream{} : to_c(*stream);
  if (stream != nullptr) request.stream = &producer;
  farandole_work* work = nullptr;
  const int code = farandole_start_request(prepared.operation.get(), &request, &work);
  if (code != FARANDOLE_OK) return last_error(code);
  return Work(work);
}

inline Result<Work> start(const Prepared& prepared, const void* in, void* out,
                          const Stream* stream = nullptr) {
  farandole_request request = request_of(prepared, &in);
  request.out = &out;
  return start(prepared, request, stream);
}

/// As start(), for an allgather or alltoall whose result has any size. What `memory` uses outlives
/// the Work, whose destructor waits: make it before.
inline Result<Work> start_allocating(const Prepared& prepared, const void* in,
                                     const farandole_allocator& memory,
                                     const Stream* stream = nullptr) {
  farandole_request request = request_of(prepared, &in);
  request.allocator = &memory;
  return start(prepared, request, stream);
}

}  // namespace detail
/// @endcond

}  // namespace farandole
