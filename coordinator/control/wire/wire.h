// Messages as bytes.
//
// Frame: magic u16, version u8, type u8, length u32, payload; little endian; several frames may
// follow one another in one transport message. The payload is the fixed fields of the type
// (protocol/message_fields.h), with records in Protocol Buffers behind them where there are any
// (records.h). Parsing is bounded and answers malformed input with a Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "core/status.h"

namespace farandole {

inline constexpr uint8_t kWireVersion = 2;

/// Appends one frame. Allocates only for messages with records or text (once `out` has grown).
/// @return Internal, and nothing appended, if the frame would exceed kMaxFrameBytes, which no
/// receiver takes; the negotiation keeps its messages below that.
Status Encode(const UpMessage& message, std::vector<std::byte>& out);
Status Encode(const DownMessage& message, std::vector<std::byte>& out);
void Encode(const AbortMessage& message, std::vector<std::byte>& out);

/// Reads the frames of one transport message one after the other. Lifetime: borrows `bytes`.
class FrameReader {
 public:
  enum class Kind : uint8_t { kEnd, kUp, kDown, kAbort };
  explicit FrameReader(std::span<const std::byte> bytes) : rest_(bytes) {}
  /// Decodes the next frame into `up` or `down` (all their fields are overwritten or cleared,
  /// capacity is kept).
  /// @return kEnd after the last; Internal naming the field and the limit for malformed input or
  /// another version.
  Result<Kind> Next(UpMessage& up, DownMessage& down);
  /// Of the last frame, if that was kAbort.
  const AbortMessage& abort() const { return abort_; }

 private:
  std::span<const std::byte> rest_;
  AbortMessage abort_;
};

}  // namespace farandole
