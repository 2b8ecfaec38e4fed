#include "ops/nccl/fusion_buffer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace farandole {
namespace {

/// NCCL maps memory in pages of this size: less would be no smaller.
constexpr int64_t kPageBytes = int64_t{2} << 20;

}  // namespace

NcclFusionBuffer::NcclFusionBuffer(const NcclFusionBufferOptions& options) : options_(options) {}

NcclFusionBuffer::~NcclFusionBuffer() {
  old_.push_back(std::move(now_));
  for (Piece& piece : old_) Free(piece);
}

// What it replaces stays to the end: to free it waits for the device, and so perhaps for peers,
// while the engine's thread has messages to pass on to them. Growing by halves bounds that by twice
// the last size.
Status NcclFusionBuffer::Reserve(int64_t size_bytes) {
  if (size_bytes <= now_.size_bytes) return {};
  const int64_t wanted = std::max(size_bytes, now_.size_bytes * 3 / 2);
  Result<Piece> fresh = Allocate((wanted + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (!fresh.ok()) return fresh.status();
  if (now_.memory != nullptr) old_.push_back(std::move(now_));
  now_ = std::move(fresh).value();
  Register(now_);
  return {};
}

void NcclFusionBuffer::Detach() {
  for (Piece& piece : old_) Deregister(piece);  // what does not go now ends with the communicator
  Deregister(now_);
}

void NcclFusionBuffer::Quarantine() {
  old_.push_back(std::exchange(now_, {}));
  for (const Piece& piece : old_) Count(Counter::kQuarantinedBytes, piece.size_bytes);
  old_.clear();
}

Result<NcclFusionBuffer::Piece> NcclFusionBuffer::Allocate(int64_t size_bytes) {
  Piece piece;
  piece.size_bytes = size_bytes;
  if (options_.api->CanRegister()) {
    const NcclResult result =
        options_.api->MemAlloc(&piece.memory, static_cast<size_t>(size_bytes));
    piece.from_nccl = result == NcclResult::kSuccess;
    if (piece.from_nccl) return piece;
    SayOnce(std::string("ncclMemAlloc: ") + options_.api->GetErrorString(result));
  } else {
    SayOnce("this version of NCCL cannot (2.19 can)");
  }
  Result<void*> memory = options_.lane->device().Allocate(size_bytes);
  if (!memory.ok()) {
    return ResourceExhausted("no fusion buffer of " + std::to_string(size_bytes) +
                             " bytes: " + memory.status().message());
  }
  piece.memory = memory.value();
  return piece;
}

void NcclFusionBuffer::Register(Piece& piece) {
  if (!piece.from_nccl) return;
  const Status registered =
      options_.communicator->Register(piece.memory, piece.size_bytes, &piece.registration);
  if (!registered.ok()) return SayOnce(registered.message());
  Count(Counter::kRegisteredBytes, piece.size_bytes);
}

void NcclFusionBuffer::Deregister(Piece& piece) {
  if (piece.registration == nullptr) return;
  Count(Counter::kRegisteredBytes, -piece.size_bytes);
  options_.communicator->Deregister(std::exchange(piece.registration, nullptr));
}

void NcclFusionBuffer::Free(Piece& piece) {
  void* const memory = std::exchange(piece.memory, nullptr);
  if (memory == nullptr) return;
  if (!piece.from_nccl) return options_.lane->device().Free(memory);
  (void)options_.api->MemFree(memory);  // a failed device has said so elsewhere
}

void NcclFusionBuffer::Count(Counter counter, int64_t n) {
  if (options_.counters != nullptr) options_.counters->Add(counter, n);
}

void NcclFusionBuffer::SayOnce(const std::string& why) {
  if (said_ || options_.log == nullptr) return;
  said_ = true;
  options_.log->Write(LogLevel::kInfo, "fusion buffers are not registered with NCCL: " + why);
}

}  // namespace farandole
