// Little-endian integers and lists of ids in a growing buffer, and their checked reading.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "core/status.h"

namespace farandole {

static_assert(std::endian::native == std::endian::little, "the wire format is little endian");

template <class Plain>
void Put(Plain value, std::vector<std::byte>& out) {
  const size_t at = out.size();
  out.resize(at + sizeof value);
  std::memcpy(out.data() + at, &value, sizeof value);
}

/// Ids in a row, from `first` on.
struct IdRun {
  uint32_t first = 0;
  uint32_t length = 0;
};
/// In the number of ids: runs follow instead, and this is how many.
inline constexpr uint32_t kIdRuns = uint32_t{1} << 31;
inline constexpr uint32_t kMaxKeysPerMessage = uint32_t{1} << 20;

/// Keys get their ids in the order of their first use, and mostly become ready in that order again:
/// then thousands of ids are a few runs. The order of the ids, which is that of execution, stays,
/// as it would not in a bitmap.
inline size_t CountRuns(std::span<const uint32_t> ids) {
  size_t runs = 0;
  for (; !ids.empty(); ids = ids.subspan(LengthOfRun(ids))) ++runs;
  return runs;
}

/// As runs or one by one, whichever takes fewer bytes.
inline void PutIds(const std::vector<uint32_t>& ids, std::vector<std::byte>& out) {
  const size_t runs = CountRuns(ids);
  if (2 * runs >= ids.size()) {
    Put(static_cast<uint32_t>(ids.size()), out);
    const size_t at = out.size();
    out.resize(at + ids.size() * sizeof(uint32_t));
    if (!ids.empty()) std::memcpy(out.data() + at, ids.data(), ids.size() * sizeof(uint32_t));
    return;
  }
  Put(kIdRuns | static_cast<uint32_t>(runs), out);
  for (std::span<const uint32_t> left = ids; !left.empty();) {
    const size_t length = LengthOfRun(left);
    Put(IdRun{left.front(), static_cast<uint32_t>(length)}, out);
    left = left.subspan(length);
  }
}

/// Reads what Put wrote. The first failure sticks; later reads give zero.
/// Lifetime: borrows `bytes`.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Plain>
  Plain Get(const char* field) {
    Plain value{};
    if (Need(sizeof value, field)) {
      std::memcpy(&value, bytes_.data() + at_, sizeof value);
      at_ += sizeof value;
    }
    return value;
  }

  void GetIds(std::vector<uint32_t>& ids) {
    const auto count = Get<uint32_t>("number of ids");
    ids.clear();
    if ((count & kIdRuns) != 0) return GetRuns(count & ~kIdRuns, ids);
    if (!Need(size_t{count} * sizeof(uint32_t), "ids") || count == 0) return;
    ids.resize(count);
    std::memcpy(ids.data(), bytes_.data() + at_, size_t{count} * sizeof(uint32_t));
    at_ += size_t{count} * sizeof(uint32_t);
  }

  /// A text after its length, which may be `most`.
  std::string GetText(const char* field, size_t most) {
    const auto length = Get<uint16_t>(field);
    if (status_.ok() && length > most) {
      status_ = Internal(std::string("frame: ") + field + " is " + std::to_string(length) +
                         " bytes, limit " + std::to_string(most));
    }
    if (!Need(length, field)) return {};
    const auto text = bytes_.subspan(at_, length);
    at_ += length;
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  /// All that is left.
  std::string GetRest() {
    const auto rest = bytes_.subspan(at_);
    at_ = bytes_.size();
    return {reinterpret_cast<const char*>(rest.data()), rest.size()};
  }

  /// OK if everything was there and nothing is left.
  Status Finish() const {
    if (!status_.ok() || at_ == bytes_.size()) return status_;
    return Internal("frame: " + std::to_string(bytes_.size() - at_) + " bytes too many at offset " +
                    std::to_string(at_));
  }

 private:
  // A few bytes may say any number of ids, which the bytes of a frame do not bound.
  void GetRuns(uint32_t count, std::vector<uint32_t>& ids) {
    if (!Need(size_t{count} * sizeof(IdRun), "runs of ids")) return;
    for (uint32_t i = 0; i < count; ++i) {
      const auto run = Get<IdRun>("run of ids");
      if (run.length > kMaxKeysPerMessage - ids.size() || run.length > UINT32_MAX - run.first) {
        status_ = Internal("frame: a run of " + std::to_string(run.length) + " ids from " +
                           std::to_string(run.first) + " on, after " + std::to_string(ids.size()) +
                           " ids; limit " + std::to_string(kMaxKeysPerMessage));
        return;
      }
      for (uint32_t j = 0; j < run.length; ++j) ids.push_back(run.first + j);
    }
  }

  bool Need(size_t size, const char* field) {
    if (!status_.ok()) return false;
    if (size <= bytes_.size() - at_) return true;
    status_ = Internal(std::string("frame: ") + field + " at offset " + std::to_string(at_) +
                       " needs " + std::to_string(size) + " bytes, " +
                       std::to_string(bytes_.size() - at_) + " are left");
    return false;
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  Status status_;
};

}  // namespace farandole
