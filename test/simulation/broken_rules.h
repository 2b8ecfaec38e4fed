// Rules of docs/protocol.md and coordinator/membership/README.md that simulation_rules switches
// off, one at a time: the simulator must fail without each.
//
// break_rules.cmake puts the switches into copies of sources; production has none.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "coordinator/protocol/messages.h"

namespace farandole {

enum BrokenRule : uint32_t {
  kNoRule = 0,
  kRefuseEarly = 1u << 0,  ///< Refuse at the first disagreement instead of when all members voted.
  kSendKeyPerVote = 1u << 1,  ///< Do not wait until every member below has submitted.
  kDeriveAbsentFromJoined =
      1u << 2,  ///< Absent set = who has joined by now, instead of travelling with the vote.
  kJoinBeforeVotes = 1u << 3,        ///< On a join send the join before the votes it completes.
  kJoinDoneEarly = 1u << 4,          ///< Decide JoinDone although ready keys are undecided.
  kSplitGroup = 1u << 5,             ///< Let a group's batches be decided in several decisions.
  kReporterIgnoresAbsent = 1u << 6,  ///< The lowest member reports although it is absent.
  kForwardBeforeApply = 1u << 7,     ///< Forward a decision (and execute) before applying it.
  kJoinWhenIdle = 1u << 8,           ///< Hold a join back until nothing of this rank is in flight.
  kMeetLateIds = 1u << 9,            ///< Take a late vote's id for the key that has it by now.
  kJoinEndOvertakes = 1u << 10,      ///< Pass a JoinDone on before what is ready here.
  kFreeIdsAtOnce = 1u << 11,         ///< Free retired ids while votes by them are on their way.

  kStepsAreRounds = 1u << 27,  ///< A step, which nobody waits for, begins a new round.

  kHalfWithoutFirst = 1u << 12,     ///< Half of the voters go on without the first one.
  kDeathsShrinkQuorums = 1u << 13,  ///< A majority of those that live is enough.
  kSuspectsAreDead = 1u << 14,      ///< Who cannot be reached counts as dead.
  kForgetPending = 1u << 15,        ///< A list whose join failed here counts no more.
  kVoteWhileLeftOut = 1u << 17,     ///< Newcomers vote although others may still go on.
  kVoteAtOnce = 1u << 19,           ///< Newcomers vote before a list has started.
  kWaitForEver = 1u << 21,          ///< A minority does not halt.
  kPingNobody = 1u << 22,           ///< Ends that no engine sees stay unknown.
  kLetJoinsWait = 1u << 23,         ///< Do not tell a process in a join that others have gone on.
  kAwaitSilentLeader = 1u << 24,    ///< Join a list whose leader cannot be reached.
  kGiveNoVotes = 1u << 25,          ///< No new generation once all that were left out have ended.
  kCountOutdated = 1u << 26,        ///< A list counts though a member will never accept it.
};

inline BrokenRule broken_rule = kNoRule;  // in force for all ranks of the process
inline bool Broken(BrokenRule rule) { return broken_rule == rule; }

/// kForwardBeforeApply: decisions that an Applier has forwarded and applies at the next Flush.
inline std::map<const void*, std::deque<DownMessage>> late_decisions;

/// Breaks a rule during its lifetime.
class BreakRule {
 public:
  explicit BreakRule(BrokenRule rule) { broken_rule = rule; }
  ~BreakRule() {
    broken_rule = kNoRule;
    late_decisions.clear();
  }
  BreakRule(const BreakRule&) = delete;
  BreakRule& operator=(const BreakRule&) = delete;
};

}  // namespace farandole
