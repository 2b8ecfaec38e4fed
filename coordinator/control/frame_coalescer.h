// The engine's side of the control tree: messages become frames, frames of one step travel
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "coordinator/protocol/negotiation.h"
#include "core/counters.h"
#include "core/liveness.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

/// Thread safety: the holder of the engine lock only. No allocation once the buffers have grown,
/// except for records and text.
class FrameCoalescer {
 public:
  FrameCoalescer(Transport& transport, Counters& counters, Liveness& liveness);

  /// Adds a frame to what the next Flush sends to `to`. @return as Encode.
  Status Add(int to, const UpMessage& message);
  Status Add(int to, const DownMessage& message);
  /// Sends one transport message to each peer that has frames waiting.
  Status Flush();
  /// Takes what has arrived, up to `limit` transport messages, and hands it to `negotiation`.
  /// @return how many came; Internal for a broken frame or protocol; a peer's final error, which
  /// `liveness` has heard, when one arrives.
  Result<int> Receive(Negotiation& negotiation, int limit);

  /// Sends the final error to the others; frames that wait are dropped. Each rank sends it to those
  /// at distances 1, 2, 4, ... both ways around, which do the same: all know after log2(size) hops,
  /// and ranks that are gone do not part the others, as a leader in the tree would. (The distances
  /// are those of Stoica et al., "Chord", SIGCOMM 2001.)
  /// @param is_shared  See EncodeFailure.
  void SpreadAbort(const Status& error, bool is_shared = false);
  /// Moves sends along and drops what arrives, up to `limit` transport messages, but for a peer's
  /// final error, which `liveness` hears.
  void Drain(int limit);

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    bool up = false;
  };
  Status Dispatch(Negotiation& negotiation, const Transport::Incoming& incoming);

  Transport& transport_;
  Counters& counters_;
  Liveness& liveness_;
  std::vector<Outgoing> outgoing_;  // by rank
  std::vector<int> waiting_;        // ranks with frames
  UpMessage up_;
  DownMessage down_;
};

/// A final error as SpreadAbort sends it.
/// @param rank       This one, whose error it is, unless it names another one that is lost.
/// @param is_shared  It has come from another rank, or rank 0 has decided it for all: others get it
///                   in the same words.
std::vector<std::byte> EncodeFailure(int rank, const Status& error, bool is_shared);
/// And back, where it has come. @return OK if the bytes are not such an error.
Status DecodeFailure(std::span<const std::byte> bytes);

}  // namespace farandole
