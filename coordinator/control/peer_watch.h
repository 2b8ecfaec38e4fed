// Notices when a process of this host ends, is stopped, or has failed and cannot say so itself.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/doorbell.h"
#include "core/status.h"

namespace farandole {

/// A process's sign of life, in memory that the ranks of a host share; zero at first. Written by
/// the thread that watches, which holds no lock of the engine's and calls no library that may
/// block: so a stuck engine still has a pulse, and a stopped process has none.
struct Pulse {
  static constexpr size_t kErrorBytes = 1008;

  alignas(64) std::atomic<uint32_t> beats;  // grows while the thread runs; 0: it does not yet, or
                                            // not any more
  std::atomic<int32_t> thread;              // its number
  std::atomic<uint32_t> failed;             // 1: `error` says with what, and the next who failed
  int32_t failed_rank;                      // another rank, of which this one was told; -1: itself
  char error[kErrorBytes];                  // text that ends with 0
};

/// How many processes of a process's control group the system has killed for want of memory. It
/// does not say which; so a rank that is killed seconds after it has grown is taken for one of
/// them.
class OomKills {
 public:
  explicit OomKills(pid_t process);
  /// Since the last call, or since this exists.
  bool HaveGrown();

 private:
  int64_t Read() const;
  std::string file_;  // empty: there is no such count
  int64_t seen_ = 0;
};

/// Other ranks of this host as processes that may die or be stopped. A thread of the engine's
/// watches; the transport asks, and reports who is lost.
///
/// Each is held by a file descriptor of the process (pidfd, Linux 5.3), which no later process of
/// the same number can be taken for. Where the system has or gives none, a rank is not watched.
///
/// A stopped process (SIGSTOP, Ctrl-Z) is lost after `patience_ns`, a frozen one (a cgroup's
/// freezer) after five times as long, both counted in times that this process has lived through: a
/// machine that stands still as a whole loses nobody. One that a debugger stops, or that is ready
/// to run and gets no processor, is never lost.
///
/// Thread safety: Add, UsePulses and BeginPulse before all else; Watch and EndPulse by one thread;
/// the rest by any. Lifetime: the bell and the pulses' memory outlive it.
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
  /// @param pulses  Of the host's `ranks`, in that order; `mine` is the position of this one.
  /// @param patience_ns  0: stopped processes are waited for.
  void UsePulses(std::span<Pulse> pulses, std::span<const int> ranks, size_t mine,
                 int64_t patience_ns);
  /// Sleeps for `timeout_ns`, or until Wake, while peers that are lost are noticed.
  void Watch(int64_t timeout_ns);
  /// Ends the Watch in progress and every later one.
  void Wake();

  /// From now on this process is expected to have a pulse; the first Watch follows at once.
  void BeginPulse() { Beat(); }
  /// From now on it is not.
  void EndPulse();
  /// Reports the error of an engine that is stuck to those who watch this process.
  void Report(const Status& error);

  /// How many are lost so far.
  int losses() const { return losses_.load(std::memory_order_acquire); }
  bool IsLost(size_t position) const {
    return peers_[position].lost.load(std::memory_order_acquire);
  }
  /// Of one that is lost: whether its process has ended.
  bool HasEnded(size_t position) const { return peers_[position].has_ended; }
  size_t size() const { return peers_.size(); }
  int rank(size_t position) const { return peers_[position].rank; }
  /// Of one that is lost: "rank 1 (pid 1234 on host a) was killed by signal 9 (Killed)", with what
  /// is known of its process as facts.
  Status WhyLost(size_t position) const;
  /// What a rank of this host did last, as text and since when; empty: unknown.
  using DescribeLast = std::function<std::string(int rank, int64_t* age_ns)>;
  /// Before all else. Called by the thread that watches.
  void SetDescribeLast(DescribeLast describe) { describe_last_ = std::move(describe); }

 private:
  struct Peer {
    Peer(int a_rank, pid_t a_pid, int a_file)
        : rank(a_rank), pid(a_pid), file(a_file), oom_kills(a_pid) {}
    Peer(Peer&& other) noexcept
        : rank(other.rank),
          pid(other.pid),
          file(other.file),
          oom_kills(std::move(other.oom_kills)) {}
    int rank;
    pid_t pid;
    int file;  // readable once the process has ended
    // Of one with a pulse.
    const Pulse* pulse = nullptr;
    uint32_t beats = 0;     // at the last look
    int64_t silent_ns = 0;  // since then, in times lived through
    OomKills oom_kills;     // of its control group, before
    // Written before `lost`.
    bool has_ended = false;
    Status why = {};
    std::atomic<bool> lost{false};
  };

  void LoseEnded(Peer& peer);
  void Lose(Peer& peer, const std::string& why, FailureFacts facts);
  void Lose(Peer& peer, Status why);
  void Beat();
  bool CheckPulse(Peer& peer, int64_t period_ns);

  Doorbell& bell_;
  const int wake_;  // eventfd
  std::vector<Peer> peers_;
  Pulse* mine_ = nullptr;
  int64_t patience_ns_ = 0;
  DescribeLast describe_last_;
  int watches_ = 0;    // so far
  int end_tries_ = 0;  // left for all processes that are found to have ended together
  std::atomic<int> losses_{0};
};

}  // namespace farandole
