// The engine's side of the control tree: messages become frames, frames of one step travel
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "coordinator/protocol/messages.h"
#include "coordinator/protocol/negotiation.h"
#include "core/counters.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

/// Thread safety: the holder of the engine lock only. No allocation once the buffers have grown,
/// except for records and text.
class FrameCoalescer {
 public:
  FrameCoalescer(Transport& transport, Counters& counters);

  /// Adds a frame to what the next Flush sends to `to`. @return as Encode.
  Status Add(int to, const UpMessage& message);
  Status Add(int to, const DownMessage& message);
  /// Sends one transport message to each peer that has frames waiting.
  Status Flush();
  /// Takes what has arrived, up to `limit` transport messages, and hands it to `negotiation`.
  /// @return how many came; Unavailable naming the peer when one is lost; Internal for a broken
  /// frame or protocol.
  /// The code of a peer's final error, with its rank and cause, when one arrives.
  Result<int> Receive(Negotiation& negotiation, int limit);

  /// Sends this rank's final error, or passes on the peer's that has arrived; frames that wait are
  /// dropped. Each rank sends it to those at distances 1, 2, 4, ... both ways around, which do the
  /// same: all know after log2(size) hops, and ranks that are gone do not part the others, as a
  /// leader in the tree would. (The distances are those of Stoica et al., "Chord", SIGCOMM 2001.)
  /// @param is_agreed  Rank 0 has decided it for all: it is the same everywhere, and no rank's own.
  void SpreadAbort(const Status& own, bool is_agreed = false);
  /// Moves sends along and drops what arrives, up to `limit` transport messages.
  /// @return a peer's final error when one has arrived, now or in Receive; else why one is lost,
  /// where something is known of its process.
  Status Drain(int limit);
  /// A peer's final error has arrived.
  bool aborted() const { return abort_.has_value(); }

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    bool up = false;
  };
  Status Dispatch(Negotiation& negotiation, const Transport::Incoming& incoming);
  void LookForAbort(const Transport::Incoming& incoming);

  Transport& transport_;
  Counters& counters_;
  std::vector<Outgoing> outgoing_;     // by rank
  std::vector<int> waiting_;           // ranks with frames
  std::optional<AbortMessage> abort_;  // the first that arrived
  Status cause_;                       // of a loss
  UpMessage up_;
  DownMessage down_;
};

/// A final error of `rank` as SpreadAbort would send it.
std::vector<std::byte> EncodeFailure(int rank, const Status& error);
/// And back, where it has come. @return OK if the bytes are not such an error.
Status DecodeFailure(std::span<const std::byte> bytes);

}  // namespace farandole
