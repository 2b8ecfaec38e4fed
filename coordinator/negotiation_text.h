// The sentences of the negotiation: refusals and stall reports. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/message.h"

namespace farandole {

/// "rank 3", "ranks 0, 2, 5", "ranks 0, 1, 2, 3, ... (12 ranks)".
std::string DescribeRanks(std::vector<int32_t> ranks);

/// "12 s", "0.25 s".
std::string DescribeSeconds(int64_t ns);

/// One signature for people: "float32 [64,128]", "3 tensors", "ranks 0, 1".
std::string DescribeShort(const Signature& signature);

/// Who sent which signature; the signatures differ.
struct Sent {
  const Signature* signature = nullptr;
  std::vector<int32_t> ranks;
};
/// Names the first thing that differs:
/// allreduce "x": rank 0 sent float32 [64,128], rank 2 sent float32 [64,256]; shapes must be equal
std::string DescribeMismatch(const KeyName& key, std::vector<Sent> sent);

/// Ranks that submit one key are in different steps, or ran unequal numbers of backward passes:
/// allreduce "x": in step 7 rank 0 ran 2 backward passes, rank 1 ran 1 and called step(); ...
/// @param steps  Different ones; each says who told it.
std::string DescribeSteps(const KeyName& key, std::vector<StepVotes> steps);

/// allreduce "x": rank 2 failed: <its text>
std::string DescribeFailures(const KeyName& key, const std::vector<RankText>& failed);

/// What rank 0 knows when a query ends.
struct StallFacts {
  KeyName key;
  int64_t waited_ns = 0;        ///< At least so long.
  std::vector<Answer> answers;  ///< Any order.
  std::vector<int32_t> silent;  ///< Members that gave no answer.
  std::vector<int32_t> joined;  ///< Members that need not submit.
};
/// "" if nobody waits or nobody is missing: the key was decided meanwhile.
std::string DescribeStall(const StallFacts& facts);

}  // namespace farandole
