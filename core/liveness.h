// Where all who notice that a rank is gone, silent or has failed say so.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>

#include "core/status.h"

namespace farandole {

/// The findings of one rank about the others, for its engine. Implemented by LivenessTable
/// (coordinator/liveness).
///
/// Thread safety: any thread; never blocks, takes no lock but its own. Lifetime: outlives those who
/// write to it.
class Liveness {
 public:
  virtual ~Liveness() = default;
  /// The job cannot go on: `error` names in its facts the rank that is lost, whose messages have
  /// all come before. Of a rank the finding that explains its end best stands.
  virtual void Note(const Status& error) = 0;
  /// A rank's final error as it came, encoded by EncodeFailure (coordinator/control).
  virtual void Hear(std::span<const std::byte> failure) = 0;
  /// The process of `rank` has ended, well or not: nobody reads what is sent to it.
  virtual void NoteEnd(int rank) = 0;
  virtual bool HasEnded(int rank) const = 0;
  /// Its process is stopped by a signal, for a time that a rank may be; or is so no more.
  virtual void NoteStopped(int rank, bool is_stopped) = 0;

  /// How often somebody has noted or heard something so far.
  int news() const { return news_.load(std::memory_order_acquire); }
  /// How many processes have ended so far.
  int ends() const { return ends_.load(std::memory_order_acquire); }

 protected:
  std::atomic<int> news_{0};
  std::atomic<int> ends_{0};
};

/// "rank 3".
std::string RankName(int rank);

/// Unavailable: the connection between `peer` and this rank, `self`, has broken, and nobody knows
/// yet why. What is said holds at either end, as both ranks may live.
/// @param what  "connection", "data connection".
/// @param why   What the system says, and where.
Status LostConnection(int peer, int self, const std::string& what, const std::string& why);

}  // namespace farandole
