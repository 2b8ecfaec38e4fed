// How the CUDA batches of a process set travel, judged from what all its members told.
#pragma once

#include <span>
#include <string>

#include "core/status.h"
#include "ops/cuda/card.h"

namespace farandole {

struct WayChoice {
  enum class Way {
    kSolo,        ///< One member: nothing travels.
    kNccl,        ///< NCCL, one GPU per rank.
    kNcclShared,  ///< NCCL although ranks share a GPU, as the user asked.
    kStaged,      ///< Through host memory.
  };
  Way way = Way::kStaged;
  std::string why;     ///< kStaged: why not NCCL, and what would help; two sentences.
  std::string advice;  ///< What may go wrong with this choice, or empty; one sentence.
};

/// The first NCCL that lets ranks share a GPU.
inline constexpr int kNcclOfSharedGpus = 23000;
/// What NCCL may put into /dev/shm per rank of a host: a generous bound, for a warning only.
inline constexpr int64_t kNcclShmBytesPerRank = int64_t{32} << 20;

/// The same answer on all members, because all see the same cards. Pure.
///
/// Ranks on one GPU are staged, unless all of them have an NCCL that can share it and the user
/// asked for that; a set in which a rank has no NCCL is staged.
///
/// @param cards  One per member, ascending ranks; at least one.
/// @return The failure of the first rank that cannot use its GPU, naming it; Mismatch naming
/// ranks, versions and files where NCCL's versions differ, which NCCL does not bear.
Result<WayChoice> ChooseWay(std::span<const RankCard> cards);

/// "rank 0: host a, GPU 0000:17:00.0; rank 1: ...": which rank sits where, cut for many ranks.
std::string DescribeRanks(std::span<const RankCard> cards);

}  // namespace farandole
