#include "coordinator/engine/operation.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>

#include "coordinator/protocol/splits.h"

namespace farandole {
namespace {

bool AreEqual(std::span<const int64_t> rows) {
  return std::ranges::adjacent_find(rows, std::ranges::not_equal_to()) == rows.end();
}

/// An alltoall with uneven splits may receive as unevenly, as long as it is as much.
bool ExpectsEqualRows(const Operation& operation, size_t t) {
  if (operation.name.kind == OpKind::kAllgather) return true;
  const size_t ranks = operation.splits.size() / operation.rows.size();
  return AreEqual(OfTensor(operation.splits, t, ranks));
}

std::string UnnamedPrefix(OpKind kind) { return std::string(Name(kind)) + ".noname."; }

}  // namespace

std::string UnnamedName(OpKind kind, uint64_t slot) {
  return UnnamedPrefix(kind) + std::to_string(slot);
}

bool IsUnnamed(const KeyName& name) { return name.name.starts_with(UnnamedPrefix(name.kind)); }

bool Overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  // As numbers: C++ does not order pointers into different objects.
  const auto first = reinterpret_cast<uintptr_t>(a);
  const auto second = reinterpret_cast<uintptr_t>(b);
  return a != nullptr && b != nullptr && first < second + static_cast<uintptr_t>(b_bytes) &&
         second < first + static_cast<uintptr_t>(a_bytes);
}

// New vectors and strings instead of clear(), which would keep their memory for as long as the
// operation is spare. The version stays, so Claim goes on refusing old handles.
void Operation::Empty() {
  ended = true;
  name = KeyName();
  holder = nullptr;
  signature = Signature();
  rows = std::vector<int64_t>();
  splits = std::vector<int64_t>();
  allocator = nullptr;
  extents = std::vector<Extent>();
  in = std::vector<const void*>();
  out = std::vector<void*>();
  vote = Vote();
  work = nullptr;
  ready = std::vector<std::shared_ptr<DeviceEvent>>();
  ready_count = 0;
  residuals = Residuals();
  later_steps.clear();
  key = kUnknownKey;
  track = 0;
}

// Counted in rows, and in bytes at the end. The root alone reads for a broadcast. Of an alltoall
// only the rows sent are known; `out` is a guess that ProvideResult replaces or checks.
Extent ExtentOf(const Operation& operation, size_t t, std::span<const int32_t> members,
                int32_t rank) {
  const Signature& signature = operation.signature;
  const TensorSignature& tensor = signature.tensors[t];
  const OpKind kind = operation.name.kind;
  const bool differ = RowsMayDiffer(kind);
  const int64_t rows = differ ? operation.rows[t] : tensor.shape.empty() ? 1 : tensor.shape.front();
  if (rows == 0) return {};
  Extent rows_of{rows, ResultRows(kind, rows, members, rank)};
  if (kind == OpKind::kBroadcast && signature.root != rank) rows_of.in = 0;
  if (kind == OpKind::kAlltoall) {
    const std::span<const int64_t> splits = OfTensor(operation.splits, t, members.size());
    rows_of.in = std::reduce(splits.begin(), splits.end());
  }
  const int64_t row_bytes = RowCount(tensor) * SizeOf(tensor.dtype);
  return {rows_of.in * row_bytes, rows_of.out * row_bytes};
}

// Without an allocator the caller has given room for as many rows from each rank as this one
// passes, and others are a Mismatch on this rank alone. After an error `out` is nullptr: the rank
// takes part, as the others may have begun, and drops the result.
void Operation::ProvideResult(size_t t, std::span<const int64_t> received) {
  const TensorSignature& tensor = signature.tensors[t];
  const int64_t total = std::reduce(received.begin(), received.end());
  const int64_t bytes = total * RowCount(tensor) * SizeOf(tensor.dtype);
  work->SetRows(t, received);
  Result<void*> memory = out[t];
  if (allocator != nullptr) memory = Allocate(t, received, bytes);
  Status why = memory.status();
  const bool fits = bytes == extents[t].out && (AreEqual(received) || !ExpectsEqualRows(*this, t));
  if (allocator == nullptr && !fits) {
    why = Mismatch("each rank must give the same number of rows; the ranks gave " +
                   DescribeRows(received));
  } else if (why.ok() && Overlap(in[t], extents[t].in, memory.value(), bytes)) {
    why = InvalidArgument("tensor " + std::to_string(t) +
                          " has its output in the memory of its input; expected them apart");
  }
  SetResult(t, why.ok() ? memory.value() : nullptr, why);
}

void Operation::ProvideAbsent(size_t t) {
  if (out[t] != nullptr || extents[t].out == 0) return;
  const Result<void*> memory = Allocate(t, {}, extents[t].out);
  SetResult(t, memory.ok() ? memory.value() : nullptr, memory.status());
}

// The memory is free when the last producer has come to where it is now, so the operation has to
// wait for that too.
Result<void*> Operation::Allocate(size_t t, std::span<const int64_t> received, int64_t bytes) {
  Result<void*> memory = allocator->Allocate(t, received, bytes);
  if (memory.ok() && ready_count > 0 && allocator->IsInStreamOrder())
    FARANDOLE_RETURN_IF_ERROR(RecordReady(*ready[ready_count - 1]));
  return memory;
}

void Operation::SetResult(size_t t, void* memory, const Status& why) {
  out[t] = memory;
  if (why.ok() || !failure.ok()) return;
  failure = Status(why.code(), Describe(name) + ": " + why.message(), {.tensor = name.name});
}

Status Operation::RecordReady(DeviceEvent& event) const {
  Result<bool> capturing = gpu->IsCapturing(producer);
  if (!capturing.ok()) return capturing.status();
  if (!capturing.value()) return event.Record(producer);
  return InvalidArgument(
      "its stream is being captured into a CUDA graph, which cannot hold what ranks negotiate; "
      "start it outside of the capture");
}

// Events are recorded again once the operation was launched: what waits for them was enqueued by
// then. So only the first start creates some.
Status Operation::RecordProducers(RankDevice& device, const Vote& passed,
                                  std::span<const ProducerStream> producers) {
  ready_count = 0;
  const bool on_device = signature.device == DeviceKind::kCuda;
  if (!passed.failed.empty()) return {};  // reads and writes nothing
  if (on_device != !producers.empty()) {
    return InvalidArgument(Describe(name) +
                           (on_device ? ": tensors on a GPU need the stream that makes them"
                                      : ": a stream was given for tensors on the CPU"));
  }
  for (const ProducerStream& one : producers) {
    const Result<Device*> used = device.Use(one.device);
    Status status = used.status();
    if (status.ok()) {
      gpu = used.value();
      producer = one.stream;
      if (ready.size() == ready_count) {
        Result<std::shared_ptr<DeviceEvent>> event = gpu->CreateEvent();
        if (!event.ok()) return event.status();
        ready.push_back(std::move(event).value());
      }
      status = RecordReady(*ready[ready_count]);
    }
    if (!status.ok()) return Status(status.code(), Describe(name) + ": " + status.message());
    ++ready_count;
  }
  // Before the operation is in the queue, since no caller may run the step that starts it.
  if (on_device) device.SetInUse();
  return {};
}

int64_t TotalBytes(const Operation& operation) {
  int64_t bytes = 0;
  for (const Extent& extent : operation.extents) bytes += std::max(extent.in, extent.out);
  return bytes;
}

}  // namespace farandole
