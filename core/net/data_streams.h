// Sockets to other ranks for bulk data: already connected, authenticated and non-blocking.
#pragma once

#include <optional>

#include "core/status.h"

namespace farandole {

/// Which stream between two ranks. A pair of ranks has `streams` of them for each plane, each used
/// both ways.
struct StreamId {
  int plane = 0;   ///< Counts the CreateLinks calls of a network, alike on all ranks.
  int peer = 0;    ///< Global rank.
  int number = 0;  ///< 0 up to, not including, DataStreams::streams().
};

/// Thread safety: the holder of the engine lock only. A thread of the implementation sleeps until
/// watched sockets are ready and then rings the engine's doorbell. Lifetime: outlives the links.
class DataStreams {
 public:
  virtual ~DataStreams() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Sockets between two ranks, alike on all ranks.
  virtual int streams() const = 0;
  /// The socket of a stream, once it is connected: the lower rank connects with its first call, the
  /// higher one accepts. Rings the doorbell when there is news. The caller owns what it gets, once,
  /// and closes it after Unwatch.
  /// @return nothing yet; Unavailable naming both ends and the reason.
  virtual Result<std::optional<int>> Take(const StreamId& stream) = 0;
  /// Rings the doorbell once, when the socket is readable (and, if `writable`, also when it is
  /// writable) or broken; at once, if it is so now. A later call replaces it.
  virtual Status Watch(int socket, bool writable) = 0;
  virtual void Unwatch(int socket) = 0;
};

}  // namespace farandole
