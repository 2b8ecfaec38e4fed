#include "coordinator/liveness/table.h"

#include "coordinator/control/frame_coalescer.h"

namespace farandole {
namespace {

constexpr int kHere = -1;

int RankOf(const Status& error) {
  const std::vector<int32_t>& ranks = error.facts().ranks;
  return ranks.empty() ? kHere : ranks.front();
}

Clarity ClarityOf(const Status& error) {
  if (error.code() == Code::kTimeout) return Clarity::kTimeout;
  if (error.code() != Code::kUnavailable) return Clarity::kFailure;
  const FailureFacts& facts = error.facts();
  if (facts.kind == FailureKind::kLinkDown) return Clarity::kSilence;
  const bool is_known = facts.kind != FailureKind::kUnknown || facts.pid != 0;
  return is_known ? Clarity::kProcess : Clarity::kConnection;
}

}  // namespace

void LivenessTable::Note(const Status& error) { Add(error, ClarityOf(error)); }

void LivenessTable::NoteAgreed(const Status& error) { Add(error, Clarity::kShared); }

void LivenessTable::Hear(std::span<const std::byte> failure) {
  const Status error = DecodeFailure(failure);
  if (!error.ok()) Add(error, Clarity::kShared);
}

void LivenessTable::Add(const Status& error, Clarity clarity) {
  {
    const std::lock_guard lock(mutex_);
    Finding& finding = findings_[RankOf(error)];
    const bool is_first = finding.error.ok();
    if (!is_first && clarity <= finding.clarity) return;
    if (is_first || clarity == Clarity::kShared) finding.since_ns = SteadyClock().NowNs();
    finding.error = error;
    finding.clarity = clarity;
  }
  news_.fetch_add(1, std::memory_order_release);
  if (bell_ != nullptr) bell_->Ring();
}

void LivenessTable::NoteEnd(int rank) {
  {
    const std::lock_guard lock(mutex_);
    findings_[rank].has_ended = true;
  }
  ends_.fetch_add(1, std::memory_order_release);
}

bool LivenessTable::HasEnded(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = findings_.find(rank);
  return found != findings_.end() && found->second.has_ended;
}

// Its peers do not look at the same time. One that has lost it ends the generation, and the others
// are to know why before they would have lost it themselves.
void LivenessTable::NoteStopped(int rank, bool is_stopped) {
  const std::lock_guard lock(mutex_);
  findings_[rank].is_stopped = is_stopped;
}

void LivenessTable::NoteParting(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (RankOf(why) != kHere) findings_[RankOf(why)].parting = why;
}

LivenessTable::Absent LivenessTable::absent() const {
  const std::lock_guard lock(mutex_);
  Absent absent;
  for (const auto& [rank, finding] : findings_) {
    if (rank == kHere) continue;
    switch (finding.error.facts().kind) {
      case FailureKind::kKilled:
      case FailureKind::kExited:
      case FailureKind::kOutOfMemory:
        absent.ended.push_back(rank);
        break;
      case FailureKind::kStopped:
      case FailureKind::kFrozen:
        (finding.has_ended ? absent.ended : absent.silent).push_back(rank);
        break;
      case FailureKind::kLinkDown:
        (finding.has_ended ? absent.ended : absent.cut_off).push_back(rank);
        break;
      case FailureKind::kUnknown:
      case FailureKind::kError:
      case FailureKind::kDiverged:
      case FailureKind::kBlockedInPython:
      case FailureKind::kBlockedInC:
        if (finding.has_ended) {
          absent.ended.push_back(rank);
        } else if (finding.is_stopped) {
          absent.silent.push_back(rank);
        }
        break;
    }
  }
  return absent;
}

LivenessTable::Cause LivenessTable::Judge() {
  const std::lock_guard lock(mutex_);
  const Finding* best = nullptr;
  for (const auto& [rank, finding] : findings_) {
    if (finding.error.ok()) continue;
    const bool is_better = best == nullptr || finding.clarity > best->clarity ||
                           (finding.clarity == best->clarity && finding.since_ns < best->since_ns);
    if (is_better) best = &finding;
  }
  if (best == nullptr) return {};
  const int64_t now_ns = SteadyClock().NowNs();
  if (asked_ns_ == 0) asked_ns_ = now_ns;
  const bool waits = best->clarity == Clarity::kConnection && now_ns < asked_ns_ + cause_ns_;
  const Status& parting = best->parting;
  if (parting.facts().ranks == best->error.facts().ranks && !parting.ok()) {
    return {parting, false, true};
  }
  return {best->error, best->clarity == Clarity::kShared, !waits};
}

}  // namespace farandole
