// Notices at once when a process of this host ends.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/doorbell.h"

namespace farandole {

/// Other ranks of this host as processes that may die. A thread of the engine's watches; the
/// transport asks, and reports who is lost.
///
/// Each is held by a file descriptor of the process (pidfd, Linux 5.3), which no later process of
/// the same number can be taken for. Where the system has or gives none, a rank is not watched.
///
/// Thread safety: Add before all else; Watch by one thread; the rest by any. Lifetime: the bell
/// outlives it.
class PeerWatch {
 public:
  /// @param bell Is rung when a peer has died.
  explicit PeerWatch(Doorbell& bell);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// The process is known to be alive and to be `rank`, e.g. since it waits for this one.
  /// @return false if it cannot be watched.
  bool Add(int rank, pid_t pid);
  /// Sleeps for `timeout_ns`, or until Wake, while peers that die are noticed.
  void Watch(int64_t timeout_ns);
  /// Ends the Watch in progress and every later one.
  void Wake();

  /// How many have died so far.
  int deaths() const { return deaths_.load(std::memory_order_acquire); }
  bool HasDied(size_t position) const {
    return peers_[position].dead.load(std::memory_order_acquire);
  }
  size_t size() const { return peers_.size(); }
  int rank(size_t position) const { return peers_[position].rank; }
  /// "rank 1 (pid 1234 on host a)".
  std::string Describe(size_t position) const;

 private:
  struct Peer {
    Peer(int a_rank, pid_t a_pid, int a_file) : rank(a_rank), pid(a_pid), file(a_file) {}
    Peer(Peer&& other) noexcept : rank(other.rank), pid(other.pid), file(other.file) {}
    int rank;
    pid_t pid;
    int file;  // readable once the process has ended
    std::atomic<bool> dead{false};
  };

  Doorbell& bell_;
  const int wake_;  // eventfd
  std::vector<Peer> peers_;
  std::atomic<int> deaths_{0};
};

}  // namespace farandole
