// The observers of a negotiation: stalls, divergence and late ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/diagnosis/stall_report.h"
#include "coordinator/protocol/negotiation_observer.h"

namespace farandole {

struct LateRank;

/// Where they speak to. Calls come from inside the negotiation, and must not call back into it.
class DetectorListener {
 public:
  virtual ~DetectorListener() = default;
  /// What has stalled at about the same time, where the sets are decided for.
  /// @return what the members shall read about it, by NegotiationListener::OnReport; may be empty.
  virtual std::vector<std::string> OnStalls(const std::vector<StallFacts>& stalls,
                                            int64_t now_ns) = 0;
  /// Such lines have come: on all members, and where it was decided or missed.
  virtual void OnStallReported() {}
  /// Begins to find out what this rank's program does, which submits nothing.
  /// @param threads  As of ProgramProbe::Ask. @return false if that cannot be known.
  virtual bool AskActivity(std::vector<uint64_t>, int64_t) { return false; }
  /// The last step of this rank, once; nullopt: it has ended none since.
  virtual std::optional<StepTimes> TakeStep() { return std::nullopt; }
  /// Rank 0: a rank makes the others wait.
  virtual void OnLate(const LateRank&) {}
  /// What has been found out, after AskActivity; nullopt: not yet.
  virtual std::optional<Activity> FindActivity(int64_t) { return std::nullopt; }
};

/// For a Negotiation, which `listener` outlives, of ranks on `hosts` hosts.
ObserveNegotiation Detectors(DetectorListener& listener, size_t hosts = 1);

}  // namespace farandole
