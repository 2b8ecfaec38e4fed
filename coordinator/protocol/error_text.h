// The error messages of the negotiation, and the words for ranks and signatures. Pure
// functions; diagnosis/stall_report.h has what users read about stalls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/protocol/messages.h"

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

/// The name of the tensor of a group that differs, "" if the whole group does or it has no name.
std::string MismatchedTensor(const std::vector<Sent>& sent);

/// Ranks that submit one key are in different steps, or ran unequal numbers of backward passes:
/// allreduce "x": in step 7 rank 0 ran 2 backward passes, rank 1 ran 1 and called step(); ...
/// @param steps  Different ones; each says who reported it.
std::string DescribeSteps(const KeyName& key, std::vector<StepVotes> steps);

/// What a submission ends with whose process set has ended: allreduce "x": rank 2 has left
Status DescribeEnd(const KeyName& key, const Status& why);

/// allreduce "x": rank 2 failed: <its text>
std::string DescribeFailures(const KeyName& key, const std::vector<RankText>& failed);

}  // namespace farandole
