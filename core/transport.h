// Small ordered messages between ranks: the control plane's only road.
//
// Thread safety: everything from the holder of the engine lock only. Bulk data never goes this way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/status.h"

namespace farandole {

/// How a rank learns that a transport or plane has news: by its doorbell, or by asking again after
/// a while.
inline constexpr int64_t kByDoorbell = -1;

/// Invariant: messages of one sender arrive whole, once, in the order sent. Who is lost is no news
/// of a transport: see Liveness. Lifetime: outlives the engine using it.
class Transport {
 public:
  /// `data` stays valid until the next Poll.
  struct Incoming {
    int from = 0;
    std::span<const std::byte> data;
  };

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "in_process", "shm", "mpi".
  virtual const char* name() const = 0;

  /// Copies `data` and returns without blocking; what the link cannot take waits in the transport
  /// (bounded by the keys in flight); what is for a rank that is gone may be dropped. @return
  /// Unavailable if `to` is known to be lost, Internal with the library's text otherwise.
  virtual Status Send(int to, std::span<const std::byte> data) = 0;

  /// The next message, or nothing. Also moves queued sends along. Never blocks.
  virtual Result<std::optional<Incoming>> Poll() = 0;

  /// kByDoorbell if news ring the doorbell; otherwise the longest time in ns the engine may sleep
  /// before the next Poll. `busy`: a key or batch is pending on this rank. `idle_ns`: time since
  /// anything last happened here.
  virtual int64_t PollAfterNs(bool busy, int64_t idle_ns) const = 0;

  /// Every rank's `mine`, by rank. Collective; only before the engine starts, on the thread that
  /// initialises.
  /// @return Timeout naming the silent ranks when `timeout_ns` passes.
  virtual Result<std::vector<std::string>> Allgather(const std::string& mine,
                                                     int64_t timeout_ns) = 0;

  /// With whom this rank exchanges messages from now on, so that the transport can prepare for
  /// them; the others send and get hardly anything. Once on every rank, before its first Send, and
  /// symmetric: a neighbour names this rank, too.
  virtual void SetNeighbours(std::span<const int> ranks) { (void)ranks; }

  /// Peers need not take the end of this process for a death: its engine has ended well.
  virtual void Leave() {}

  /// True when every Send so far has left this rank (or its receiver took it). Poll moves things
  /// along.
  virtual bool Drained() const = 0;
};

}  // namespace farandole
