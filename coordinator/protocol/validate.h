// Checks of what is submitted, and what becomes of a key whose votes are complete. Pure functions.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "coordinator/protocol/state.h"

namespace farandole {

/// Refuses what can never run: what CheckLimits refuses, and an operation or root that does not
/// fit. `members` are the ranks of the set.
/// @return InvalidArgument naming the key, the value and what was expected.
Status Validate(const KeyName& name, const Signature& signature, std::span<const int32_t> members);

struct Outcome {
  enum class What : uint8_t { kRun, kSkip, kRefuse };
  What what = What::kRun;
  Status why;                    ///< kRefuse.
  std::vector<RankMask> absent;  ///< kRun: of the tensors that run, ascending ranks.
  Mask skipped;                  ///< kRun: tensors nobody contributes.
  bool uniform = true;           ///< kRun: every tensor runs, with the same absent set.
  std::vector<int64_t> rows;     ///< kRun, allgather: WorkItem::rows.
};

/// `key` is how messages name it. `votes` has at least one signature; its lists are ascending.
/// `signature(i)` is the i-th one in full. docs/protocol.md, "Down", has the order of the cases.
/// Kinds without tensors only run or are refused. `known`: rows of the last decision of an
/// allgather's id; empty: there was none. `join_allreduce_only`: see NegotiationOptions.
Outcome ValidateRound(const KeyName& key, const KeyVotes& votes, const std::vector<int32_t>& ranks,
                      const std::function<const Signature&(size_t)>& signature,
                      std::span<const int64_t> known, bool join_allreduce_only);

}  // namespace farandole
