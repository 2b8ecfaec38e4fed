// What becomes of a key whose votes are complete: a pure function of the votes and the set.
#pragma once

#include <functional>
#include <vector>

#include "coordinator/negotiation_state.h"

namespace farandole {

struct Outcome {
  enum class What : uint8_t { kRun, kSkip, kRefuse };
  What what = What::kRun;
  Status why;                    ///< kRefuse.
  std::vector<RankMask> absent;  ///< kRun: of the members that run, ascending ranks.
  Mask skipped;                  ///< kRun: members nobody contributes.
  bool uniform = true;           ///< kRun: every member runs, with the same absent set.
};

/// `key` is how messages name it. `votes` has at least one signature; its lists are ascending.
/// `signature(i)` is the i-th one in full. docs/protocol.md, "Down", has the order of the cases.
/// Kinds without tensors only run or are refused.
Outcome ValidateRound(const KeyName& key, const KeyVotes& votes, const std::vector<int32_t>& ranks,
                      const std::function<const Signature&(size_t)>& signature);

}  // namespace farandole
