// The messages of the protocol as plain structs; docs/protocol.md explains them, message_fields.h
// says how they travel.
//
// One fat struct per direction instead of a type per message: vectors keep their capacity from use
// to use, so the steady state allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "coordinator/protocol/request.h"
#include "core/status.h"
#include "core/step_times.h"

namespace farandole {

inline constexpr uint32_t kNoId = UINT32_MAX;

/// A node of the tree that decides for process sets numbers its decisions, and the ids it gives
/// out, by itself. In front stands its level, its distance from rank 0: of every level one node
/// lies on the way from rank 0 to a rank, so on each rank all numbers differ, and all ids.
inline constexpr int kNumberLevelBit = 48;
inline constexpr int kIdLevelBit = 20;
constexpr int LevelOfNumber(int64_t number) { return static_cast<int>(number >> kNumberLevelBit); }
constexpr int LevelOfId(uint32_t id) { return static_cast<int>(id >> kIdLevelBit); }
constexpr uint32_t IndexOfId(uint32_t id) { return id & ((uint32_t{1} << kIdLevelBit) - 1); }
constexpr uint32_t MakeId(int level, uint32_t index) {
  return static_cast<uint32_t>(level) << kIdLevelBit | index;
}

/// How many of the first `ids` (at least one) follow one another.
inline size_t LengthOfRun(std::span<const uint32_t> ids) {
  size_t length = 1;
  while (length < ids.size() && ids[length] == ids[length - 1] + 1) ++length;
  return length;
}

/// A rank's mask over a key's tensors.
struct RankMask {
  int32_t rank = 0;
  Mask mask;
  bool operator==(const RankMask&) const = default;
};

/// The rows that a rank passes to an allgather, of each tensor of the key.
struct RankRows {
  int32_t rank = 0;
  std::vector<int64_t> rows;
  bool operator==(const RankRows&) const = default;
};

struct RankText {
  int32_t rank = 0;
  std::string text;
  bool operator==(const RankText&) const = default;
};

/// One signature and who submitted it.
struct SignatureVotes {
  uint32_t id = kNoId;  ///< Known id of (key, signature); then `signature` need not travel.
  Signature signature;
  std::vector<int32_t> ranks;  ///< Filled only when the key is mixed.
  bool operator==(const SignatureVotes&) const = default;
};

/// One step count and who reported it.
struct StepVotes {
  StepCount count;
  std::vector<int32_t> ranks;  ///< Filled only when several counts were reported.
  bool operator==(const StepVotes&) const = default;
};

/// The step count of `length` ids in a row.
struct StepRun {
  uint32_t length = 0;
  StepCount count;
  bool operator==(const StepRun&) const = default;
};

/// The votes of one whole subtree on one key: a record, a mixed record, or a bit with exceptions.
struct KeyVotes {
  KeyName key;                             ///< Need not travel when one signature has an id.
  std::vector<SignatureVotes> signatures;  ///< One, or several when ranks differ (mixed).
  std::vector<RankMask> absent;            ///< Ascending ranks; joined ranks have every bit set.
  std::vector<RankMask> clean;
  std::vector<RankText> failed;
  std::vector<StepVotes> steps;  ///< Different ones; empty: not reported.
  /// Allgather: of ranks that voted by record, or whose rows are others than in the last decision
  /// of the id that they voted by.
  std::vector<RankRows> rows;
  bool operator==(const KeyVotes&) const = default;
};

enum class UpType : uint8_t {
  kVotes = 0,
  kJoin,
  kLeave,
  kDone,
  kStall,
  kAnswer,
  kUnused,
  kBlocked,
  kWaits,
  kLeaving,
  kSteps
};

/// What the program of a rank does that submits nothing, as the runtime of its language tells.
struct Activity {
  FailureKind kind = FailureKind::kUnknown;  ///< kBlockedInPython, kBlockedInC; kUnknown: untold.
  std::string text;                          ///< Where; may be empty.
  bool operator==(const Activity&) const = default;
};

/// What a member of a query's set knows about the stalled key.
struct Answer {
  int32_t rank = 0;
  bool pending = false;
  std::string signature;  ///< As text, when pending.
  std::string last;       ///< Last operation submitted, as text; empty if none.
  int64_t last_age_ns = 0;
  /// Of a pending group of gradients: how many, and the names of the first few.
  int32_t tensors = 0;
  std::vector<std::string> names = {};
  Activity doing = {};  ///< Unless it is pending.
  bool operator==(const Answer&) const = default;
};

/// Ranks that have these same keys pending.
struct WaitingRanks {
  std::vector<int32_t> ranks;  ///< Ascending.
  std::vector<KeyName> keys;   ///< All that they have pending; without the function.
  /// They may submit more, as not all their threads wait for these.
  bool may_go_on = false;
  bool in_order = false;  ///< All ranks submit these keys in the same order.
  /// Threads of theirs that have made no call yet may submit more.
  bool may_have_more_threads = false;
  std::string place = {};  ///< Where they are in their program, if that was asked for and is known.
  bool operator==(const WaitingRanks&) const = default;
};

/// From a child to its parent.
struct UpMessage {
  UpType type = UpType::kVotes;
  std::vector<uint32_t> ids;   ///< kVotes: keys ready in the subtree, present without exception.
  std::vector<StepRun> steps;  ///< kVotes: of `ids`, from the first on; no count for the rest.
  std::vector<KeyVotes> keys;  ///< kVotes: the rest; counted after `ids`.
  int32_t rank = 0;            ///< kJoin, kLeaving, kLeave, kBlocked.
  FailureFacts facts;          ///< kLeave: why; see Negotiation::Leave.
  /// kDone, kUnused: decision; kAnswer, kWaits: query; kStall, kVotes: last decision applied by the
  /// sender.
  int64_t number = 0;
  int32_t index = 0;            ///< kDone: batch index within the decision; kUnused: the set's uid.
  KeyName key;                  ///< kStall.
  std::vector<Answer> answers;  ///< kAnswer.
  std::vector<WaitingRanks> waiting;  ///< kWaits.
  std::vector<StepTimes> times;       ///< kSteps.
  bool operator==(const UpMessage&) const = default;

  /// As new, but for the type. Strings and vectors keep their memory, so that in the steady state a
  /// message allocates nothing.
  void Clear() {
    ids.clear();
    steps.clear();
    keys.clear();
    rank = 0;
    facts = {};
    number = 0;
    index = 0;
    key.set = kGlobalSet;
    key.kind = OpKind::kAllreduce;
    key.name.clear();
    answers.clear();
    waiting.clear();
    times.clear();
  }
};

enum class DownType : uint8_t {
  kWork = 0,
  kSkip,
  kRefuse,
  kQuery,
  kRetire,
  kStallShutdown,
  kReport,
  kAddSet,
  kRemoveSet,
  kJoinDone,
  kLeft,
  kShutdown,
  kWhoWaits
};

/// A key inside a Work decision.
struct WorkItem {
  uint32_t id = kNoId;  ///< Either a known id...
  KeyName key;          ///< ...or the key and its signature in full,
  Signature signature;
  uint32_t bind = kNoId;         ///< which, if set, from now on has this id.
  std::vector<RankMask> absent;  ///< Who contributes nothing, per tensor.
  Mask skipped;                  ///< Tensors that nobody contributes: not run at all.
  /// Allgather: rows of each rank of the set by position, tensor after tensor; an absent rank's are
  /// 0. Empty: as in the last decision of this id.
  std::vector<int64_t> rows;
  bool operator==(const WorkItem&) const = default;
};

/// A decision (or a query), from a parent to its children.
struct DownMessage {
  DownType type = DownType::kWork;
  /// Ascending among the decisions of a node; a rank sees those that concern its branches.
  int64_t number = 0;
  /// kWork, kSkip, kRefuse, kQuery, kRetire; the new or ended set in kAddSet, kRemoveSet.
  uint32_t set = kGlobalSet;
  /// kWork: keys by id without exceptions; they come before `items`. kRetire: nobody votes by these
  /// any more.
  std::vector<uint32_t> ids;
  std::vector<WorkItem> items;  ///< kWork: the rest.
  KeyName key;                  ///< kSkip, kRefuse, kQuery; the AddSet/RemoveSet key.
  /// kRefuse, kStallShutdown; kReport: its lines.
  std::string text;
  int32_t code = 0;  ///< kRefuse, kStallShutdown: Code of the Status.
  /// kJoinDone: last to join; kLeft: who left; kWhoWaits: 1 asks where they are, too.
  int32_t rank = 0;
  /// kAddSet; kReport: whom it concerns; kRefuse, kStallShutdown: those of the next.
  std::vector<int32_t> ranks;
  FailureFacts facts;           ///< kRefuse, kStallShutdown; kLeft: see kLeave.
  std::vector<uint8_t> planes;  ///< kAddSet: plane per DeviceKind, as agreed in the hellos.
  bool operator==(const DownMessage&) const = default;

  /// As UpMessage::Clear.
  void Clear() {
    number = 0;
    set = kGlobalSet;
    ids.clear();
    items.clear();
    key.set = kGlobalSet;
    key.kind = OpKind::kAllreduce;
    key.name.clear();
    text.clear();
    code = 0;
    rank = 0;
    ranks.clear();
    facts = {};
    planes.clear();
  }
};

/// A rank's final error on its way to all others. The negotiation, which may be what broke, has no
/// part in it.
struct AbortMessage {
  int32_t rank = 0;  ///< Whose error it is; -1: decided for all, as a stall's.
  Code code = Code::kInternal;
  std::string text;  ///< The cause, or what was decided.
  /// Who failed: `rank`, or a peer that it has lost, or those that the decision names. `cause` is
  /// `text`.
  FailureFacts facts = {};
  bool operator==(const AbortMessage&) const = default;
};

}  // namespace farandole
