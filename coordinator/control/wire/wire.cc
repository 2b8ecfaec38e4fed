#include "coordinator/control/wire/wire.h"

#include <algorithm>
#include <string>

#include "coordinator/control/wire/bytes.h"
#include "coordinator/control/wire/convert.h"
#include "coordinator/protocol/limits.h"

namespace farandole {
namespace {

constexpr uint16_t kMagic = 0xFA4D;
constexpr size_t kHeaderBytes = 8;

/// What a frame holds: direction, form and the message's own type.
constexpr uint8_t kDownBit = 0x80;
constexpr uint8_t kProtoBit = 0x40;
constexpr uint8_t kTypeMask = 0x3F;
/// The whole type of an abort: it has no direction.
constexpr uint8_t kAbortType = kTypeMask;

/// Whether a type travels as a fixed frame, as Protocol Buffers, or as either. The messages of the
/// steady state are fixed: encoding them allocates nothing, and they need no parser.
enum class Form : uint8_t { kFixed, kProto, kEither };

Form FormOf(UpType type) {
  switch (type) {
    case UpType::kVotes:
    case UpType::kLeave:
      return Form::kEither;
    case UpType::kJoin:
    case UpType::kLeaving:
    case UpType::kDone:
    case UpType::kUnused:
    case UpType::kBlocked:
      return Form::kFixed;
    case UpType::kStall:
    case UpType::kAnswer:
    case UpType::kWaits:
      return Form::kProto;
  }
  return Form::kProto;
}

Form FormOf(DownType type) {
  switch (type) {
    case DownType::kWork:
    case DownType::kLeft:
      return Form::kEither;
    case DownType::kJoinDone:
    case DownType::kShutdown:
    case DownType::kWhoWaits:
    case DownType::kRetire:
      return Form::kFixed;
    case DownType::kSkip:
    case DownType::kRefuse:
    case DownType::kQuery:
    case DownType::kStallShutdown:
    case DownType::kReport:
    case DownType::kAddSet:
    case DownType::kRemoveSet:
      return Form::kProto;
  }
  return Form::kProto;
}

// What a fixed frame has no room for; asked where a message has either form.
bool HasRecords(const UpMessage& message) {
  return message.type == UpType::kLeave ? !message.facts.cause.empty() : !message.keys.empty();
}
bool HasRecords(const DownMessage& message) {
  return message.type == DownType::kLeft ? !message.facts.cause.empty() : !message.items.empty();
}

bool NamesRank(UpType type) {
  return type == UpType::kJoin || type == UpType::kLeaving || type == UpType::kLeave ||
         type == UpType::kBlocked;
}
bool NamesIds(DownType type) { return type == DownType::kWork || type == DownType::kRetire; }

/// Writes a header whose length EndFrame fills in. @return where the frame starts.
size_t BeginFrame(uint8_t type, std::vector<std::byte>& out) {
  const size_t start = out.size();
  Put(kMagic, out);
  Put(kWireVersion, out);
  Put(type, out);
  Put(uint32_t{0}, out);
  return start;
}

Status TooLarge(size_t bytes) {
  return Internal("frame: a payload of " + std::to_string(bytes) + " bytes, limit " +
                  std::to_string(kMaxFrameBytes));
}

/// A frame that is too long is removed again, and those before it stay as they are.
Status EndFrame(size_t start, std::vector<std::byte>& out) {
  const size_t bytes = out.size() - start - kHeaderBytes;
  if (bytes > kMaxFrameBytes) {
    out.resize(start);
    return TooLarge(bytes);
  }
  const auto length = static_cast<uint32_t>(bytes);
  std::memcpy(out.data() + start + kHeaderBytes - sizeof length, &length, sizeof length);
  return {};
}

/// 28 bytes for a run of ids with equal counts, of which a round of gradients usually needs one.
void PutSteps(const std::vector<StepRun>& steps, std::vector<std::byte>& out) {
  Put(static_cast<uint32_t>(steps.size()), out);
  for (const StepRun& run : steps) {
    Put(run.length, out);
    Put(run.count.step, out);
    Put(run.count.passes, out);
    Put(run.count.no_sync_passes, out);
    Put(run.count.previous_passes, out);
    Put(run.count.previous_no_sync_passes, out);
  }
}

/// The fields and their order are those of GetFixed; nothing in the frame would show a difference.
void PutFixed(const UpMessage& message, std::vector<std::byte>& out) {
  if (NamesRank(message.type)) return Put(message.rank, out);
  Put(message.number, out);
  if (message.type == UpType::kVotes) {
    PutIds(message.ids, out);
    return PutSteps(message.steps, out);
  }
  Put(message.index, out);
}

void PutFixed(const DownMessage& message, std::vector<std::byte>& out) {
  Put(message.number, out);
  if (!NamesIds(message.type)) return Put(message.rank, out);
  Put(message.set, out);
  PutIds(message.ids, out);
}

template <class Proto, class Message>
void PutAs(const Message& message, std::vector<std::byte>& out) {
  Proto proto;
  Fill(message, proto);
  const size_t at = out.size();
  out.resize(at + proto.ByteSizeLong());
  if (out.size() - at > kMaxFrameBytes) return;  // EndFrame refuses it
  // Relies on the sizes that ByteSizeLong has just stored in `proto`.
  proto.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(out.data() + at));
}

void PutProto(const UpMessage& message, std::vector<std::byte>& out) {
  if (message.type == UpType::kVotes) return PutAs<wire::Votes>(message, out);
  if (message.type == UpType::kLeave) return PutAs<wire::Leave>(message, out);
  if (message.type == UpType::kStall) return PutAs<wire::Stall>(message, out);
  if (message.type == UpType::kWaits) return PutAs<wire::Waits>(message, out);
  PutAs<wire::Answers>(message, out);
}

void PutProto(const DownMessage& message, std::vector<std::byte>& out) {
  if (message.type == DownType::kWork) return PutAs<wire::Work>(message, out);
  PutAs<wire::Notice>(message, out);
}

template <class Message>
Status EncodeFrame(const Message& message, uint8_t direction, std::vector<std::byte>& out) {
  const Form form = FormOf(message.type);
  const bool fixed = form == Form::kFixed || (form == Form::kEither && !HasRecords(message));
  const auto type = static_cast<uint8_t>(static_cast<uint8_t>(message.type) | direction |
                                         (fixed ? 0 : kProtoBit));
  const size_t start = BeginFrame(type, out);
  if (fixed) {
    PutFixed(message, out);
  } else {
    PutProto(message, out);
  }
  return EndFrame(start, out);
}

Status CheckRank(int32_t rank) {
  if (rank >= 0 && rank < kMaxRanks) return {};
  return Internal("frame: rank is " + std::to_string(rank) + ", limit " +
                  std::to_string(kMaxRanks));
}

/// kNoId means "not by id" in records, so no list of ids may contain it.
Status CheckIds(const std::vector<uint32_t>& ids) {
  if (std::find(ids.begin(), ids.end(), kNoId) == ids.end()) return {};
  return Internal("frame: an id that stands for no id");
}

Status GetSteps(ByteReader& reader, UpMessage& message) {
  const auto count = reader.Get<uint32_t>("number of step counts");
  if (count > message.ids.size()) {
    return Internal("frame: " + std::to_string(count) + " runs of step counts for " +
                    std::to_string(message.ids.size()) + " ids");
  }
  // After its first failure the reader gives zeros, and GetFixed reports it. `count` bounds the
  // loop.
  for (uint32_t i = 0; i < count; ++i) {
    StepRun& run = message.steps.emplace_back();
    run.length = reader.Get<uint32_t>("length of a run of step counts");
    run.count.step = reader.Get<int64_t>("step");
    for (int32_t* passes : {&run.count.passes, &run.count.no_sync_passes,
                            &run.count.previous_passes, &run.count.previous_no_sync_passes}) {
      *passes = reader.Get<int32_t>("backward passes");
      if (*passes < 0) return Internal("frame: " + std::to_string(*passes) + " backward passes");
    }
    if (run.count.step < 0) return Internal("frame: step " + std::to_string(run.count.step));
  }
  return {};
}

Status GetFixed(std::span<const std::byte> payload, UpMessage& message) {
  ByteReader reader(payload);
  if (message.type == UpType::kVotes) {
    message.number = reader.Get<int64_t>("number");
    reader.GetIds(message.ids);
    FARANDOLE_RETURN_IF_ERROR(GetSteps(reader, message));
  } else if (message.type == UpType::kDone || message.type == UpType::kUnused) {
    message.number = reader.Get<int64_t>("number");
    message.index = reader.Get<int32_t>("index");
  } else {
    message.rank = reader.Get<int32_t>("rank");
  }
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  FARANDOLE_RETURN_IF_ERROR(CheckIds(message.ids));
  return CheckRank(message.rank);
}

Status GetFixed(std::span<const std::byte> payload, DownMessage& message) {
  ByteReader reader(payload);
  message.number = reader.Get<int64_t>("number");
  if (NamesIds(message.type)) {
    message.set = reader.Get<uint32_t>("set");
    reader.GetIds(message.ids);
  } else {
    message.rank = reader.Get<int32_t>("rank");
  }
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  FARANDOLE_RETURN_IF_ERROR(CheckIds(message.ids));
  return CheckRank(message.rank);
}

template <class Proto, class Message>
Status GetAs(std::span<const std::byte> payload, Message& message) {
  Proto proto;
  // FrameReader::Next has compared the length with kMaxFrameBytes, so it fits into an int.
  if (!proto.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return Internal("frame: a payload of " + std::to_string(payload.size()) + " bytes is no " +
                    proto.GetTypeName());
  }
  return Read(proto, message);
}

Status GetProto(std::span<const std::byte> payload, UpMessage& message) {
  if (message.type == UpType::kVotes) return GetAs<wire::Votes>(payload, message);
  if (message.type == UpType::kLeave) return GetAs<wire::Leave>(payload, message);
  if (message.type == UpType::kStall) return GetAs<wire::Stall>(payload, message);
  if (message.type == UpType::kWaits) return GetAs<wire::Waits>(payload, message);
  return GetAs<wire::Answers>(payload, message);
}

Status GetProto(std::span<const std::byte> payload, DownMessage& message) {
  if (message.type == DownType::kWork) return GetAs<wire::Work>(payload, message);
  return GetAs<wire::Notice>(payload, message);
}

template <class Message, class Type>
Status DecodeFrame(uint8_t type, Type last, std::span<const std::byte> payload, Message& message) {
  message.Clear();
  const auto own = static_cast<uint8_t>(type & kTypeMask);
  const bool fixed = (type & kProtoBit) == 0;
  message.type = static_cast<Type>(own);
  // A type that has one form only is refused in the other, so each has one reader.
  const Form other = fixed ? Form::kProto : Form::kFixed;
  if (own > static_cast<uint8_t>(last) || FormOf(message.type) == other) {
    return Internal("frame: unknown type " + std::to_string(type));
  }
  return fixed ? GetFixed(payload, message) : GetProto(payload, message);
}

/// How many bytes of the text fit into `most` without a broken character of UTF-8.
size_t WholeCharacters(const std::string& text, size_t most) {
  size_t length = std::min(text.size(), most);
  const auto continues = [&](size_t at) { return (text[at] & 0xC0) == 0x80; };
  while (length > 0 && length < text.size() && continues(length)) --length;
  return length;
}

void PutText(std::string_view text, std::vector<std::byte>& out) {
  const auto bytes = std::as_bytes(std::span(text));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

Status GetAbort(std::span<const std::byte> payload, AbortMessage& message) {
  ByteReader reader(payload);
  FailureFacts& facts = message.facts;
  message.rank = reader.Get<int32_t>("rank");
  const auto code = reader.Get<int32_t>("code");
  const auto kind = reader.Get<int32_t>("kind");
  facts.number = reader.Get<int32_t>("number");
  facts.pid = reader.Get<int32_t>("process id");
  facts.last_age_ns = reader.Get<int64_t>("age");
  facts.host = reader.GetText("host", kMaxAbortFact);
  facts.last = reader.GetText("last operation", kMaxAbortFact);
  facts.tensor = reader.GetText("tensor", kMaxAbortFact);
  facts.cause = reader.GetText("cause", kMaxAbortFact);
  facts.ranks.resize(std::min<size_t>(reader.Get<uint16_t>("number of ranks"), kMaxAbortRanks));
  for (int32_t& rank : facts.ranks) rank = reader.Get<int32_t>("failed rank");
  message.text = reader.GetRest();
  if (facts.cause.empty() && !facts.ranks.empty()) facts.cause = message.text;
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  // -1: rank 0 has decided it for all ranks.
  if (message.rank != -1) FARANDOLE_RETURN_IF_ERROR(CheckRank(message.rank));
  for (const int32_t rank : facts.ranks) FARANDOLE_RETURN_IF_ERROR(CheckRank(rank));
  if (kind < 0 || kind > static_cast<int32_t>(FailureKind::kBlockedInC)) {
    return Internal("frame: kind of failure is " + std::to_string(kind));
  }
  facts.kind = static_cast<FailureKind>(kind);
  if (!IsErrorCode(code)) {
    return Internal("frame: code is " + std::to_string(code) + ", which is no error");
  }
  if (message.text.size() > kMaxAbortBytes) {
    return Internal("frame: cause is " + std::to_string(message.text.size()) + " bytes, limit " +
                    std::to_string(kMaxAbortBytes));
  }
  message.code = static_cast<Code>(code);
  return {};
}

Status Unequal(const char* field, uint64_t got, uint64_t expected) {
  return Internal(std::string("frame: ") + field + " is " + std::to_string(got) + ", expected " +
                  std::to_string(expected));
}

}  // namespace

Status Encode(const UpMessage& message, std::vector<std::byte>& out) {
  return EncodeFrame(message, 0, out);
}

Status Encode(const DownMessage& message, std::vector<std::byte>& out) {
  return EncodeFrame(message, kDownBit, out);
}

void Encode(const AbortMessage& message, std::vector<std::byte>& out) {
  const FailureFacts& facts = message.facts;
  const size_t start = BeginFrame(kAbortType, out);
  Put(message.rank, out);
  Put(static_cast<int32_t>(message.code), out);
  Put(static_cast<int32_t>(facts.kind), out);
  Put(facts.number, out);
  Put(facts.pid, out);
  Put(facts.last_age_ns, out);
  const std::string cause = message.text == facts.cause ? "" : facts.cause;  // of what was decided
  for (const std::string* text : {&facts.host, &facts.last, &facts.tensor, &cause}) {
    Put(static_cast<uint16_t>(WholeCharacters(*text, kMaxAbortFact)), out);
    PutText(std::string_view(*text).substr(0, WholeCharacters(*text, kMaxAbortFact)), out);
  }
  const size_t ranks = std::min(facts.ranks.size(), kMaxAbortRanks);
  Put(static_cast<uint16_t>(ranks), out);
  for (size_t i = 0; i < ranks; ++i) Put(facts.ranks[i], out);
  const size_t length = WholeCharacters(message.text, kMaxAbortBytes);
  PutText(std::string_view(message.text).substr(0, length), out);
  (void)EndFrame(start, out);  // far below the limit
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
    FARANDOLE_RETURN_IF_ERROR(GetAbort(payload, abort_));
    return Kind::kAbort;
  }
  // The enumerators here and below are the last of their types: one that is added must take their
  // place.
  if ((type & kDownBit) != 0) {
    FARANDOLE_RETURN_IF_ERROR(DecodeFrame(type, DownType::kWhoWaits, payload, down));
    return Kind::kDown;
  }
  FARANDOLE_RETURN_IF_ERROR(DecodeFrame(type, UpType::kLeaving, payload, up));
  return Kind::kUp;
}

}  // namespace farandole
