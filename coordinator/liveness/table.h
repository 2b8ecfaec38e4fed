// What a rank knows of the others' ends: who is dead or silent, or has failed, why and since when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "core/liveness.h"
#include "core/status.h"

namespace farandole {

/// How well a finding explains why the job ends, from what says least on. Of findings that say as
/// much the first counts.
enum class Clarity : uint8_t {
  kTimeout,     ///< Work of this rank made no progress.
  kSilence,     ///< A rank cannot be reached.
  kConnection,  ///< A connection is gone: its rank may have died, or the network have failed.
  kFailure,     ///< Something failed on this rank.
  kProcess,  ///< What has become of a rank's process: its exit code, its signal, or it is stopped.
  kShared,   ///< A final error that other ranks have, or get, in the same words.
};

/// Thread safety: any thread. Rings the doorbell for each finding.
class LivenessTable final : public Liveness {
 public:
  /// How long a connection that is gone waits for the finding that says why: who watches the
  /// process may be another rank, and takes a few ms for the exit code.
  static constexpr int64_t kCauseNs = 100 * kNsPerMs;

  /// @param bell  May be nullptr; outlives the table.
  /// @param cause_ns  0: no other finding follows that of a connection.
  explicit LivenessTable(Doorbell* bell = nullptr, int64_t cause_ns = 0)
      : bell_(bell), cause_ns_(cause_ns) {}

  void Note(const Status& error) override;
  void Hear(std::span<const std::byte> failure) override;
  void NoteEnd(int rank) override;
  bool HasEnded(int rank) const override;
  void NoteStopped(int rank, bool is_stopped) override;
  /// What all ranks have decided to end with, each by itself.
  void NoteAgreed(const Status& error);
  /// Why a rank has left, as it said itself. The job goes on; should it end by this rank, this is
  /// why, as the end of its process soon after says less.
  void NoteParting(const Status& why);

  struct Cause {
    Status error;            ///< OK: nobody is gone, and nothing has failed.
    bool is_shared = false;  ///< See Clarity::kShared.
    bool is_final = false;   ///< No better explanation is awaited.
  };
  Cause Judge();

  /// Of what is known of ranks' ends, what counts for who may go on without them. That a connection
  /// is gone says nothing: its rank may have ended the generation first.
  struct Absent {
    std::vector<int> ended;    ///< A kernel has seen the end of the process, or it has said so.
    std::vector<int> silent;   ///< Stopped or frozen; also for less long than makes it lost.
    std::vector<int> cut_off;  ///< Nothing comes from there: so may it be with all of that host.
  };
  Absent absent() const;

 private:
  struct Finding {
    Status error = {};  // OK: none
    Clarity clarity = Clarity::kTimeout;
    int64_t since_ns = 0;  // the first finding about this rank, or when it was heard; SteadyClock
    Status parting = {};
    bool has_ended = false;
    bool is_stopped = false;
  };

  void Add(const Status& error, Clarity clarity);

  Doorbell* const bell_;
  const int64_t cause_ns_;
  mutable std::mutex mutex_;
  int64_t asked_ns_ = 0;             // when Judge found something first
  std::map<int, Finding> findings_;  // by rank; -1: of this one's own work
};

}  // namespace farandole
