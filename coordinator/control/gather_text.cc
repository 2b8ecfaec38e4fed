#include "coordinator/control/gather_text.h"

#include <cstring>

namespace farandole {
namespace {

// Each value is a u32 length in the machine's order and its bytes; this length says "silent". All
// ranks of an MPI job here share one byte order.
constexpr uint32_t kSilent = UINT32_MAX;

}  // namespace

std::span<const std::byte> BytesOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string TextOf(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Silent ranks are part of the answer, so that all ranks that did arrive report the same ones.
std::string EncodeGathered(const std::vector<std::optional<std::string>>& values) {
  std::string bytes;
  for (const std::optional<std::string>& value : values) {
    const uint32_t length = value ? static_cast<uint32_t>(value->size()) : kSilent;
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    if (value) bytes += *value;
  }
  return bytes;
}

Result<std::vector<std::string>> DecodeGathered(const std::string& bytes) {
  std::vector<std::string> values;
  std::string silent;
  for (size_t at = 0; at < bytes.size();) {
    uint32_t length = 0;
    if (bytes.size() - at < sizeof length) return Internal("allgather at start: answer cut short");
    // Lengths come from another process: each is compared with what is left.
    std::memcpy(&length, bytes.data() + at, sizeof length);
    at += sizeof length;
    if (length == kSilent) {
      silent += (silent.empty() ? "rank " : ", rank ") + std::to_string(values.size());
      values.emplace_back();
      continue;
    }
    if (bytes.size() - at < length) return Internal("allgather at start: answer cut short");
    values.push_back(bytes.substr(at, length));
    at += length;
  }
  if (!silent.empty()) {
    return Timeout("allgather at start: " + silent + " did not arrive in time");
  }
  return values;
}

}  // namespace farandole
