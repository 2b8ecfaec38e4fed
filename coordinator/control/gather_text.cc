#include "coordinator/control/gather_text.h"

#include <algorithm>
#include <string_view>

#include "coordinator/control/wire/hello.pb.h"

namespace farandole {
namespace {

constexpr int kAnswerFanOut = 8;

size_t SharedPrefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

// Prefix and suffix do not overlap, in either text.
void EncodeText(std::string_view text, std::string_view before, wire::GatheredText& out) {
  const size_t prefix = SharedPrefix(text, before);
  text.remove_prefix(prefix);
  before.remove_prefix(prefix);
  const auto from_end = std::mismatch(text.rbegin(), text.rend(), before.rbegin(), before.rend());
  const auto suffix = static_cast<size_t>(from_end.first - text.rbegin());
  text.remove_suffix(suffix);
  out.set_prefix(static_cast<uint32_t>(prefix));
  out.set_suffix(static_cast<uint32_t>(suffix));
  out.set_middle(text.data(), text.size());
}

// Lengths come from another process. As those of prefix and suffix do not exceed the text before,
// no text is longer than the whole answer.
Result<std::vector<std::string>> ReadTexts(const wire::Gathered& answer) {
  std::vector<std::string> texts;  // never moved: `before` is a view of one
  texts.reserve(static_cast<size_t>(answer.texts_size()));
  std::string_view before;
  for (const wire::GatheredText& text : answer.texts()) {
    if (uint64_t{text.prefix()} + text.suffix() > before.size()) {
      return Internal("allgather at start: the text of rank " + std::to_string(texts.size()) +
                      " takes more from the one before it than that has");
    }
    texts.emplace_back(before.substr(0, text.prefix()));
    texts.back() += text.middle();
    texts.back() += before.substr(before.size() - text.suffix());
    before = texts.back();
  }
  return texts;
}

}  // namespace

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string TextOf(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Silent ranks are part of the answer, so that all ranks that did arrive report the same ones.
std::string EncodeGathered(const std::vector<std::optional<std::string>>& values) {
  wire::Gathered answer;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (!values[rank]) answer.add_silent(static_cast<uint32_t>(rank));
  }
  std::string_view before;
  for (size_t rank = 0; answer.silent().empty() && rank < values.size(); ++rank) {
    EncodeText(*values[rank], before, *answer.add_texts());
    before = *values[rank];
  }
  return answer.SerializeAsString();
}

Result<std::vector<std::string>> DecodeGathered(std::span<const std::byte> bytes, int size) {
  wire::Gathered answer;
  if (!answer.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Internal("allgather at start: the answer cannot be read");
  }
  std::string silent;
  for (const uint32_t rank : answer.silent()) {
    silent += (silent.empty() ? "rank " : ", rank ") + std::to_string(rank);
  }
  if (!silent.empty()) {
    return Timeout("allgather at start: " + silent + " did not arrive in time");
  }
  if (answer.texts_size() != size) {
    return Internal("allgather at start: an answer of " + std::to_string(answer.texts_size()) +
                    " texts, for " + std::to_string(size) + " ranks");
  }
  return ReadTexts(answer);
}

RankRange AnswerChildren(int rank, int size) {
  const auto limited = [size](int64_t to) { return static_cast<int>(std::min<int64_t>(to, size)); };
  const int64_t first = int64_t{kAnswerFanOut} * rank + 1;
  return {limited(first), limited(first + kAnswerFanOut)};
}

int AnswerParent(int rank) { return (rank - 1) / kAnswerFanOut; }

}  // namespace farandole
