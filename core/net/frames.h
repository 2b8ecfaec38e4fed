// Messages on a control stream, each with its number and a MAC: nothing is lost, repeated,
// reordered or changed between two ranks without their noticing.
//
// Frame: magic u8, version u8, type u8, 0 u8, length u32, number u64; payload; the first 16 bytes
// of HMAC-SHA-256 over all of that under the key of this connection and direction. Little endian.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/net/job_key.h"
#include "core/status.h"

namespace farandole {

enum class FrameType : uint8_t {
  kMessage = 1,     ///< Of the engine.
  kGather = 2,      ///< Texts on their way to rank 0.
  kGathered = 3,    ///< And its answer.
  kRegister = 4,    ///< A rank that joins, to rank 0.
  kAccepted = 5,    ///< And its answer: whether (u8) the stream stays open until all have come;
  kRejected = 6,    ///< or this one: why not.
  kTable = 7,       ///< Who is where, down the tree.
  kGoodbye = 8,     ///< The sender is about to end well.
  kAlive = 9,       ///< And not silent: every so many ms (u32) at least; then its host's name.
  kAbort = 10,      ///< A final error, past the sender's engine; its bytes are the engine's.
  kTimeUp = 11,     ///< The init timeout of a rank that is accepted has passed, to rank 0.
  kComplete = 12,   ///< To a rank that is accepted: the table is on its way.
  kComeAgain = 13,  ///< Likewise: rank 0 has given up its join, and may begin another one.
  kStarted = 14,    ///< An answer to kRegister: the job has started; who has the rank's place.
  kOtherSize = 15,  ///< Likewise: rank 0 awaits another number of ranks.
  kMember = 16,     ///< Of membership, to a process; and its answer:
  kTaken = 17,      ///< whether (u8) this is the process.
};
inline constexpr uint8_t kLastFrameType = 17;
inline constexpr size_t kFrameHeaderBytes = 16;
inline constexpr size_t kFrameMacBytes = 16;
inline constexpr uint32_t kMaxFramePayloadBytes = uint32_t{1} << 28;

/// One direction of a stream. Thread safety: none.
class StreamWriter {
 public:
  explicit StreamWriter(const JobKey& key) : hmac_(key) {}
  /// Appends a frame to `out`. `payload` has kMaxFramePayloadBytes at most.
  void Append(FrameType type, ByteSpan payload, std::vector<std::byte>& out);

 private:
  Hmac hmac_;
  uint64_t number_ = 0;
};

/// The other end of that direction. Thread safety: none.
class StreamReader {
 public:
  struct Frame {
    FrameType type = FrameType::kMessage;
    ByteSpan payload;  ///< Until the next call of the reader.
  };

  explicit StreamReader(const JobKey& key) : hmac_(key) {}
  /// What has been received.
  void Take(ByteSpan bytes) { buffer_.insert(buffer_.end(), bytes.begin(), bytes.end()); }
  /// The next complete frame, if there is one. Memory grows with what was received, whatever a
  /// header says. @return Internal, then for ever, if something is not as it was sent.
  Result<std::optional<Frame>> Next();
  /// Whether part of a frame has come.
  bool midway() const { return at_ < buffer_.size(); }

 private:
  void Compact();

  Hmac hmac_;
  uint64_t number_ = 0;
  std::vector<std::byte> buffer_;
  size_t at_ = 0;  // what is before has been handed out
  Status broken_;
};

}  // namespace farandole
