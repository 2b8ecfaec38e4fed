// Little-endian integers in a growing buffer, and their checked reading.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace farandole {

static_assert(std::endian::native == std::endian::little, "the wire format is little endian");

template <class Integer>
void Put(Integer value, std::vector<std::byte>& out) {
  const size_t at = out.size();
  out.resize(at + sizeof value);
  std::memcpy(out.data() + at, &value, sizeof value);
}

inline void PutIds(const std::vector<uint32_t>& ids, std::vector<std::byte>& out) {
  Put(static_cast<uint32_t>(ids.size()), out);
  const size_t at = out.size();
  out.resize(at + ids.size() * sizeof(uint32_t));
  if (!ids.empty()) std::memcpy(out.data() + at, ids.data(), ids.size() * sizeof(uint32_t));
}

/// Reads what Put wrote. The first failure sticks; later reads give zero.
/// Lifetime: borrows `bytes`.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Integer>
  Integer Get(const char* field) {
    Integer value{};
    if (Need(sizeof value, field)) {
      std::memcpy(&value, bytes_.data() + at_, sizeof value);
      at_ += sizeof value;
    }
    return value;
  }

  void GetIds(std::vector<uint32_t>& ids) {
    const auto count = Get<uint32_t>("number of ids");
    ids.clear();
    if (!Need(size_t{count} * sizeof(uint32_t), "ids") || count == 0) return;
    ids.resize(count);
    std::memcpy(ids.data(), bytes_.data() + at_, size_t{count} * sizeof(uint32_t));
    at_ += size_t{count} * sizeof(uint32_t);
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
