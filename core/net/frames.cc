#include "core/net/frames.h"

#include <cstring>
#include <string>

namespace farandole {
namespace {

constexpr uint8_t kFrameMagic = 0xFA;
constexpr uint8_t kVersion = 1;

struct Header {
  uint8_t magic = kFrameMagic;
  uint8_t version = kVersion;
  uint8_t type = 0;
  uint8_t zero = 0;
  uint32_t length = 0;
  uint64_t number = 0;
};
static_assert(sizeof(Header) == kFrameHeaderBytes);

const char* Fault(const Header& header, uint64_t number) {
  if (header.magic != kFrameMagic || header.zero != 0) return "no frame begins where one should";
  if (header.version != kVersion) return "a frame of another version";
  if (header.type < 1 || header.type > kLastFrameType) return "a frame of an unknown type";
  if (header.length > kMaxFramePayloadBytes) return "a frame that is too long";
  if (header.number != number) return "a frame is missing, or came twice";
  return nullptr;
}

}  // namespace

void StreamWriter::Append(FrameType type, ByteSpan payload, std::vector<std::byte>& out) {
  Header header;
  header.type = static_cast<uint8_t>(type);
  header.length = static_cast<uint32_t>(payload.size());
  header.number = number_++;
  const ByteSpan head = std::as_bytes(std::span(&header, 1));
  const Digest mac = hmac_.Of({head, payload});
  out.insert(out.end(), head.begin(), head.end());
  out.insert(out.end(), payload.begin(), payload.end());
  out.insert(out.end(), mac.begin(), mac.begin() + kFrameMacBytes);
}

Result<std::optional<StreamReader::Frame>> StreamReader::Next() {
  if (!broken_.ok()) return broken_;
  const ByteSpan left = ByteSpan(buffer_).subspan(at_);
  if (left.size() < kFrameHeaderBytes) return Compact(), std::optional<Frame>();
  Header header;
  std::memcpy(&header, left.data(), sizeof header);
  if (const char* fault = Fault(header, number_)) {
    broken_ = Internal(fault);
    return broken_;
  }
  const size_t signed_bytes = kFrameHeaderBytes + header.length;
  if (left.size() < signed_bytes + kFrameMacBytes) return Compact(), std::optional<Frame>();
  const Digest mac = hmac_.Of({left.first(signed_bytes)});
  if (!EqualDigests(ByteSpan(mac).first(kFrameMacBytes),
                    left.subspan(signed_bytes, kFrameMacBytes))) {
    broken_ = Internal("a frame was changed on its way");
    return broken_;
  }
  ++number_;
  at_ += signed_bytes + kFrameMacBytes;
  return std::optional(
      Frame{static_cast<FrameType>(header.type), left.subspan(kFrameHeaderBytes, header.length)});
}

// What has been handed out goes when nothing refers to it any more: before more is received.
void StreamReader::Compact() {
  buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(at_));
  at_ = 0;
}

}  // namespace farandole
