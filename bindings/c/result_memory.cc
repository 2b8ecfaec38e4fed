#include "bindings/c/result_memory.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "coordinator/protocol/splits.h"
#include "core/huge_pages.h"

namespace {

constexpr int64_t kAlign = 64;  // of a cache line, and of any vector register

// nullptr: there is no memory.
void* AllocateHost(int64_t bytes) {
  // aligned_alloc takes multiples of the alignment. An empty result gets a line as well: nullptr
  // means only that there is no memory.
  const auto size =
      static_cast<size_t>((std::max<int64_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
  void* const memory = std::aligned_alloc(kAlign, size);
  if (memory != nullptr) farandole::UseHugePages(memory, size);
  return memory;
}

}  // namespace

farandole_buffer::~farandole_buffer() {
  if (owner != nullptr) return;
  if (device == nullptr) {
    // The device is the process's and never destroyed, so a buffer may outlive its context.
    std::free(data);
  } else if (data != nullptr) {
    device->Free(data);
  }
}

namespace farandole {
namespace {

Status NoMemory(int64_t bytes) {
  return ResourceExhausted("no memory for a result of " + std::to_string(bytes) + " bytes");
}

}  // namespace

Result<std::shared_ptr<std::byte>> AllocateZeroes(int64_t bytes) {
  void* const memory = AllocateHost(bytes);
  if (memory == nullptr) {
    return ResourceExhausted("no memory for a buffer of " + std::to_string(bytes) + " bytes");
  }
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                    [](std::byte* gone) { std::free(gone); });
}

Result<void*> LibraryResults::Allocate(size_t tensor, std::span<const int64_t> /*rows*/,
                                       int64_t bytes) {
  void* memory = nullptr;
  if (device_ == nullptr) {
    memory = AllocateHost(bytes);
    if (memory == nullptr) return NoMemory(bytes);
  } else if (bytes > 0) {
    Result<void*> allocated = device_->Allocate(bytes);
    if (!allocated.ok()) return allocated.status();
    memory = allocated.value();
  }
  const std::lock_guard lock(mutex_);
  if (buffers_.size() <= tensor) buffers_.resize(tensor + 1);
  buffers_[tensor] = std::make_unique<farandole_buffer>(memory, bytes, device_);
  return memory;
}

std::unique_ptr<farandole_buffer> LibraryResults::Take(size_t tensor) {
  const std::lock_guard lock(mutex_);
  return tensor < buffers_.size() ? std::move(buffers_[tensor]) : nullptr;
}

namespace {

Status Refuse(const Operation& operation, size_t tensor, const std::string& why) {
  return InvalidArgument(Describe(operation.name) + ": the output of tensor " +
                         std::to_string(tensor) + " " + why);
}

Status CheckAddress(const Operation& operation, size_t t, const void* in,
                    const farandole_output& out) {
  if (out.bytes > 0 && out.data == nullptr) return Refuse(operation, t, "has no address");
  if (!Overlap(in, operation.extents[t].in, out.data, out.bytes)) return {};
  if (in == out.data && !IsVariableSize(operation.name.kind)) return {};
  return Refuse(operation, t, "is in the memory of its input; expected them apart");
}

/// "of shape [rows,2]"
std::string DescribeShape(int64_t rows, std::span<const int64_t> rest) {
  std::string text = "of shape [" + std::to_string(rows);
  for (const int64_t dimension : rest) text += "," + std::to_string(dimension);
  return text + "]";
}

}  // namespace

Result<std::shared_ptr<OutputResults>> OutputResults::Create(const Operation& operation,
                                                             const void* const* in,
                                                             const farandole_output* out) {
  auto made = std::make_shared<OutputResults>();
  made->outputs_.reserve(operation.signature.tensors.size());
  for (size_t t = 0; t < operation.signature.tensors.size(); ++t) {
    const TensorSignature& tensor = operation.signature.tensors[t];
    const farandole_output& given = out[t];
    FARANDOLE_RETURN_IF_ERROR(CheckAddress(operation, t, in[t], given));
    const int64_t row_bytes = RowCount(tensor) * SizeOf(tensor.dtype);
    if (given.bytes < 0 || (row_bytes == 0 ? given.bytes != 0 : given.bytes % row_bytes != 0))
      return Refuse(operation, t,
                    "has " + std::to_string(given.bytes) + " bytes; expected a multiple of the " +
                        std::to_string(row_bytes) + " of a row");
    Output output{given.data, given.bytes, row_bytes, {}, {}};
    output.shape.assign(tensor.shape.begin() + 1, tensor.shape.end());
    if (given.rows != nullptr) {
      output.rows.assign(given.rows, given.rows + operation.ranks);
      FARANDOLE_RETURN_IF_ERROR(CheckSum(operation.name, tensor, output.rows));
      const int64_t total = std::reduce(output.rows.begin(), output.rows.end());
      if (total * row_bytes != given.bytes)
        return Refuse(operation, t,
                      "has " + std::to_string(given.bytes) + " bytes; expected the " +
                          std::to_string(total * row_bytes) + " of the rows " +
                          DescribeRows(output.rows));
    }
    made->outputs_.push_back(std::move(output));
  }
  return made;
}

// Of rows without elements any number fits, unless `rows` was given.
Result<void*> OutputResults::Allocate(size_t tensor, std::span<const int64_t> rows, int64_t bytes) {
  const Output& output = outputs_[tensor];
  const bool is_expected = output.rows.empty() || std::ranges::equal(output.rows, rows);
  if (is_expected && output.bytes == bytes) return output.data;
  const std::string came = DescribeRows(rows);
  if (!is_expected) {
    return Mismatch("the output of tensor " + std::to_string(tensor) + " expects rows " +
                    DescribeRows(output.rows) + " from the ranks; " + came + " came");
  }
  const int64_t total = std::reduce(rows.begin(), rows.end());
  return Mismatch("the output of tensor " + std::to_string(tensor) + " is " +
                  DescribeShape(output.bytes / output.row_bytes, output.shape) + "; rows " + came +
                  " came from the ranks, which are " + DescribeShape(total, output.shape));
}

Result<std::vector<void*>> ToAddresses(const Operation& operation, const void* const* in,
                                       const farandole_output* out) {
  std::vector<void*> addresses;
  for (size_t t = 0; t < operation.extents.size(); ++t) {
    const int64_t bytes = operation.extents[t].out;
    if (out[t].bytes != bytes)
      return Refuse(operation, t,
                    "has " + std::to_string(out[t].bytes) + " bytes; expected the " +
                        std::to_string(bytes) + " of the result");
    if (out[t].rows != nullptr) return Refuse(operation, t, "has rows; expected NULL");
    FARANDOLE_RETURN_IF_ERROR(CheckAddress(operation, t, in[t], out[t]));
    addresses.push_back(out[t].data);
  }
  return addresses;
}

Result<void*> CallbackResults::Allocate(size_t tensor, std::span<const int64_t> rows,
                                        int64_t bytes) {
  // An empty result may have any address, also NULL.
  void* const memory = allocator_.allocate(allocator_.user, static_cast<int32_t>(tensor),
                                           rows.data(), static_cast<int32_t>(rows.size()), bytes);
  if (memory != nullptr || bytes == 0) return memory;
  return NoMemory(bytes);
}

}  // namespace farandole
