// A batch as one member sees it, in text: "allgather parts=3,3 me=1 wire=float16 drop=0".
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "ops/data_plane.h"

namespace farandole {

enum class Area : uintptr_t { kIn = 1, kOut = 2, kBuffer = 3 };

/// Memory that nobody follows; its address says what it is.
inline void* Memory(Area area, size_t index = 0) {
  return reinterpret_cast<void*>((static_cast<uintptr_t>(area) << 44) | (uintptr_t{index} << 40));
}

/// The enumerator of that name.
template <class Enum>
Enum Named(const std::string& name) {
  for (int i = 0; i < 32; ++i) {
    if (Name(static_cast<Enum>(i)) == name) return static_cast<Enum>(i);
  }
  ADD_FAILURE() << "no " << name;
  return Enum();
}

inline std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  std::istringstream stream(text);
  for (std::string one; std::getline(stream, one, ',');) numbers.push_back(std::stoll(one));
  return numbers;
}

/// Its kind, then what differs from a sum of five floats of two ranks on the first of them.
/// `absent` is this rank, or those that it lists; `drop` and `inplace` list tensors without a place
/// of their own for the result; `noin` has no input; `count` and `segments` contradict `counts`.
struct BatchInText {
  explicit BatchInText(const std::string& text) {
    std::istringstream words(text);
    std::string kind;
    words >> kind;
    batch.kind = Named<OpKind>(kind);
    size_t size = 2;
    for (std::string word; words >> word;) {
      const std::string key = word.substr(0, word.find('='));
      const std::string value = word.substr(std::min(word.size(), key.size() + 1));
      if (key == "ranks") size = std::stoul(value);
      if (key == "me") batch.my_index = std::stoi(value);
      if (key == "root") batch.root_index = std::stoi(value);
      if (key == "dtype") batch.dtype = batch.wire = Named<DType>(value);
      if (key == "wire") batch.wire = Named<DType>(value);
      if (key == "op") batch.op = Named<ReduceOp>(value);
      if (key == "pre") batch.prescale = std::stod(value);
      if (key == "post") batch.postscale = std::stod(value);
      const bool is_list = value.find_first_not_of("-,0123456789") == std::string::npos;
      lists[key] = is_list ? Numbers(value) : std::vector<int64_t>();
    }
    Complete(std::max({size, lists["parts"].size(), lists["sends"].size()}));
  }
  BatchInText(const BatchInText&) = delete;
  BatchInText& operator=(const BatchInText&) = delete;

  std::map<std::string, std::vector<int64_t>> lists;
  std::vector<int> ranks, absent;
  std::vector<Segment> segments;
  Batch batch;

 private:
  std::vector<int64_t> Counts() {
    const std::vector<int64_t>&parts = lists["parts"], &sends = lists["sends"];
    if (!lists["counts"].empty()) return lists["counts"];
    if (!parts.empty()) return {std::accumulate(parts.begin(), parts.end(), int64_t{0})};
    if (sends.empty()) return {5};
    return {std::max(std::ranges::max(sends), std::ranges::max(lists["receives"]))};
  }
  void Complete(size_t size) {
    ranks.resize(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    const bool is_absent = lists.contains("absent");
    for (const int64_t rank : lists["absent"]) absent.push_back(static_cast<int>(rank));
    if (is_absent && absent.empty()) absent = {batch.my_index};
    const bool lacks_input =
        lists.contains("noin") || std::ranges::count(absent, batch.my_index) > 0;
    for (const int64_t count : Counts()) {
      const size_t i = segments.size();
      segments.push_back(
          {lacks_input ? nullptr : Memory(Area::kIn, i), Memory(Area::kOut, i), count});
      batch.count += count;
    }
    for (const int64_t i : lists["inplace"]) {
      segments[static_cast<size_t>(i)].out = Memory(Area::kIn, static_cast<size_t>(i));
    }
    for (const int64_t i : lists["drop"]) segments[static_cast<size_t>(i)].out = nullptr;
    if (lists.contains("count")) batch.count = lists["count"].front();
    if (lists.contains("segments")) segments.resize(static_cast<size_t>(lists["segments"].front()));
    batch.ranks = ranks;
    batch.absent = absent;
    batch.segments = segments;
    batch.splits = lists["parts"];
    batch.sends = lists["sends"];
    batch.receives = lists["receives"];
  }
};

}  // namespace farandole
