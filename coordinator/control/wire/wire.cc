#include "coordinator/control/wire/wire.h"

#include <string>

#include "coordinator/control/wire/bytes.h"
#include "coordinator/control/wire/records.h"

namespace farandole {
namespace {

constexpr uint16_t kMagic = 0xFA4D;
constexpr size_t kHeaderBytes = 8;

/// A frame's type is that of the message, with a bit for its direction. An abort has none.
constexpr uint8_t kDownBit = 0x80;
constexpr uint8_t kAbortType = 0x3F;

/// Records are the last field of a frame: a message of the steady state has none, so that encoding
/// it allocates nothing and needs no parser.
template <class Part>
bool IsEmpty(const Part& part) {
  if constexpr (requires { part.empty(); }) return part.empty();
  return false;
}

class FrameWriter : public ByteWriter {
 public:
  using ByteWriter::ByteWriter;

  template <class Part>
  void Records(const Part& part) {
    if (IsEmpty(part)) return;
    wire::Records records;
    RecordWriter writer;
    Fields(writer, part, records);
    const size_t at = out_.size();
    out_.resize(at + records.ByteSizeLong());
    if (out_.size() - at > kMaxFrameBytes) return;  // EncodeFrame refuses it
    // Relies on the sizes that ByteSizeLong has just stored in `records`.
    records.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(out_.data() + at));
  }
};

class PayloadReader : public ByteReader {
 public:
  using ByteReader::ByteReader;

  template <class Part>
  void Records(Part& part) {
    if (left() == 0 || !status().ok()) return;
    const auto bytes = Take(left());
    wire::Records records;
    // FrameReader::Next has compared the length with kMaxFrameBytes, so it fits into an int.
    if (!records.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return Refuse(std::to_string(bytes.size()) + " bytes are no records");
    }
    RecordReader reader;
    Fields(reader, part, records);
    Include(reader.status());
  }
};

/// A frame that is too long is removed again, and those before it stay as they are.
template <class Message>
Status EncodeFrame(const Message& message, uint8_t type, std::vector<std::byte>& out) {
  const size_t start = out.size();
  Put(kMagic, out);
  Put(kWireVersion, out);
  Put(type, out);
  Put(uint32_t{0}, out);  // the length
  FrameWriter writer(out);
  Fields(writer, message);
  const size_t bytes = out.size() - start - kHeaderBytes;
  if (bytes > kMaxFrameBytes) {
    out.resize(start);
    return Internal("frame: a payload of " + std::to_string(bytes) + " bytes, limit " +
                    std::to_string(kMaxFrameBytes));
  }
  const auto length = static_cast<uint32_t>(bytes);
  std::memcpy(out.data() + start + kHeaderBytes - sizeof length, &length, sizeof length);
  return {};
}

template <class Message>
Status DecodePayload(std::span<const std::byte> payload, Message& message) {
  PayloadReader reader(payload);
  Fields(reader, message);
  return reader.Finish();
}

template <class Message, class Type>
Status DecodeFrame(uint8_t type, Type last, std::span<const std::byte> payload, Message& message) {
  message.Clear();
  const auto own = static_cast<uint8_t>(type & ~kDownBit);
  if (own > static_cast<uint8_t>(last)) {
    return Internal("frame: unknown type " + std::to_string(type));
  }
  message.type = static_cast<Type>(own);
  return DecodePayload(payload, message);
}

Status Unequal(const char* field, uint64_t got, uint64_t expected) {
  return Internal(std::string("frame: ") + field + " is " + std::to_string(got) + ", expected " +
                  std::to_string(expected));
}

}  // namespace

Status Encode(const UpMessage& message, std::vector<std::byte>& out) {
  return EncodeFrame(message, static_cast<uint8_t>(message.type), out);
}

Status Encode(const DownMessage& message, std::vector<std::byte>& out) {
  return EncodeFrame(message, static_cast<uint8_t>(static_cast<uint8_t>(message.type) | kDownBit),
                     out);
}

// A cause that is the text travels once.
void Encode(const AbortMessage& message, std::vector<std::byte>& out) {
  AbortMessage abort = message;
  if (abort.text == abort.facts.cause) abort.facts.cause.clear();
  (void)EncodeFrame(abort, kAbortType, out);  // far below the limit
}

// The header is checked completely before anything of the payload is decoded.
Result<FrameReader::Kind> FrameReader::Next(UpMessage& up, DownMessage& down) {
  if (rest_.empty()) return Kind::kEnd;
  if (rest_.size() < kHeaderBytes) return Unequal("header length", rest_.size(), kHeaderBytes);
  ByteReader header(rest_.first(kHeaderBytes));
  const auto magic = header.Get<uint16_t>("magic");
  const auto version = header.Get<uint8_t>("version");
  const auto type = header.Get<uint8_t>("type");
  const auto length = header.Get<uint32_t>("length");
  if (magic != kMagic) return Unequal("magic", magic, kMagic);
  if (version != kWireVersion) return Unequal("version", version, kWireVersion);
  if (length > kMaxFrameBytes || length > rest_.size() - kHeaderBytes) {
    return Internal("frame: length is " + std::to_string(length) + ", " +
                    std::to_string(rest_.size() - kHeaderBytes) + " bytes are left and " +
                    std::to_string(kMaxFrameBytes) + " allowed");
  }
  const auto payload = rest_.subspan(kHeaderBytes, length);
  rest_ = rest_.subspan(kHeaderBytes + length);
  if (type == kAbortType) {
    FARANDOLE_RETURN_IF_ERROR(DecodePayload(payload, abort_));
    FailureFacts& facts = abort_.facts;
    if (facts.cause.empty() && !facts.ranks.empty()) facts.cause = abort_.text;
    return Kind::kAbort;
  }
  // The enumerators here are the last of their types: one that is added must take their place.
  if ((type & kDownBit) != 0) {
    FARANDOLE_RETURN_IF_ERROR(DecodeFrame(type, DownType::kWhoWaits, payload, down));
    return Kind::kDown;
  }
  FARANDOLE_RETURN_IF_ERROR(DecodeFrame(type, UpType::kSteps, payload, up));
  return Kind::kUp;
}

}  // namespace farandole
