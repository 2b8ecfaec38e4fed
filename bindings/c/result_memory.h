// The memory of results, which the library or the caller gives: an allgather's and an alltoall's
// sizes are known only when they run. And buffers that users ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "bindings/c/farandole.h"
#include "coordinator/engine/operation.h"
#include "ops/device.h"

/// Frees its memory with itself. Aligned to 64 bytes at least.
struct farandole_buffer {
  farandole_buffer(void* memory, int64_t size, farandole::Device* gpu)
      : data(memory), bytes(size), device(gpu) {}
  /// Host memory that has an owner.
  farandole_buffer(std::shared_ptr<std::byte> memory, int64_t size)
      : data(memory.get()), bytes(size), device(nullptr), owner(std::move(memory)) {}
  ~farandole_buffer();
  farandole_buffer(const farandole_buffer&) = delete;
  farandole_buffer& operator=(const farandole_buffer&) = delete;

  void* const data;
  const int64_t bytes;
  farandole::Device* const device;         ///< nullptr: host memory.
  const std::shared_ptr<std::byte> owner;  ///< nullptr: this object.
};

namespace farandole {

/// Host memory, zero in all bytes, that nobody shares. @return ResourceExhausted.
Result<std::shared_ptr<std::byte>> AllocateZeroes(int64_t bytes);

/// Results in the library's memory, until they are taken.
///
/// Thread safety: Allocate by the holder of the engine lock, before the work is done; Take by any
/// thread afterwards.
class LibraryResults final : public ResultAllocator {
 public:
  /// @param device  Where results are; nullptr: host memory.
  explicit LibraryResults(Device* device) : device_(device) {}
  /// Of results from now on; nothing may be allocated meanwhile.
  void UseDevice(Device* device) { device_ = device; }

  Result<void*> Allocate(size_t tensor, std::span<const int64_t> rows, int64_t bytes) override;
  /// Hands over the result of a tensor, once; nullptr if there is none.
  std::unique_ptr<farandole_buffer> Take(size_t tensor);

 private:
  Device* device_;
  std::mutex mutex_;  // of the vector, for Take
  std::vector<std::unique_ptr<farandole_buffer>> buffers_;
};

/// Results of an allgather or alltoall in memory whose size the caller has said.
class OutputResults final : public ResultAllocator {
 public:
  /// @param out  One for each tensor of the operation, which the caller has claimed.
  /// @return InvalidArgument for a size that cannot be that of a result, or memory that is missing
  /// or overlaps the input.
  static Result<std::shared_ptr<OutputResults>> Create(const Operation& operation,
                                                       const void* const* in,
                                                       const farandole_output* out);
  /// @return Mismatch if other rows come than the memory is for.
  Result<void*> Allocate(size_t tensor, std::span<const int64_t> rows, int64_t bytes) override;

 private:
  struct Output {
    void* data;
    int64_t bytes;
    int64_t row_bytes;
    std::vector<int64_t> rows;   // from each rank; empty: any
    std::vector<int64_t> shape;  // without the rows
  };
  std::vector<Output> outputs_;
};

/// Likewise of an operation whose results have a size that this rank knows: their addresses.
Result<std::vector<void*>> ToAddresses(const Operation& operation, const void* const* in,
                                       const farandole_output* out);

/// Results in memory that a C function gives.
class CallbackResults final : public ResultAllocator {
 public:
  explicit CallbackResults(const farandole_allocator& allocator) : allocator_(allocator) {}
  Result<void*> Allocate(size_t tensor, std::span<const int64_t> rows, int64_t bytes) override;
  bool IsInStreamOrder() const override { return true; }

 private:
  const farandole_allocator allocator_;
};

}  // namespace farandole
