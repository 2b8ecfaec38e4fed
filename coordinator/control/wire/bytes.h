// The two archives of fixed layouts: one writes the fields that it is shown, the other reads and
// checks them. Little endian, one after the other.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "coordinator/protocol/message_fields.h"
#include "core/status.h"

namespace farandole {

static_assert(std::endian::native == std::endian::little, "the wire format is little endian");

template <class Plain>
void Put(Plain value, std::vector<std::byte>& out) {
  const size_t at = out.size();
  out.resize(at + sizeof value);
  std::memcpy(out.data() + at, &value, sizeof value);
}

/// The range of a number as int64_t; of a uint64_t, all of it.
template <class Int>
inline constexpr int64_t kLowest = sizeof(Int) == 8
                                       ? INT64_MIN
                                       : static_cast<int64_t>(std::numeric_limits<Int>::min());
template <class Int>
inline constexpr int64_t kHighest = sizeof(Int) == 8
                                        ? INT64_MAX
                                        : static_cast<int64_t>(std::numeric_limits<Int>::max());

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

/// How many bytes of the text fit into `most` without a broken character of UTF-8.
inline size_t WholeCharacters(const std::string& text, size_t most) {
  size_t length = std::min(text.size(), most);
  const auto continues = [&](size_t at) { return (text[at] & 0xC0) == 0x80; };
  while (length > 0 && length < text.size() && continues(length)) --length;
  return length;
}

/// Appends to `out`, which it borrows.
class ByteWriter {
 public:
  static constexpr bool kReads = false;
  explicit ByteWriter(std::vector<std::byte>& out) : out_(out) {}

  template <class Int>
  void Number(const char*, Int value, int64_t = 0, int64_t = 0) {
    Put(value, out_);
  }
  template <class Enumeration>
  void Enum(const char*, Enumeration value, Enumeration, int64_t = 0) {
    Put(static_cast<int32_t>(value), out_);
  }
  /// What is longer than `most` is cut; likewise a list.
  void Text(const char*, const std::string& text, size_t most) {
    const auto bytes = std::as_bytes(std::span(text.data(), WholeCharacters(text, most)));
    Put(static_cast<uint16_t>(bytes.size()), out_);
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }
  template <class Item>
  void List(const char*, const std::vector<Item>& list, size_t most) {
    const size_t count = std::min(list.size(), most);
    Put(static_cast<uint32_t>(count), out_);
    for (size_t i = 0; i < count; ++i) Fields(*this, list[i]);
  }
  /// As runs or one by one, whichever takes fewer bytes.
  void Ids(const std::vector<uint32_t>& ids) {
    const size_t runs = CountRuns(ids);
    if (2 * runs >= ids.size()) {
      Put(static_cast<uint32_t>(ids.size()), out_);
      const auto bytes = std::as_bytes(std::span(ids));
      out_.insert(out_.end(), bytes.begin(), bytes.end());
      return;
    }
    Put(kIdRuns | static_cast<uint32_t>(runs), out_);
    for (std::span<const uint32_t> left = ids; !left.empty();) {
      const size_t length = LengthOfRun(left);
      Put(IdRun{left.front(), static_cast<uint32_t>(length)}, out_);
      left = left.subspan(length);
    }
  }

 protected:
  std::vector<std::byte>& out_;
};

/// Bytes from another process are not trusted: a number is checked before it is narrowed, cast to
/// an enumeration or used as a size. The first failure sticks. What depends on tables or on the
/// tree (unknown ids, ranks outside of a branch) is the negotiation's to check.
class Checks {
 public:
  void Refuse(const std::string& why) {
    if (status_.ok()) status_ = Internal("frame: " + why);
  }
  void Include(const Status& other) {
    if (status_.ok()) status_ = other;
  }
  /// @param of What of the field: "bytes of ", "number of ".
  bool Check(const char* field, int64_t value, int64_t least, int64_t most, const char* of = "") {
    if (value < least || value > most) {
      Refuse(std::string(of) + field + " is " + std::to_string(value) + "; expected " +
             std::to_string(least) + " to " + std::to_string(most));
    }
    return status_.ok();
  }
  bool CheckSize(const char* field, size_t size, size_t most, const char* of = "bytes of ") {
    return Check(field, static_cast<int64_t>(size), 0, static_cast<int64_t>(most), of);
  }
  const Status& status() const { return status_; }

 private:
  Status status_;
};

/// Reads what ByteWriter wrote; after a failure, zeros.
/// Lifetime: borrows `bytes`.
class ByteReader : public Checks {
 public:
  static constexpr bool kReads = true;
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Plain>
  Plain Get(const char* field) {
    Plain value{};
    if (Need(sizeof value, field)) std::memcpy(&value, Take(sizeof value).data(), sizeof value);
    return value;
  }
  template <class Int>
  void Number(const char* field, Int& value, int64_t least = kLowest<Int>,
              int64_t most = kHighest<Int>) {
    value = Get<Int>(field);
    Check(field, static_cast<int64_t>(value), least, most);
  }
  template <class Enumeration>
  void Enum(const char* field, Enumeration& value, Enumeration last, int64_t first = 0) {
    const auto number = Get<int32_t>(field);
    if (Check(field, number, first, static_cast<int64_t>(last))) {
      value = static_cast<Enumeration>(number);
    }
  }
  void Text(const char* field, std::string& text, size_t most) {
    const size_t length = Get<uint16_t>(field);
    if (!CheckSize(field, length, most) || !Need(length, field)) return;
    text.assign(reinterpret_cast<const char*>(Take(length).data()), length);
  }
  template <class Item>
  void List(const char* field, std::vector<Item>& list, size_t most) {
    const auto count = Get<uint32_t>(field);
    list.clear();
    if (!CheckSize(field, count, most, "number of ")) return;
    while (list.size() < count && status().ok()) Fields(*this, list.emplace_back());
  }
  /// kNoId means "not by id" in records, so no list of ids may contain it.
  void Ids(std::vector<uint32_t>& ids) {
    const auto count = Get<uint32_t>("number of ids");
    ids.clear();
    if ((count & kIdRuns) != 0) return GetRuns(count & ~kIdRuns, ids);
    const size_t size = size_t{count} * sizeof(uint32_t);
    if (!Need(size, "ids") || count == 0) return;
    ids.resize(count);
    std::memcpy(ids.data(), Take(size).data(), size);
    if (std::ranges::find(ids, kNoId) != ids.end()) Refuse("an id that stands for no id");
  }

  /// OK if everything was there and nothing is left.
  Status Finish() {
    if (!bytes_.empty()) {
      Refuse(std::to_string(bytes_.size()) + " bytes too many at offset " + std::to_string(at_));
    }
    return status();
  }

 protected:
  std::span<const std::byte> Take(size_t size) {
    const auto taken = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    at_ += size;
    return taken;
  }
  size_t left() const { return bytes_.size(); }

 private:
  // A few bytes may say any number of ids, which the bytes of a frame do not bound. No run reaches
  // kNoId.
  void GetRuns(uint32_t count, std::vector<uint32_t>& ids) {
    if (!Need(size_t{count} * sizeof(IdRun), "runs of ids")) return;
    for (uint32_t i = 0; i < count; ++i) {
      const auto run = Get<IdRun>("run of ids");
      if (run.length > kMaxKeysPerMessage - ids.size() || run.length > kNoId - run.first) {
        return Refuse("a run of " + std::to_string(run.length) + " ids from " +
                      std::to_string(run.first) + " on, after " + std::to_string(ids.size()) +
                      " ids; limit " + std::to_string(kMaxKeysPerMessage));
      }
      for (uint32_t j = 0; j < run.length; ++j) ids.push_back(run.first + j);
    }
  }

  bool Need(size_t size, const char* field) {
    if (status().ok() && size > bytes_.size()) {
      Refuse(std::string(field) + " at offset " + std::to_string(at_) + " needs " +
             std::to_string(size) + " bytes, " + std::to_string(bytes_.size()) + " are left");
    }
    return status().ok();
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

}  // namespace farandole
