// The engine's side of the control tree: messages become frames, frames of one step travel
// together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "coordinator/message.h"
#include "coordinator/negotiation.h"
#include "core/counters.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

/// Thread safety: the baton holder only. No allocation once the buffers have grown, except for
/// records and text.
class Links {
 public:
  Links(Transport& transport, uint32_t epoch, Counters& counters);

  /// Adds a frame to what the next Flush sends to `to`.
  void Add(int to, const UpMessage& message);
  void Add(int to, const DownMessage& message);
  /// Sends one transport message to each peer that has frames waiting.
  Status Flush();
  /// Takes what has arrived, up to `limit` transport messages, and hands it to `negotiation`.
  /// @return how many came; Unavailable naming the peer when one is lost; Internal for a broken
  /// frame or protocol.
  Result<int> Receive(Negotiation& negotiation, int limit);

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    bool up = false;
  };
  Status Dispatch(Negotiation& negotiation, const Transport::Incoming& incoming);

  Transport& transport_;
  const uint32_t epoch_;
  Counters& counters_;
  std::vector<Outgoing> outgoing_;  // by rank
  std::vector<int> waiting_;        // ranks with frames
  UpMessage up_;
  DownMessage down_;
};

}  // namespace farandole
