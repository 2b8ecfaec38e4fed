// What the ranks of one run are going to do: drawn from a seed, the same for every schedule.
//
// All ranks go through one script of operations, each in its own order within a window. A phase of
// the script ends with a join; a rank may join before it has submitted everything of the phase.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/protocol/negotiation.h"

namespace farandole::simulation {

enum class Flavour : uint8_t {
  kPlain,       // everybody present
  kVotes,       // random absent and clean tensors
  kNobody,      // everybody absent or clean: must be skipped
  kDisagree,    // one member sends another signature
  kFailed,      // one member's backward failed
  kRootAbsent,  // broadcast: the root votes absent
  kInvalid,     // AddSet with the ranks of the global set, RemoveSet of an unknown uid
};

struct Op {
  int set = 0;     ///< Logical set; 0 is the global one.
  int target = 0;  ///< AddSet, RemoveSet: which logical set.
  OpKind kind = OpKind::kAllreduce;
  std::string name;
  int phase = 0;
  int previous = -1;  ///< The operation before it with the same key.
  int variant = 0;    ///< Which of its key's signatures the members agree on.
  Flavour flavour = Flavour::kPlain;
  uint64_t salt = 0;
};

struct Scenario {
  uint64_t seed = 0;
  int size = 1;
  std::vector<int> parent;
  // Of the negotiation.
  int64_t fusion_threshold_bytes = 0;
  /// Each kind of device has its own.
  int64_t FusionThreshold(DeviceKind device) const {
    return device == DeviceKind::kCuda ? fusion_threshold_bytes / 2 : fusion_threshold_bytes;
  }
  int window = 2;
  uint32_t max_ids = 65'536;
  int64_t stall_ns = 0;
  bool forgets = false;  ///< Idle ids and keys at once.
  bool repeats = false;  ///< Rounds of the same operations in the same order, with exceptions.
  bool agrees = false;   ///< Sets share memory: ops/agreement.h.
  // Of the schedule.
  int link_delay = 1;
  int think = 1;
  int flush_delay = 0;
  int run_time = 1;
  int slow_link = -1;  ///< The child whose link to its parent is 100 times slower.
  int look_ahead = 1;  ///< How far a rank's order may differ from the script's.
  bool eager = false;  ///< Resubmit a key as soon as it is handed out, before its batch is done.
  bool joined_ranks_run = true;  ///< Absent ranks that joined take part in batches, and report.
  bool serial_cuda = false;      ///< All batches of a rank's GPU run one after the other.

  std::vector<std::vector<int32_t>> sets;  ///< Ranks of each logical set.
  std::vector<int> add_op;                 ///< The operation that adds each set.
  std::vector<Op> ops;
  std::vector<int> phase_end;             ///< Position in `ops`, exclusive.
  std::vector<std::vector<int>> join_at;  ///< [rank][phase]: position at which the rank joins.
  std::vector<int> leave_at;              ///< [rank]: position, or -1: at the end.
  /// Position at which the ranks turn to different operations, which follow the script: even ones
  /// to the first of them, odd ones to the second. -1: nowhere.
  int part_at = -1;

  bool IsMember(const Op& op, int rank) const;
  bool WaitsAt(int rank, int position) const;
  /// `uid` of a RemoveSet's target.
  Signature SignatureOf(const Op& op, int rank, uint32_t uid) const;
  Vote VoteOf(const Op& op, int rank) const;
};

Scenario MakeScenario(uint64_t seed);
/// Everything takes `factor` times as long.
void SlowDown(Scenario& scenario, int factor);
/// Of at least two ranks, which come to wait for one another for ever at some place of the script.
void LetRanksPart(Scenario& scenario);

}  // namespace farandole::simulation
