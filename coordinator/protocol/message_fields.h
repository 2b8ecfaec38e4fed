// The one description of the fixed layouts: what a message of each type holds, in which order, and
// between which limits. It drives the writer, the reader (control/wire/bytes.h) and the tests that
// break each field.
//
// An archive has `kReads` and a function for each sort of field. Its `Records` takes what carries
// names or text (control/wire/records.h); only the last field of a message does.
#pragma once

#include <cstdint>
#include <type_traits>

#include "coordinator/protocol/limits.h"
#include "coordinator/protocol/messages.h"

namespace farandole {

/// Of an abort; what is longer is cut. MPI libraries send so little without the receiver's help.
inline constexpr size_t kMaxAbortBytes = 1024;
/// Likewise: of its host, operation and tensor, and of the ranks that failed.
inline constexpr size_t kMaxAbortFact = 256;
inline constexpr size_t kMaxAbortRanks = 64;

/// What an archive is shown of a T: a writer must not change it.
template <class Archive, class T>
using Of = std::conditional_t<Archive::kReads, T, const T>;

/// In lists: a rank.
template <class Archive>
void Fields(Archive& archive, Of<Archive, int32_t>& rank) {
  archive.Number("rank", rank, 0, kMaxRanks - 1);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, StepCount>& count) {
  archive.Number("step", count.step, 0);
  archive.Number("backward passes", count.passes, 0);
  archive.Number("backward passes", count.no_sync_passes, 0);
  archive.Number("backward passes", count.previous_passes, 0);
  archive.Number("backward passes", count.previous_no_sync_passes, 0);
}

/// 28 bytes for ids with equal counts, of which a round of gradients usually needs one run. How
/// many ids a run covers is not checked, since VoteTally takes no more than there are.
template <class Archive>
void Fields(Archive& archive, Of<Archive, StepRun>& run) {
  archive.Number("length of a run of step counts", run.length);
  Fields(archive, run.count);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, StepTimes>& times) {
  Fields(archive, times.rank);
  archive.Number("step", times.step, 1);
  archive.Number("time of a step", times.ns, 0);
  archive.Number("blocked time", times.blocked_ns, 0);
  archive.Number("time of input", times.input_ns, 0);
  archive.Number("time without a processor", times.queued_ns, 0);
  archive.Number("time of garbage collection", times.collecting_ns, 0);
  archive.Number("time in other groups", times.other_groups_ns, 0);
  archive.Number("time of a link", times.link_ns, 0);
  archive.Number("bytes over a link", times.link_bytes, 0);
}

/// Without the ranks. @param most Of each text, in bytes.
template <class Archive>
void Fields(Archive& archive, Of<Archive, FailureFacts>& facts, size_t most) {
  archive.Enum("kind of failure", facts.kind, kLastFailureKind);
  archive.Number("signal or exit code", facts.number);
  archive.Number("process id", facts.pid);
  archive.Number("age", facts.last_age_ns);
  archive.Text("host", facts.host, most);
  archive.Text("last operation", facts.last, most);
  archive.Text("tensor", facts.tensor, most);
  archive.Text("cause", facts.cause, most);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, UpMessage>& message) {
  switch (message.type) {
    case UpType::kVotes:
      archive.Number("number", message.number, 0);
      archive.Ids(message.ids);
      archive.List("runs of step counts", message.steps, message.ids.size());
      return archive.Records(message.keys);
    case UpType::kJoin:
    case UpType::kLeaving:
    case UpType::kBlocked:
      return Fields(archive, message.rank);
    case UpType::kLeave:
      Fields(archive, message.rank);
      return Fields(archive, message.facts, kMaxNameBytes);
    case UpType::kDone:
    case UpType::kUnused:
      archive.Number("number", message.number, 0);
      return archive.Number("index", message.index);
    case UpType::kStall:
      archive.Number("number", message.number, 0);
      return archive.Records(message.key);
    case UpType::kAnswer:
      archive.Number("number", message.number, 0);
      return archive.Records(message.answers);
    case UpType::kWaits:
      archive.Number("number", message.number, 0);
      return archive.Records(message.waiting);
    case UpType::kSteps:
      return archive.List("step times", message.times, kMaxStepTimes);
  }
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, DownMessage>& message) {
  archive.Number("number", message.number, 0);
  switch (message.type) {
    case DownType::kWork:
    case DownType::kRetire:
      archive.Number("process set", message.set);
      archive.Ids(message.ids);
      if (message.type == DownType::kWork) archive.Records(message.items);
      return;
    case DownType::kJoinDone:
    case DownType::kShutdown:
    case DownType::kWhoWaits:
      return Fields(archive, message.rank);
    case DownType::kLeft:
      Fields(archive, message.rank);
      return Fields(archive, message.facts, kMaxNameBytes);
    case DownType::kRefuse:
    case DownType::kStallShutdown:
      Fields(archive, message.facts, kMaxNameBytes);
      [[fallthrough]];
    case DownType::kSkip:
    case DownType::kQuery:
    case DownType::kReport:
    case DownType::kAddSet:
    case DownType::kRemoveSet:
      archive.Number("process set", message.set);
      return archive.Records(message);
  }
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, AbortMessage>& message) {
  archive.Number("rank", message.rank, -1, kMaxRanks - 1);
  archive.Enum("code", message.code, Code::kInternal, 1);
  Fields(archive, message.facts, kMaxAbortFact);
  archive.List("failed ranks", message.facts.ranks, kMaxAbortRanks);
  archive.Text("text", message.text, kMaxAbortBytes);
}

}  // namespace farandole
