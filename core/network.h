// How the ranks of a job reach each other: control messages, and links for bulk data. MPI is one
// network, TCP the other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "core/borrowed_memory.h"
#include "core/clock.h"
#include "core/counters.h"
#include "core/doorbell.h"
#include "core/liveness.h"
#include "core/status.h"
#include "core/transport.h"

namespace farandole {

class P2pLink;    // ops/p2p/link.h
class StreamHub;  // core/net/stream_hub.h

/// Makes the link of a set with its first batch. Links of sets that live at the same time do not
/// mix their messages: uids then differ modulo kMaxLiveSets (ops/data_plane.h).
using P2pLinkFactory =
    std::function<std::unique_ptr<P2pLink>(uint32_t uid, std::span<const int> ranks)>;

/// What one engine gives to the transport and the links made for it.
struct LinkOptions {
  Doorbell* doorbell = nullptr;  ///< Of this rank; outlives the link. MPI itself never rings it.
  Liveness* liveness = nullptr;  ///< May be nullptr; outlives the link.
  Counters* counters = nullptr;  ///< May be nullptr; outlives the link.
  int64_t timeout_ns = 60 * kNsPerSecond;  ///< For the collective set-up of the link.
  BorrowedMemory* memory = nullptr;        ///< The engine's; may be nullptr; outlives the link.
};

/// Thread safety: Create calls one after the other, from any thread; name at any time. Lifetime:
/// outlives what it made, unless its implementation says otherwise.
class Network {
 public:
  virtual ~Network() = default;
  /// "mpi", "tcp".
  virtual const char* name() const = 0;
  /// The control plane. Collective over all ranks, in the same order as other Create calls.
  /// @return Timeout naming the ranks that do not come, as far as they are known; Internal
  /// otherwise.
  virtual Result<std::unique_ptr<Transport>> CreateTransport(const LinkOptions& options) = 0;
  /// The links of one data plane; those of two planes never mix their messages. As above.
  virtual Result<P2pLinkFactory> CreateLinks(const LinkOptions& options) = 0;
  /// Below the last transport; nullptr: it has none.
  virtual std::shared_ptr<StreamHub> hub() const { return nullptr; }
};

}  // namespace farandole
