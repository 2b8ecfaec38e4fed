// Notices when a process of this host ends, is stopped, or has failed and cannot say so itself.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/control/pulse.h"
#include "core/liveness.h"

namespace farandole {

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
/// watches, and notes who is lost.
///
/// Each is held by a file descriptor of the process (pidfd, Linux 5.3), which no later process of
/// the same number can be taken for. Where the system has or gives none, a rank is not watched.
///
/// A stopped process (SIGSTOP, Ctrl-Z) is lost after `patience_ns`, a frozen one (a cgroup's
/// freezer) after five times as long, both counted in times that this process has lived through: a
/// machine that stands still as a whole loses nobody. One that a debugger stops, or that is ready
/// to run and gets no processor, is never lost, nor is one that ends after it has left.
///
/// Thread safety: Add, UsePulses and BeginPulse before all else; Watch and EndPulse by one thread;
/// Wake and Report by any. Lifetime: the table and the pulses' memory outlive it.
class PeerWatch {
 public:
  explicit PeerWatch(Liveness& table);
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
  /// Passes the error of an engine that is stuck, by EncodeFailure, to those who watch this
  /// process.
  void Report(std::span<const std::byte> failure);

  /// What a rank of this host did last, as text and since when; empty: unknown.
  using DescribeLast = std::function<std::string(int rank, int64_t* age_ns)>;
  /// Before all else. Called by the thread that watches.
  void SetDescribeLast(DescribeLast describe) { describe_last_ = std::move(describe); }

 private:
  struct Peer {
    int rank;
    pid_t pid;
    int file;            // readable once the process has ended; -1: it has, and that is noted
    OomKills oom_kills;  // of its control group, before
    // Of one with a pulse.
    const Pulse* pulse = nullptr;
    uint32_t beats = 0;     // at the last look
    int64_t silent_ns = 0;  // since then, in times lived through
    bool is_lost = false;
  };

  void NoteEnd(Peer& peer);
  void Lose(Peer& peer, const std::string& why, FailureFacts facts);
  void Beat();
  bool CheckPulse(Peer& peer, int64_t period_ns);

  Liveness& table_;
  const int wake_;  // eventfd
  std::vector<Peer> peers_;
  Pulse* mine_ = nullptr;
  int64_t patience_ns_ = 0;
  DescribeLast describe_last_;
  int watches_ = 0;    // so far
  int end_tries_ = 0;  // left for all processes that are found to have ended together
};

}  // namespace farandole
